"""Outliers: images of none of a model's classes, and defects on parts of which only good ones are known."""

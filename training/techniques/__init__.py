"""Techniques that a recipe turns on: what they change in the model, in its loss or in its training step."""

"""Segmentation: models that segment are trained, used and measured."""

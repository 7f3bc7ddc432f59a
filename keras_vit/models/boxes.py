"""Boxes: conversion, overlap. Tensors (..., 4) of keras.ops, or NumPy arrays, as shares of the image or in pixels."""

from keras import ops


def to_corners(boxes):
    """Centre x and y, width and height (..., 4) -> left, top, right, bottom (..., 4)."""
    x, y, width, height = (boxes[..., i] for i in range(4))
    return ops.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=-1)


def overlaps(corners, others):
    """(intersection over union, generalised IoU) of boxes (..., 4) as corners, which are broadcast against each other.

    Generalised IoU (arXiv 1902.09630), in (-1, 1]: IoU less the share of the smallest enclosing box that neither of the
    two covers. Boxes without area give 0 instead of a division by 0.
    """
    shared = _area(ops.maximum(corners[..., :2], others[..., :2]), ops.minimum(corners[..., 2:], others[..., 2:]))
    union = _area(corners[..., :2], corners[..., 2:]) + _area(others[..., :2], others[..., 2:]) - shared
    around = _area(ops.minimum(corners[..., :2], others[..., :2]), ops.maximum(corners[..., 2:], others[..., 2:]))
    iou = _share(shared, union)
    return iou, iou - _share(around - union, around)


def _area(first, last):
    sides = ops.maximum(last - first, 0.0)
    return sides[..., 0] * sides[..., 1]


def _share(part, whole):
    return ops.where(whole > 0.0, part / ops.where(whole > 0.0, whole, 1.0), 0.0)

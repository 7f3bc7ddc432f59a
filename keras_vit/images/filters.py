"""Resample images with a filter: the same pixels with NumPy, in a graph of TensorFlow, and on any backend of Keras.

The filters are Pillow's (`src/libImaging/Resample.c`): wider when an image shrinks (antialiasing), normalized at the
edges, applied to rows first and to columns then. Of bytes, Pillow rounds after each axis.
"""

import math
import sys
from typing import Any

import numpy as np

from keras_vit.images.geometry import Interpolation

# The half width of each filter, in pixels of the output.
SUPPORT = {"box": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos3": 3.0}


def weights(side, resized, begin, length: int, interpolation: Interpolation, antialias: bool, *, ops: Any = np):
    """Weights (length, side) of the pixels of one axis, of which `resized` pixels are made and `length` are kept.

    A row sums to 1, or to 0 outside of the resized image.

    Args:
        side: pixels of the image, a float or a float scalar of `ops`.
        resized: pixels of the whole resized axis, likewise.
        begin: the first of these to keep; negative before the image.
        length: how many to keep.
        interpolation: the filter. "area" is the mean of the area that an output pixel covers (TensorFlow).
        antialias: whether the filter grows with the reduction.
        ops: numpy, or the operations of a backend.
    """
    float_type = "float64" if ops is np else "float32"
    row = ops.reshape(ops.arange(length, dtype=float_type) + begin, (length, 1))
    pixel = (
        ops.arange(int(side), dtype=float_type)
        if ops is np
        else ops.cast(ops.arange(ops.cast(side, "int32")), float_type)
    )
    pixel = ops.reshape(pixel, (1, -1))
    step = side / resized  # pixels of the image per pixel of the output
    inside = (row >= 0.0) & (row < resized)
    if interpolation == "area":
        covered = ops.minimum(pixel + 1.0, (row + 1.0) * step) - ops.maximum(pixel, row * step)
        found = ops.maximum(covered, 0.0)
    elif interpolation == "nearest":
        found = ops.where(ops.equal(ops.floor((row + 0.5) * step), pixel), ops.ones_like(pixel), 0.0 * pixel)
    else:
        scale = ops.maximum(step, 1.0) if antialias else 1.0
        found = kernel(interpolation, (pixel + 0.5 - (row + 0.5) * step) / scale, ops)
    found = ops.where(inside, found, 0.0 * found)
    total = ops.sum(found, axis=1, keepdims=True)
    return found / ops.where(ops.abs(total) < 1e-6, ops.ones_like(total), total)


def kernel(interpolation: str, x, ops: Any):
    """The filter at distances x from its center, in pixels of the output; `ops` is numpy, tensorflow or keras.ops."""
    if interpolation == "box":
        return ops.where((x > -0.5) & (x <= 0.5), ops.ones_like(x), 0.0 * x)
    x = ops.abs(x)
    if interpolation == "bilinear":
        return ops.maximum(1.0 - x, 0.0)
    if interpolation == "bicubic":  # Keys 1981 with a = -0.5
        near = (1.5 * x - 2.5) * x * x + 1.0
        far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
        found = ops.where(x < 1.0, near, far)
    else:  # lanczos3
        found = _sinc(x, ops) * _sinc(x / 3.0, ops)
    return ops.where(x < SUPPORT[interpolation], found, 0.0 * x)


def _sinc(x, ops):
    angle = math.pi * ops.maximum(x, 1e-9)
    return ops.sin(angle) / angle


def columns_first(sides, size):
    """Whether Pillow 13 resizes the columns first: (height, width) -> (height, width), numbers or tensors."""
    return (sides[0] > size[0]) & (sides[0] - size[0] > 2 * (sides[1] - size[1]))


def resample(image, rows, columns, *, round_bytes: bool, ops: Any):
    """Images (..., height, width, C), weights (h, height) of rows and (w, width) of columns -> (..., h, w, C) float32.

    With `round_bytes` the results are the whole numbers 0..255 to which Pillow rounds, after each axis.
    """
    planes, columns = ops.moveaxis(ops.cast(image, "float32"), -1, -3), ops.transpose(columns)
    if not round_bytes:
        return ops.moveaxis(ops.matmul(ops.matmul(rows, planes), columns), -3, -1)

    def rounded(products):
        return ops.clip(ops.floor(products + 0.5), 0.0, 255.0)

    # Pillow takes static sides: a graph of TensorFlow has its own form.
    if columns_first(planes.shape[-2:], (rows.shape[0], columns.shape[1])):
        planes = rounded(ops.matmul(rounded(ops.matmul(rows, planes)), columns))
    else:
        planes = rounded(ops.matmul(rows, rounded(ops.matmul(planes, columns))))
    return ops.moveaxis(planes, -3, -1)


def resize_with_pillow(image: np.ndarray, size: tuple[int, int], interpolation: str) -> np.ndarray:
    """Bytes (h, w, C) -> (height, width, C) uint8, by Pillow."""
    import PIL.Image  # imported here: most that is done with arrays needs no Pillow

    if image.shape[:2] == tuple(size):
        return image
    resampling = PIL.Image.Resampling["LANCZOS" if interpolation == "lanczos3" else interpolation.upper()]
    if image.shape[-1] == 3:
        return np.asarray(PIL.Image.fromarray(image).resize(size[::-1], resampling))
    planes = [PIL.Image.fromarray(np.ascontiguousarray(image[..., channel])) for channel in range(image.shape[-1])]
    return np.stack([np.asarray(plane.resize(size[::-1], resampling)) for plane in planes], axis=-1)


def is_tensor_of_tensorflow(image) -> bool:
    """Whether an image is a tensor of TensorFlow, eager or in a graph; TensorFlow may not even be installed."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and tensorflow.is_tensor(image)

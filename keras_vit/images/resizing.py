"""Resize images as the libraries do: which part of an image a model sees, how large, and by which filter.

Lengths and places, with their rounding: resize_small and central_crop of big_vision; get_resize_output_image_size and
center_crop of transformers 5.23; transforms_imagenet_eval, ResizeKeepRatio and CenterCropOrPad of timm 1.0.31; Resize
and CenterCrop of torchvision 0.29.

The filters are Pillow's (`src/libImaging/Resample.c`): wider when an image shrinks (antialiasing), normalized at the
edges, applied to rows first and to columns then. Of bytes, Pillow rounds after each axis. "gaussian" is scikit-image's
resize instead: SciPy's `gaussian_filter` and `zoom`, which mirror the image at its edges.
"""

import math
import sys
from typing import Any, Literal, NamedTuple

import numpy as np

Resize = Literal["stretch", "crop", "pad", "resize-small"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "lanczos3", "area", "gaussian"]
Library = Literal["tensorflow", "transformers", "timm"]
Background = Literal["white", "gray", "black"]
Padding = Literal["around", "after"]
# The half width of each filter, in pixels of the output.
SUPPORT = {"box": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos3": 3.0}


def scaled_crop(crop_from: int, side: int, new_side: int) -> int:
    """Return the side that images are resized to before the crop of another side, which then shows the same part."""
    return max(round(crop_from * new_side / side), new_side)


class Placement(NamedTuple):
    """How one axis of an image becomes one axis of the model's input; numbers, or tensors in a graph."""

    first: Any  # first pixel of the window that is resized
    window: Any  # pixels of the window
    resized: Any  # pixels that the window is resized to
    begin: Any  # first pixel of the center crop of the resized window
    before: Any  # pixels of padding before the crop


def placements(
    sides: tuple[Any, Any],
    size: tuple[int, int],
    resize: Resize,
    crop_from: int | tuple[int, int] | None,
    library: Library,
    xp: Any = np,
    *,
    padding: Padding = "around",
) -> list[Placement]:
    """Return the placements of height and width.

    Args:
        sides: height and width of the image in pixels, float64, for in float64 all results are whole numbers and exact.
        size: height and width of the model's input.
        resize, crop_from, library, padding: see `Preprocessing`.
        xp: the module of `floor`, `round`, `minimum` and `maximum`: numpy, tensorflow or keras.ops.
    """
    windows: list[Any] = [*sides]
    if resize == "crop":  # as keras.ops.image.resize(crop_to_aspect_ratio=True)
        height, width = size
        shape = xp.floor(sides[1] * height / width), xp.floor(sides[0] * width / height)
        both = zip(sides, shape, strict=True)
        windows = [xp.maximum(xp.minimum(side, other), 1.0 + 0.0 * side) for side, other in both]
    resized = _resized(sides, size if crop_from is None else crop_from, resize, library, xp)
    # timm crops with torchvision, which rounds half to even.
    rounded = xp.round if library == "timm" else xp.floor
    return [
        Placement(
            first=xp.floor((side - window) / 2.0),
            window=window,
            resized=result,
            begin=xp.maximum(rounded((result - length) / 2.0), 0.0 * result),
            before=xp.maximum(xp.floor((length - result) / 2.0), 0.0 * result) * float(padding == "around"),
        )
        for side, window, result, length in zip(sides, windows, resized, size, strict=True)
    ]


def _resized(
    sides: tuple[Any, Any], target: int | tuple[int, int], resize: Resize, library: Library, xp: Any
) -> list[Any]:
    """Return pixels to which height and width are resized before the crop or the padding."""
    if resize == "resize-small" and isinstance(target, int):
        small = xp.minimum(*sides)
        # The product first: for the smaller side it is exact. big_vision rounds, the PyTorch libraries truncate.
        rounded = xp.round if library == "tensorflow" else xp.floor
        return [rounded(target * side / small) for side in sides]
    if resize in ("resize-small", "pad"):
        ratios = [side / length for side, length in zip(sides, pair(target), strict=True)]
        ratio = xp.maximum(*ratios) if resize == "pad" else xp.minimum(*ratios)
        return [xp.maximum(xp.round(side / ratio), 1.0 + 0.0 * side) for side in sides]
    return [0.0 * side + length for side, length in zip(sides, pair(target), strict=True)]


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return height and width of a size, of which one number is both."""
    return (size, size) if isinstance(size, int) else size


def weights(side, resized, begin, length: int, interpolation: Interpolation, antialias: bool, *, ops: Any = np):
    """Weights (length, side) of the pixels of one axis, of which `resized` pixels are made and `length` are kept.

    A row sums to 1, or to 0 outside of the resized image.

    Args:
        side: pixels of the image, a float or a float scalar of `ops`.
        resized: pixels of the whole resized axis, likewise.
        begin: the first of these to keep; negative before the image.
        length: how many to keep.
        interpolation: the filter. "area" is the mean of the area that an output pixel covers (TensorFlow).
            "gaussian" blurs before it interpolates, and takes float64 also in a graph.
        antialias: whether the filter grows with the reduction.
        ops: numpy, or the operations of a backend.
    """
    float_type = "float64" if ops is np or interpolation == "gaussian" else "float32"
    row = ops.reshape(ops.arange(length, dtype=float_type) + begin, (length, 1))
    pixel = np.arange(int(side)) if ops is np else ops.arange(ops.cast(side, "int32"))
    pixel = ops.reshape(pixel.astype(float_type) if ops is np else ops.cast(pixel, float_type), (1, -1))
    step = side / resized  # pixels of the image per pixel of the output
    inside = (row >= 0.0) & (row < resized)
    if interpolation == "area":
        covered = ops.minimum(pixel + 1.0, (row + 1.0) * step) - ops.maximum(pixel, row * step)
        matrix = ops.maximum(covered, 0.0)
    elif interpolation == "gaussian":
        matrix = _blurred(row, side, step, antialias, ops)
    elif interpolation == "nearest":
        matrix = ops.where(ops.equal(ops.floor((row + 0.5) * step), pixel), ops.ones_like(pixel), 0.0 * pixel)
    else:
        scale = ops.maximum(step, 1.0) if antialias else 1.0
        matrix = kernel(interpolation, (pixel + 0.5 - (row + 0.5) * step) / scale, ops)
    matrix = ops.where(inside, matrix, 0.0 * matrix)
    total = ops.sum(matrix, axis=1, keepdims=True)
    return matrix / ops.where(ops.abs(total) < 1e-6, ops.ones_like(total), total)


def _blurred(row, side, step, antialias: bool, ops: Any):
    """Weights (length, side) of gaussian_filter, then zoom with order=1 and grid_mode=True, both with mode="mirror".

    The standard deviation is half of what `step` exceeds 1 by, as in skimage.transform.resize; row is (length, 1).
    """
    sigma = ops.maximum(step - 1.0, 0.0) / 2.0 if antialias else 0.0 * step
    radius = ops.floor(4.0 * sigma + 0.5)
    width = ops.maximum(sigma, 1e-9)
    taps = ops.arange(int(2 * radius) + 2) if ops is np else ops.arange(ops.cast(2.0 * radius, "int32") + 2)
    taps = (taps.astype("float64") if ops is np else ops.cast(taps, "float64")) - radius  # (T,)

    def gaussian(x):
        return ops.where(ops.abs(x) <= radius, ops.exp(-0.5 * (x / width) ** 2), 0.0 * x)

    place = _mirrored((row + 0.5) * step - 0.5, side, ops)
    near = ops.floor(place)
    shares = (1.0 - (place - near)) * gaussian(taps) + (place - near) * gaussian(taps - 1.0)  # (length, T)
    pixel = _mirrored(near + taps, side, ops)
    if ops is np:
        dense = np.zeros((len(row), int(side)))
        np.add.at(dense, (np.arange(len(row))[:, None], pixel.astype(int)), shares)
        return dense
    pixel = ops.cast(pixel, "int32")
    rows = ops.arange(row.shape[0], dtype="int32")[:, None] + ops.zeros_like(pixel)
    shape = (row.shape[0], ops.cast(side, "int32"))
    return ops.scatter(ops.stack([rows, pixel], axis=-1), ops.cast(shares, "float32"), shape)


def _mirrored(place, side, ops: Any):
    """Places of an axis, those beside it mirrored at the centers of its first and last pixel."""
    place = ops.abs(place)
    return ops.maximum(ops.minimum(place, 2.0 * (side - 1.0) - place), 0.0)


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
        values = ops.where(x < 1.0, near, far)
    else:  # lanczos3
        values = _sinc(x, ops) * _sinc(x / 3.0, ops)
    return ops.where(x < SUPPORT[interpolation], values, 0.0 * x)


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
    """Return whether an image is a tensor of TensorFlow, eager or in a graph; TensorFlow may not even be installed."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and tensorflow.is_tensor(image)

"""Which part of an image a model sees, and how large: the rules of the libraries, with their rounding.

Sources: resize_small and central_crop of big_vision; get_resize_output_image_size and center_crop of transformers 5.23;
transforms_imagenet_eval, ResizeKeepRatio and CenterCropOrPad of timm 1.0.31; Resize and CenterCrop of torchvision 0.29.
"""

from typing import Any, Literal, NamedTuple

import numpy as np

Resize = Literal["stretch", "crop", "pad", "resize-small"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "lanczos3", "area", "gaussian"]
Library = Literal["tensorflow", "transformers", "timm"]
Background = Literal["white", "gray", "black"]
Padding = Literal["around", "after"]


def scaled_crop(crop_from: int, side: int, new_side: int) -> int:
    """The side in pixels that images are resized to before a center crop of another side than the usual one.

    It grows with the crop, which thus shows the same part of a picture.
    """
    return max(round(crop_from * new_side / side), new_side)


class Placement(NamedTuple):
    """How one axis of an image becomes one axis of the model's input; numbers, or tensors in a graph."""

    first: Any
    """First pixel of the window that is resized."""
    window: Any
    """Pixels of the window."""
    resized: Any
    """Pixels that the window is resized to."""
    begin: Any
    """First pixel of the center crop of the resized window."""
    before: Any
    """Pixels of padding before the crop."""


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
    """The placements of height and width.

    Args:
        sides: height and width of the image in pixels, float64, for in float64 all results are whole numbers and exact.
        size: height and width of the model's input.
        resize: see `Preprocessing`.
        crop_from: see `Preprocessing`.
        library: see `Preprocessing`.
        xp: the module of `floor`, `round`, `minimum` and `maximum`: numpy, tensorflow or keras.ops.
        padding: see `Preprocessing`.
    """
    firsts: tuple[Any, Any] = 0.0 * sides[0], 0.0 * sides[1]
    windows = sides
    if resize == "crop":  # as keras.ops.image.resize(crop_to_aspect_ratio=True)
        height, width = size
        shape = xp.floor(sides[1] * height / width), xp.floor(sides[0] * width / height)
        windows = tuple(
            xp.maximum(xp.minimum(side, other), 1.0 + 0.0 * side) for side, other in zip(sides, shape, strict=True)
        )
        firsts = tuple(xp.floor((side - window) / 2.0) for side, window in zip(sides, windows, strict=True))
    resized = _resized(sides, size if crop_from is None else crop_from, resize, library, xp)
    # timm crops with torchvision, which rounds half to even.
    rounded = xp.round if library == "timm" else xp.floor
    return [
        Placement(
            first,
            window,
            result,
            xp.maximum(rounded((result - length) / 2.0), 0.0 * result),
            xp.maximum(xp.floor((length - result) / 2.0), 0.0 * result) * float(padding == "around"),
        )
        for first, window, result, length in zip(firsts, windows, resized, size, strict=True)
    ]


def _resized(
    sides: tuple[Any, Any], target: int | tuple[int, int], resize: Resize, library: Library, xp: Any
) -> list[Any]:
    """Pixels to which height and width are resized before the crop or the padding."""
    if resize == "resize-small" and isinstance(target, int):
        small = xp.minimum(*sides)
        # The product first: for the smaller side it is exact. big_vision rounds, the PyTorch libraries truncate.
        rounded = xp.round if library == "tensorflow" else xp.floor
        return [rounded(target * side / small) for side in sides]
    if resize in ("resize-small", "pad"):
        ratios = [side / length for side, length in zip(sides, _pair(target), strict=True)]
        ratio = xp.maximum(*ratios) if resize == "pad" else xp.minimum(*ratios)
        return [xp.maximum(xp.round(side / ratio), 1.0 + 0.0 * side) for side in sides]
    return [0.0 * side + length for side, length in zip(sides, _pair(target), strict=True)]


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size

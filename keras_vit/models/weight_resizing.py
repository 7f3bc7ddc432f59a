"""Resize position embeddings to another grid and patch embeddings to other patches, on NumPy arrays.

For positions, code bases use several resampling methods, each for its own checkpoints. All are separable: one matrix
for the rows, one for the columns.
"""

import math
from typing import Literal, get_args

import numpy as np

from keras_vit.errors import check_choice, check_integers, check_known

Resampler = Literal[
    # vit_jax `checkpoint.py`: `scipy.ndimage.zoom` of order 1, which is bilinear with aligned corners but for the sizes
    # at which SciPy leaves the last row and column zero (28 -> 48 among them).
    "bilinear-aligned",
    "bicubic-aligned",  # torchvision `interpolate_embeddings`: torch bicubic, align_corners=True
    "bilinear",  # timm for .npz files, and FlexiViT's patches: half-pixel centers, no antialiasing
    "bicubic",  # Hugging Face `interpolate_pos_encoding`: torch bicubic, align_corners=False
    "bicubic-offset",  # DINOv2 without registers: the same, 0.1 added to the new size for the places of the samples
    "bicubic-antialias",  # timm `resample_abs_pos_embed` otherwise: torch bicubic, antialias=True
    "bicubic-keras",  # keras-hub's DINOv2: keras.ops.image.resize, whose backends differ by a few 1e-4
    "bilinear-keras",  # kmodels: the same with antialias=True
]
# How a patch kernel gets other channels.
ChannelRule = Literal["mean", "repeat"]


def check_resampler(name: str) -> None:
    """Raise UserError unless there is a resampler of this name."""
    check_known("resampler", name, get_args(Resampler))


def square_grid(num_tokens: int) -> tuple[int, int] | None:
    """(rows, columns) of a square grid of tokens; None if the number is not a square."""
    side = math.isqrt(max(num_tokens, 0))
    return (side, side) if side > 0 and side * side == num_tokens else None


def resize_position_embedding(
    table: np.ndarray,
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    num_prefix_tokens: int,
    resampler: Resampler = "bilinear-aligned",
) -> np.ndarray:
    """Resample a table of position embeddings.

    Args:
        table: (1, P + h * w, D) or (P + h * w, D); P prefix tokens (class token), then the grid row by row.
        old_grid: (h, w), rows and columns of patches that the table was made for.
        new_grid: rows and columns of the new grid, of any aspect ratio.
        num_prefix_tokens: P; these rows do not change.
        resampler: bilinear-aligned is vit_jax's; see `Resampler` for whose the others are.

    Returns:
        The table for the new grid, of the same rank and dtype; the table itself where the grids are equal.
    """
    table = np.asarray(table)
    (old_h, old_w), (new_h, new_w) = old_grid, new_grid
    check_resampler(resampler)
    if (old_h, old_w) == (new_h, new_w):
        return table
    prefix, grid = table[..., :num_prefix_tokens, :], table[..., num_prefix_tokens:, :]
    grid = grid.reshape(*table.shape[:-2], old_h, old_w, table.shape[-1]).astype(np.float64)
    if resampler.endswith("-keras"):
        grid = _resized_by_keras(grid, new_grid, resampler.removesuffix("-keras"))
    else:
        grid = _product(resampling_matrix(old_h, new_h, resampler), grid, axis=-3)
        grid = _product(resampling_matrix(old_w, new_w, resampler), grid, axis=-2)  # (..., new_h, new_w, D)
    grid = grid.reshape(*table.shape[:-2], new_h * new_w, table.shape[-1]).astype(table.dtype)
    return np.concatenate([prefix, grid], axis=-2)


def _resized_by_keras(grid: np.ndarray, new_grid: tuple[int, int], filter_: str) -> np.ndarray:
    import keras  # lazy: importing it takes seconds

    values = keras.ops.convert_to_tensor(grid.astype(np.float32))
    resized = keras.ops.image.resize(
        values, new_grid, interpolation=filter_, antialias=filter_ == "bilinear", data_format="channels_last"
    )
    return keras.ops.convert_to_numpy(resized)


def resampling_matrix(old: int, new: int, resampler: Resampler) -> np.ndarray:
    """Return the weights of the `old` samples in each of `new`: (new, old), float64, rows that sum to one.

    Beyond the border the outermost sample is repeated; only the antialiased filter is cut off there and scaled back to
    a sum of one (torch `UpSample.h`, `UpSampleKernel.cpp`).
    """
    center = (np.arange(new) + 0.5) * (old / (new + 0.1 if resampler == "bicubic-offset" else new))
    if resampler == "bicubic-antialias":
        # Shrinking widens the filter. Keys' a is -0.5 here, as in Pillow, but -0.75 in torch's plain bicubic.
        weights = _cubic((np.arange(old) + 0.5 - center[:, None]) / max(old / new, 1.0), a=-0.5)
        return weights / weights.sum(axis=1, keepdims=True)
    position = np.linspace(0.0, old - 1, new) if resampler.endswith("-aligned") else center - 0.5
    left = np.floor(position)
    right_share = position - left
    if resampler.startswith("bicubic"):
        taps = left[:, None] + np.arange(-1, 3)
        weights = _cubic(position[:, None] - taps, a=-0.75)
    else:
        taps = left[:, None] + np.arange(2)
        weights = np.stack([1.0 - right_share, right_share], axis=1)
    matrix = np.zeros((new, old))
    np.add.at(matrix, (np.arange(new)[:, None], np.clip(taps, 0, old - 1).astype(np.int64)), weights)
    return matrix


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel (IEEE TASSP 1981) of slope `a` at distance 1, zero from distance 2 on."""
    x = np.abs(distance)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = a * (((x - 5.0) * x + 8.0) * x - 4.0)
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _product(matrix: np.ndarray, values: np.ndarray, axis: int) -> np.ndarray:
    """`matrix` (new, old) times `values` along one axis of length old.

    Summed in a fixed order and without the fused multiply-add of BLAS, so that a checkpoint becomes the same bits on
    every machine.
    """
    samples = np.moveaxis(values, axis, 0)
    product = sum(np.multiply.outer(column, sample) for column, sample in zip(matrix.T, samples, strict=True))
    return np.moveaxis(product, 0, axis)


def resize_patch_kernel(kernel: np.ndarray, new_patch: tuple[int, int]) -> np.ndarray:
    """Resize the kernel so that resized patches keep their embedding, as far as they can (FlexiViT).

    With B the bilinear resize of a patch (half-pixel centers, no antialiasing: tf.image.resize), the new kernel is
    pinv(B^T) w, for each channel and output (arXiv 2212.08013 section 3.4; big_vision `models/proj/flexi/vit.py`). Up,
    <B x, new> = <x, w> for every patch x. Down, it is the nearest on average over patches of white noise.

    Args:
        kernel: (h, w, C, D), the convolution kernel of the patch embedding.
        new_patch: height and width of the new patches in pixels.

    Returns:
        (new_h, new_w, C, D) of the same dtype; the kernel itself where the sizes are equal.
    """
    kernel = np.asarray(kernel)
    (old_h, old_w), (new_h, new_w) = kernel.shape[:2], new_patch
    if (old_h, old_w) == (new_h, new_w):
        return kernel
    # B is the Kronecker product of a resize of rows and one of columns, and its pseudo-inverse that of theirs.
    rows = np.linalg.pinv(resampling_matrix(old_h, new_h, "bilinear").T)  # (new_h, old_h)
    columns = np.linalg.pinv(resampling_matrix(old_w, new_w, "bilinear").T)  # (new_w, old_w)
    resized = np.einsum("yh,xw,hwcd->yxcd", rows, columns, kernel.astype(np.float64), optimize=True)
    return resized.astype(kernel.dtype)


def adapt_channels(kernel: np.ndarray, channels: int, how: ChannelRule) -> np.ndarray:
    """Give the kernel another number of input channels.

    Args:
        kernel: (h, w, C, D), the convolution kernel of the patch embedding.
        channels: the number wanted.
        how: mean: every new channel gets the sum over the old ones divided by `channels`, so that a gray image given
            on all channels has the same embedding as before (with 1 channel, timm's `adapt_input_conv`). repeat: new
            channel i gets old channel i modulo C times C / `channels` (with more than 1 channel, timm's
            `adapt_input_conv`), so that the first channels keep their meaning; gray keeps its embedding only where
            `channels` is a multiple of C.

    Returns:
        (h, w, channels, D) of the same dtype; the kernel itself where it has that number already.
    """
    kernel = np.asarray(kernel)
    check_choice("how", how, get_args(ChannelRule))
    check_integers("channels", channels)
    old = kernel.shape[2]
    if channels == old:
        return kernel
    values = kernel.astype(np.float64)
    if how == "mean":
        adapted = np.repeat(values.sum(axis=2, keepdims=True) / channels, channels, axis=2)
    else:
        adapted = values[:, :, np.arange(channels) % old] * (old / channels)
    return adapted.astype(kernel.dtype)

"""Patch embeddings for patches of another size or pictures of other channels: NumPy in, NumPy out."""

from typing import Literal, get_args

import numpy as np

from keras_vit.errors import UserError
from keras_vit.models.position_resizing import resampling_matrix

ChannelRule = Literal["mean", "repeat"]


def resize_patch_kernel(kernel: np.ndarray, new_patch: tuple[int, int]) -> np.ndarray:
    """Resize the kernel so that resized patches keep their embedding, as far as they can (FlexiViT).

    With B the bilinear resize of a patch (half-pixel centres, no antialiasing: tf.image.resize), the new kernel is
    pinv(B^T) w, for each channel and output (arXiv 2212.08013 section 3.4; big_vision `models/proj/flexi/vit.py`). Up,
    <B x, new> = <x, w> for every patch x. Down, it is the nearest on average over patches of white noise.

    Args:
        kernel: (h, w, C, D), the convolution kernel of the patch embedding.
        new_patch: height and width of the new patches in pixels.

    Returns:
        (new_h, new_w, C, D) of the same dtype; the kernel itself where the sizes are equal.
    """
    kernel = _checked(kernel)
    (old_h, old_w), (new_h, new_w) = kernel.shape[:2], new_patch
    if min(new_h, new_w) < 1:
        raise UserError(f"The new patch must have at least 1 row and 1 column, but is {new_h}x{new_w}.")
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
        how: mean: every new channel gets the sum over the old ones divided by `channels`, so that a gray picture given
            on all channels has the same embedding as before (with 1 channel, timm's `adapt_input_conv`). repeat: new
            channel i gets old channel i modulo C times C / `channels` (with more than 1 channel, timm's
            `adapt_input_conv`), so that the first channels keep their meaning; gray keeps its embedding only where
            `channels` is a multiple of C.

    Returns:
        (h, w, channels, D) of the same dtype; the kernel itself where it has that number already.
    """
    kernel = _checked(kernel)
    if how not in get_args(ChannelRule):
        raise UserError(f"how must be one of {', '.join(get_args(ChannelRule))}, but is {how!r}.")
    if channels < 1:
        raise UserError(f"channels must be at least 1, but is {channels}.")
    old = kernel.shape[2]
    if channels == old:
        return kernel
    values = kernel.astype(np.float64)
    if how == "mean":
        adapted = np.repeat(values.sum(axis=2, keepdims=True) / channels, channels, axis=2)
    else:
        adapted = values[:, :, np.arange(channels) % old] * (old / channels)
    return adapted.astype(kernel.dtype)


def _checked(kernel: np.ndarray) -> np.ndarray:
    kernel = np.asarray(kernel)
    if kernel.ndim != 4:
        raise UserError(f"A patch kernel must be (height, width, channels, hidden size), but has shape {kernel.shape}.")
    return kernel

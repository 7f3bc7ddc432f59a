"""How a picture becomes the input of a model: the one definition that training, evaluation and export share.

Written on keras.ops, so that it runs in a tf.data pipeline, inside an exported graph and on any backend alike. Pixels
are 0..255 until `normalize`. Official values: vit_jax `input_pipeline.py` (plain resize, (x - 127.5) / 127.5).
"""

import dataclasses
import operator
from typing import Any, get_args

import keras
import numpy as np
from keras import ops

from keras_vit.errors import UserError, check_integers
from keras_vit.models.config import Background, Resize, make_plain

# ITU-R BT.601 luma, the weights of PIL's convert("L") and of libjpeg.
_LUMA = (0.299, 0.587, 0.114)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """What a model expects of an image. Saved inside the model; see `keras_vit.preprocessing_of`."""

    image_size: tuple[int, int]
    """Height and width in pixels; one number stands for both."""
    channels: int = 3
    """1 for grey, 3 for RGB; any other number only for images that have it already."""
    resize: Resize = "stretch"
    """stretch: bilinear to the size, whatever the aspect (vit_jax). crop: the largest centred window of the right
    aspect, then bilinear with antialiasing. resize-small: the smaller side to crop_from by averaging areas, then the
    centre is cut out (big_vision)."""
    value_range: tuple[float | tuple[float, ...], float | tuple[float, ...]] = (-1.0, 1.0)
    """What 0 and 255 become: a number each, or a number for each channel."""
    crop_from: int | None = None
    """For resize-small, and only there: length of the smaller side before the centre is cut out, in pixels."""
    background: Background | None = "white"
    """What transparent pictures are put on. None drops the alpha, and shows colours that nobody sees; models stored
    before there was a choice do."""

    def __post_init__(self) -> None:
        make_plain(self)  # lists arrive here from JSON and from command lines
        check_integers("channels", self.channels)
        check_integers("crop_from", self.crop_from)
        object.__setattr__(self, "image_size", _pair(self.image_size))
        object.__setattr__(self, "value_range", tuple(_floats(value) for value in self.value_range))
        if len(self.image_size) != 2 or min(self.image_size) < 1:
            raise UserError(f"image_size must be (height, width) in pixels, but is {self.image_size}.")
        if self.resize not in get_args(Resize):
            raise UserError(f"resize must be one of {', '.join(get_args(Resize))}, but is {self.resize!r}.")
        if self.background not in (None, *get_args(Background)):
            raise UserError(f"background must be white or None, but is {self.background!r}.")
        if (self.resize == "resize-small") != (self.crop_from is not None):
            raise UserError(f"resize-small, and nothing else, needs crop_from; {self.resize} has {self.crop_from}.")
        if self.crop_from is not None and self.crop_from < max(self.image_size):
            raise UserError(f"crop_from must be at least both sides of {self.image_size}, but is {self.crop_from}.")
        lows, highs = self.channel_ranges()
        if not len(lows) == len(highs) == self.channels or any(
            low >= high for low, high in zip(lows, highs, strict=False)
        ):
            raise UserError(
                "value_range must be (low, high), a number each or one for each channel, with low below high, but is "
                f"{self.value_range}."
            )

    def channel_ranges(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What 0 and 255 become, for each channel."""
        low, high = ((end,) * self.channels if isinstance(end, float) else end for end in self.value_range)
        return low, high

    def fit(self, image):
        """One decoded image (H, W, C) of any size, 0..255 -> (height, width, channels), 0..255.

        Stays uint8 where it has the size already and is not to be cropped, else becomes float32.
        """
        image = self.to_channels(image)
        if self.resize == "resize-small":
            return _centre_of_resized(image, self.crop_from, self.image_size)
        if tuple(image.shape[:2]) == self.image_size:
            return image
        crop = self.resize == "crop"
        return ops.image.resize(
            ops.cast(image, "float32"),
            self.image_size,
            interpolation="bilinear",
            antialias=crop,
            crop_to_aspect_ratio=crop,
            data_format="channels_last",
        )

    def to_channels(self, image):
        """One decoded image (H, W, C), 1 to 4 channels -> (H, W, channels) of the same dtype, without alpha."""
        return to_channels(image, self.channels, self.background)

    def normalize(self, image):
        """Pixels 0..255 of any dtype -> float32 in value_range; (x - 127.5) / 127.5 for the official range."""
        low, high = (np.asarray(end) for end in self.value_range)
        scale = 255.0 / (high - low)
        zero = ops.convert_to_tensor((-low * scale).astype(np.float32))
        return (ops.cast(image, "float32") - zero) / ops.convert_to_tensor(scale.astype(np.float32))

    def __call__(self, image):
        """One decoded image -> the float32 input of the model, without the batch axis."""
        return self.normalize(self.fit(image))


def _pair(size) -> Any:
    """One integer or two -> two; anything else as it is, to be refused."""
    try:
        sides = (size, size) if isinstance(size, int | np.integer) else tuple(size)
        return tuple(operator.index(side) for side in sides)
    except TypeError:
        raise UserError(f"image_size must be one integer or (height, width) in pixels, but is {size!r}.") from None


def _floats(value) -> float | tuple[float, ...]:
    return tuple(float(number) for number in value) if isinstance(value, list | tuple) else float(value)


def _centre_of_resized(image, smaller_side: int, size: tuple[int, int]):
    """big_vision's resize_small with TensorFlow's "area" method, then its central_crop: (H, W, C) -> (h, w, C) float32.

    An output pixel is the mean of the area of the image that it covers. Each axis is a matrix product, which needs no
    operator that only one backend has, and computes only the part that is kept.
    """
    shape = ops.shape(image)
    smaller = ops.cast(ops.minimum(shape[0], shape[1]), "float32")
    rows, columns = (
        _area_weights(ops.cast(side, "float32"), smaller_side / smaller, length)
        for side, length in zip(shape[:2], size, strict=True)
    )
    planes = ops.transpose(ops.cast(image, "float32"), (2, 0, 1))  # (C, H, W)
    planes = ops.matmul(ops.matmul(rows, planes), ops.transpose(columns))  # (C, h, w)
    return ops.transpose(planes, (1, 2, 0))


def _area_weights(side, factor, length: int):
    """Shares (length, side) that the pixels of one axis have in the central `length` pixels of the resized axis."""
    resized = ops.round(side * factor)
    step = side / resized  # pixels of the image per pixel of the output
    first = ops.floor((resized - length) / 2.0)
    begin = (first + ops.arange(length, dtype="float32")[:, None]) * step  # (length, 1)
    pixel = ops.arange(ops.cast(side, "int32"), dtype="int32")
    pixel = ops.cast(pixel, "float32")[None]  # (1, side)
    covered = ops.minimum(pixel + 1.0, begin + step) - ops.maximum(pixel, begin)
    return ops.maximum(covered, 0.0) / step


def to_channels(image, channels: int, background: Background | None = None):
    """An image (H, W, C) with 1 to 4 channels -> (H, W, channels) of the same dtype.

    Grey becomes RGB by repetition, RGB becomes grey by luma. An alpha, the last of 2 or 4 channels, is dropped, or the
    image is put on a background. C may be unknown until the graph runs.
    """
    if image.shape[-1] == channels:
        return image
    if channels not in (1, 3):
        raise UserError(
            f"An image of {image.shape[-1]} channels cannot become one of {channels}; only 1 and 3 are convertible."
        )
    has_colour = ops.cast(ops.shape(image)[-1] >= 3, "int32")
    rgb = ops.take(image, ops.arange(3, dtype="int32") * has_colour, axis=-1)  # (H, W, 3)
    if background == "white":
        rgb = _on_white(image, rgb)
    if channels == 3:
        return rgb
    grey = ops.sum(ops.cast(rgb, "float32") * ops.convert_to_tensor(_LUMA, dtype="float32"), axis=-1, keepdims=True)
    if keras.backend.is_float_dtype(image.dtype):
        return ops.cast(grey, image.dtype)
    return ops.cast(ops.round(grey), image.dtype)  # (H, W, 1)


def _on_white(image, rgb):
    """What is seen of an image (H, W, C) with colours `rgb` (H, W, 3) on white; itself where it has no alpha.

    Of whole numbers no result lies halfway between two (255 is odd), so that every backend rounds to the same.
    """

    def blended():
        alpha = ops.cast(image[..., -1:], "float32") / 255.0
        seen = 255.0 - (255.0 - ops.cast(rgb, "float32")) * alpha
        return ops.cast(seen if keras.backend.is_float_dtype(image.dtype) else ops.round(seen), image.dtype)

    if image.shape[-1] is not None:
        return blended() if image.shape[-1] % 2 == 0 else rgb
    return ops.cond(ops.equal(ops.shape(image)[-1] % 2, 0), blended, lambda: rgb)

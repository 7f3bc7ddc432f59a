"""Preprocess an image for a model: one definition for training, evaluation and export.

It uses keras.ops, so it runs on any backend, in an exported graph, and in a tf.data pipeline beside any backend. Pixels
are 0..255 until `normalize`. Official values: vit_jax `input_pipeline.py` (plain resize, (x - 127.5) / 127.5).
"""

import dataclasses
import importlib
import operator
import sys
import warnings
from typing import Any, get_args

import keras
import numpy as np

from keras_vit.errors import UserError, check_integers
from keras_vit.models.config import Background, Resize, convert_fields, scaled_crop


class _Operations:
    """keras.ops; while TensorFlow traces a graph on another backend, such as tf.data for JAX, those of TensorFlow."""

    def __getattr__(self, name: str):
        tensorflow = sys.modules.get("tensorflow")
        if tensorflow is None or keras.backend.backend() == "tensorflow" or tensorflow.executing_eagerly():
            return getattr(keras.ops, name)
        backend = importlib.import_module("keras.src.backend.tensorflow")
        return getattr(backend, name, None) or getattr(backend.numpy, name)


ops = _Operations()
# ITU-R BT.601 luma, the weights of PIL's convert("L") and of libjpeg.
_LUMA = (0.299, 0.587, 0.114)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How a model preprocesses images. It is saved inside the model; see `keras_vit.preprocessing_of`."""

    image_size: tuple[int, int]
    """Height and width in pixels. An integer means a square."""
    channels: int = 3
    """1 for grayscale, 3 for RGB. Any other number must match the images."""
    resize: Resize = "stretch"
    """stretch: bilinear to the size, ignoring the aspect ratio (vit_jax). crop: the largest center crop with the aspect
    ratio of the size, then bilinear with antialiasing. pad: the whole image in its aspect ratio, bilinear with
    antialiasing, centered on the background (letterbox). resize-small: area interpolation of the smaller side to
    crop_from, then a center crop (big_vision)."""
    value_range: tuple[float | tuple[float, ...], float | tuple[float, ...]] = (-1.0, 1.0)
    """The values of pixels 0 and 255 after normalization, each a number or one number per channel."""
    crop_from: int | None = None
    """Length of the smaller side before the center crop, in pixels. Only for resize-small."""
    background: Background | None = "white"
    """Background of transparent images. None drops the alpha channel, as models saved before this field existed do."""

    def __post_init__(self) -> None:
        convert_fields(self)  # JSON and command lines give lists
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
        if self.resize == "pad" and self.background is None:
            raise UserError(
                "resize pad fills what the image leaves free with the background, but this model has none; "
                "choose crop or stretch."
            )
        if (self.resize == "resize-small") != (self.crop_from is not None):
            raise UserError(
                f"crop_from is required for resize-small only, but {self.resize} has crop_from {self.crop_from}."
            )
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
        """Return the low and high end of value_range for each channel."""
        low, high = ((end,) * self.channels if isinstance(end, float) else end for end in self.value_range)
        return low, high

    def for_image_size(self, image_size: int | tuple[int, int]) -> "Preprocessing":
        """The same for another image size; it shows the same part of a picture, because crop_from grows with it."""
        crop_from = self.crop_from
        if crop_from is not None:
            side = image_size if isinstance(image_size, int) else max(image_size)
            crop_from = scaled_crop(crop_from, max(self.image_size), side)
        return dataclasses.replace(self, image_size=image_size, crop_from=crop_from)  # type: ignore[arg-type]

    def for_channels(self, channels: int) -> "Preprocessing":
        """The same for another number of channels; a value range for each channel becomes the mean range."""
        value_range = self.value_range
        if channels != self.channels:
            low, high = value_range
            value_range = float(np.mean(low)), float(np.mean(high))
        return dataclasses.replace(self, channels=channels, value_range=value_range)

    def fit(self, image):
        """Resize a decoded image (..., h, w, C), 0..255 -> (..., height, width, channels), 0..255.

        The result is float32, or the dtype of the image if it already has the size.
        """
        image = self.to_channels(image)
        if self.resize == "resize-small":
            return _center_of_resized(image, self.crop_from, self.image_size)
        if self.resize == "pad":
            return _letterboxed(image, self.image_size)
        if tuple(image.shape[-3:-1]) == self.image_size:
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
        """Decoded images (..., h, w, C), 1 to 4 channels -> (..., h, w, channels) of the same dtype, without alpha."""
        return to_channels(image, self.channels, self.background)

    def normalize(self, image):
        """Pixels 0..255 of any dtype -> float32 in value_range; (x - 127.5) / 127.5 for the official range."""
        low, high = (np.asarray(end) for end in self.value_range)
        scale = 255.0 / (high - low)
        zero = ops.convert_to_tensor((-low * scale).astype(np.float32))
        return (ops.cast(image, "float32") - zero) / ops.convert_to_tensor(scale.astype(np.float32))

    def __call__(self, image):
        """Images -> the float32 input of a model.

        Args:
            image: one decoded image (h, w, C), 0..255, or a PIL image -> (height, width, channels). A batch
                (B, h, w, C), or a list of images of any sizes -> (B, height, width, channels).

        Raises UserError for what are no pixels, and for NumPy arrays with other axes or NaN. Warns of NumPy arrays
        whose values cannot be 0..255.
        """
        if isinstance(image, list | tuple):
            return ops.stack([self(one) for one in image])
        return self.normalize(self.fit(_pixels(image)))

    def layer(self, name: str | None = None) -> "PreprocessingLayer":
        """A Keras layer that does the same: images (B, h, w, C), 0..255 -> (B, height, width, channels) float32.

        keras.Sequential([keras.Input((None, None, 3), dtype="uint8"), preprocessing.layer(), model])
        """
        return PreprocessingLayer(self, name=name)


@keras.saving.register_keras_serializable("keras_vit")
class PreprocessingLayer(keras.layers.Layer):
    """`Preprocessing` of a batch as a layer; see `Preprocessing.layer`. Its output is float32 in every dtype policy."""

    def __init__(self, preprocessing: Preprocessing | dict, name: str | None = None, **kwargs):
        super().__init__(name=name, **{**kwargs, "dtype": "float32", "autocast": False, "trainable": False})
        self.preprocessing = (
            preprocessing if isinstance(preprocessing, Preprocessing) else Preprocessing(**preprocessing)
        )

    def call(self, images):
        return self.preprocessing(images)

    def compute_output_shape(self, input_shape):
        return input_shape[0], *self.preprocessing.image_size, self.preprocessing.channels

    def compute_output_spec(self, images):
        return keras.KerasTensor(self.compute_output_shape(images.shape), "float32")

    def get_config(self):
        return {**super().get_config(), "preprocessing": dataclasses.asdict(self.preprocessing)}


def _pixels(image):
    """A PIL image as an array (h, w, C) uint8, alpha kept; anything else as it is, if it can be pixels."""
    if isinstance(image, np.ndarray):
        _check_pixels(image)
    elif not hasattr(image, "shape") and not hasattr(image, "getbands"):
        raise UserError(f"An image should be an array of pixels or a PIL image, but is a {type(image).__name__}.")
    if not hasattr(image, "getbands"):
        return image
    if image.mode.startswith("I"):  # 16 bits
        pixels = np.asarray(image)[:, :, None]
        if pixels.max() < 256:
            warnings.warn(
                f"A PIL image of the mode {image.mode} has 16 bits, but its largest value is {pixels.max()}, so it is "
                "black; if it has 8 bits, give numpy.asarray(image).astype('uint8')[:, :, None].",
                stacklevel=3,
            )
        return np.clip(pixels // 256, 0, 255).astype(np.uint8)
    if image.mode not in ("L", "LA", "RGB", "RGBA"):
        gray, transparent = image.mode == "1", image.has_transparency_data
        image = image.convert("L" if gray else "RGBA" if transparent else "RGB")
    return np.atleast_3d(np.asarray(image))


def _check_pixels(image: np.ndarray) -> None:
    """Raise UserError for axes or values of no image; warn of values of another range than 0..255."""
    if image.ndim not in (3, 4) or image.dtype.kind in "OSUMmc":
        raise UserError(
            f"An image should be numbers (h, w, C), or a batch (B, h, w, C), but is {image.dtype} of shape "
            f"{image.shape}."
        )
    if image.shape[-1] > 4 and image.shape[-3] <= 4:
        raise UserError(
            f"The channels of an image should come last, but its shape is {image.shape}; use "
            "numpy.moveaxis(image, -3, -1)."
        )
    if image.dtype == np.uint8 or not image.size:
        return
    least, most = image.min(), image.max()
    if np.isnan(most):
        raise UserError("An image should have pixels of 0 to 255, but has NaN.")
    problem = f"the largest is {most:.6g}; multiply images of 0 to 1 by 255" if 0 < most <= 1 else None
    if least < -1 or most > 256:
        problem = f"they are {least:.6g} to {most:.6g}; scale them"
    if problem:
        warnings.warn(f"The pixels of an image should be 0 to 255, but {problem}.", stacklevel=4)


def _pair(size) -> Any:
    """One integer or a sequence of integers -> tuple. The caller checks its length."""
    try:
        sides = (size, size) if isinstance(size, int | np.integer) else tuple(size)
        return tuple(operator.index(side) for side in sides)
    except TypeError:
        raise UserError(f"image_size must be one integer or (height, width) in pixels, but is {size!r}.") from None


def _floats(value) -> float | tuple[float, ...]:
    return tuple(float(number) for number in value) if isinstance(value, list | tuple) else float(value)


def _center_of_resized(image, smaller_side: int, size: tuple[int, int]):
    """big_vision's resize_small with TensorFlow's "area" method, then its central_crop.

    (..., height, width, C) -> (..., h, w, C) float32.

    An output pixel is the mean of the image area that it covers. Each axis is a matrix product, which every backend
    supports, and only the cropped part is computed.
    """
    shape = ops.shape(image)[-3:-1]
    smaller = ops.cast(ops.minimum(*shape), "float32")
    rows, columns = (
        _area_weights(ops.cast(side, "float32"), smaller_side / smaller, length)
        for side, length in zip(shape, size, strict=True)
    )
    return _resampled(ops.cast(image, "float32"), rows, columns)


def _resampled(image, rows, columns):
    """Images (..., height, width, C), weights (h, height) of rows and (w, width) of columns -> (..., h, w, C)."""
    planes = ops.moveaxis(image, -1, -3)  # (..., C, height, width)
    planes = ops.matmul(ops.matmul(rows, planes), ops.transpose(columns))  # (..., C, h, w)
    return ops.moveaxis(planes, -3, -1)


def _area_weights(side, factor, length: int):
    """Weights (length, side) of the pixels of one axis in the central `length` pixels of the resized axis."""
    resized = ops.round(side * factor)
    step = side / resized  # pixels of the image per pixel of the output
    first = ops.floor((resized - length) / 2.0)
    begin = (first + ops.arange(length, dtype="float32")[:, None]) * step  # (length, 1)
    pixel = ops.arange(ops.cast(side, "int32"), dtype="int32")
    pixel = ops.cast(pixel, "float32")[None]  # (1, side)
    covered = ops.minimum(pixel + 1.0, begin + step) - ops.maximum(pixel, begin)
    return ops.maximum(covered, 0.0) / step


def _letterboxed(image, size: tuple[int, int]):
    """The whole image in its aspect ratio, centered on white: (..., height, width, C) 0..255 -> (..., h, w, C) float32.

    Equal to tf.image.resize with antialiasing, then padding. As a matrix product for each axis it runs on every backend
    with sides that are unknown before the graph runs, and takes no memory for a padded square of a long image.
    """
    sides = [ops.cast(side, "float32") for side in ops.shape(image)[-3:-1]]
    step = ops.maximum(sides[0] / size[0], sides[1] / size[1])  # pixels of the image per pixel of the output
    rows, columns = (_letterbox_weights(side, step, length) for side, length in zip(sides, size, strict=True))
    # Where the weights are 0, white remains.
    return 255.0 + _resampled(ops.cast(image, "float32") - 255.0, rows, columns)


def _letterbox_weights(side, step, length: int):
    """Weights (length, side) of the pixels of one axis; each row sums to 1 in the image and to 0 beside it."""
    resized = ops.maximum(ops.round(side / step), 1.0)
    step = side / resized
    row = ops.arange(length, dtype="float32")[:, None] - ops.floor((length - resized) / 2.0)  # (length, 1)
    pixel = ops.cast(ops.arange(ops.cast(side, "int32"), dtype="int32"), "float32")[None]  # (1, side)
    distance = ops.abs(pixel + 0.5 - (row + 0.5) * step)
    weights = ops.maximum(1.0 - distance / ops.maximum(step, 1.0), 0.0)
    inside = ops.cast((row >= 0.0) & (row < resized), "float32")
    return inside * weights / ops.maximum(ops.sum(weights, axis=1, keepdims=True), 1e-6)


def to_channels(image, channels: int, background: Background | None = None):
    """Images (..., h, w, C) with 1 to 4 channels -> (..., h, w, channels) of the same dtype.

    Grayscale becomes RGB by repetition, RGB becomes grayscale by luma. An alpha channel, the last of 2 or 4, is dropped
    or blended with the background. C may be unknown until the graph runs.
    """
    if image.shape[-1] == channels:
        return image
    if channels not in (1, 3):
        raise UserError(
            f"An image with {image.shape[-1]} channels cannot be converted to {channels}; use 1 or 3 channels."
        )
    has_color = ops.cast(ops.shape(image)[-1] >= 3, "int32")
    rgb = ops.take(image, ops.arange(3, dtype="int32") * has_color, axis=-1)  # (h, w, 3)
    if background == "white":
        rgb = _on_white(image, rgb)
    if channels == 3:
        return rgb
    gray = ops.sum(ops.cast(rgb, "float32") * ops.convert_to_tensor(_LUMA, dtype="float32"), axis=-1, keepdims=True)
    if keras.backend.is_float_dtype(image.dtype):
        return ops.cast(gray, image.dtype)
    return ops.cast(ops.round(gray), image.dtype)  # (h, w, 1)


def is_uniform(image: np.ndarray) -> bool:
    """Whether an image (h, w, C) uint8, 1 to 4 channels, has one color throughout once it is on white."""
    if image.shape[-1] % 2 and not np.array_equal(image[0, 0], image[-1, image.shape[1] // 2]):
        return False  # as nearly all are, at no cost
    seen = np.asarray(to_channels(image, 3, "white"))
    return bool((seen == seen[:1, :1]).all())


def _on_white(image, rgb):
    """Blend an image (h, w, C) with colors `rgb` (h, w, 3) on white. Without alpha, return `rgb`.

    Of integer pixels, no result is halfway between two integers (255 is odd), so all backends round alike.
    """

    def blended():
        alpha = ops.cast(image[..., -1:], "float32") / 255.0
        seen = 255.0 - (255.0 - ops.cast(rgb, "float32")) * alpha
        return ops.cast(seen if keras.backend.is_float_dtype(image.dtype) else ops.round(seen), image.dtype)

    if image.shape[-1] is not None:
        return blended() if image.shape[-1] % 2 == 0 else rgb
    return ops.cond(ops.equal(ops.shape(image)[-1] % 2, 0), blended, lambda: rgb)

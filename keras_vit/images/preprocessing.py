"""Preprocess an image for a model: one definition for training, evaluation and export.

It uses keras.ops, so it runs on any backend, in an exported graph, and in a tf.data pipeline beside any backend. Pixels
are 0..255 until `normalize`. Official values: vit_jax `input_pipeline.py` (plain resize, (x - 127.5) / 127.5).
"""

import dataclasses
import importlib
import json
import operator
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import keras
import numpy as np

from keras_vit.errors import Rules, UserError, check_choice, check_integers, explained, refuse_first
from keras_vit.files.remote import existing_file
from keras_vit.images import graph, resizing
from keras_vit.images.decode import decode_file
from keras_vit.images.formats import LARGEST_IMAGE
from keras_vit.images.resizing import Background, Interpolation, Library, Padding, Placement, Resize
from keras_vit.models.config import convert_fields

# Operations of TensorFlow that keep float64, which Keras makes float32 where its backend is JAX.
_PRECISE = ("abs", "exp", "floor", "maximum", "minimum", "round", "where")


class _Operations:
    """keras.ops; while TensorFlow traces a graph on another backend, such as tf.data for JAX, those of TensorFlow."""

    def __getattr__(self, name: str):
        tensorflow = sys.modules.get("tensorflow")
        if tensorflow is None or keras.backend.backend() == "tensorflow" or tensorflow.executing_eagerly():
            return getattr(keras.ops, name)
        if name in _PRECISE:
            return getattr(tensorflow, name)
        backend = importlib.import_module("keras.src.backend.tensorflow")
        return getattr(backend, name, None) or getattr(backend.numpy, name)


ops = _Operations()
# ITU-R BT.601 luma, the weights of PIL's convert("L") and of libjpeg.
_LUMA = (0.299, 0.587, 0.114)
_Dtype = Literal["float32", "uint8"]
# The values of fields of Preprocessing.
_CHOICES = {
    "resize": Resize, "interpolation": Interpolation, "library": Library, "dtype": _Dtype, "padding": Padding
}  # fmt: skip


def _traced_as_it_is(function: Callable) -> Callable:
    """Mark a function as `tf.autograph.experimental.do_not_convert` does, without importing TensorFlow.

    AutoGraph cannot convert the imports inside it, and would warn of them in every `Dataset.map` of a user.
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How a model preprocesses images. It is saved inside the model; see `keras_vit.preprocessing_of`."""

    image_size: tuple[int, int]
    """Height and width in pixels. An integer means a square."""
    channels: int = 3
    """1 for grayscale, 3 for RGB. Any other number must match the images."""
    resize: Resize = "stretch"
    """stretch: to the size, ignoring the aspect ratio; or to crop_from, then a center crop. crop: the largest center
    crop with the aspect ratio of the size, resized. pad: the whole image in its aspect ratio, centered on the
    background (letterbox). resize-small: the smaller side to crop_from, keeping the aspect ratio, then a center
    crop."""
    value_range: tuple[float | tuple[float, ...], float | tuple[float, ...]] = (-1.0, 1.0)
    """The values of pixels 0 and 255 after normalization, each a number or one number per channel."""
    crop_from: int | tuple[int, int] | None = None
    """Pixels before the center crop: of the smaller side for resize-small; of both sides, or (height, width), for
    stretch and pad; a (height, width) that the image covers for resize-small, too. None: no center crop."""
    background: Background | None = "white"
    """Background of transparent images (white alone) and of the space beside padded ones. None drops the alpha channel,
    as transformers and timm do, and models saved before this field existed; pad then fills with the color that is
    normalized to 0 (timm's border). gray and black drop it too."""
    interpolation: Interpolation | None = None
    """The filter. None: area for resize-small in TensorFlow's way (big_vision), else bilinear. gaussian: bilinear after
    a Gaussian blur, as skimage.transform.resize and OWLv2; padding after the image is blurred with it."""
    antialias: bool | None = None
    """Whether the filter grows with the reduction. None: in TensorFlow's way for crop and pad alone (vit_jax stretches
    without)."""
    library: Library = "tensorflow"
    """Library that is followed. tensorflow: JPEGs use the fast transform, and lengths round as in big_vision.
    transformers, timm: JPEGs are decoded as Pillow does; lengths and the place of the crop round as in this library."""
    dtype: _Dtype | None = None
    """Type of resized pixels: uint8 rounds to bytes after each axis, as Pillow. None: float32 in TensorFlow's way, else
    uint8."""
    padding: Padding = "around"
    """Where the free space of pad lies: around the image, or after it, to the right and below (OWLv2, EoMT)."""
    exif_orientation: bool = True
    """Whether an image file is turned upright by its EXIF orientation. False for models saved before this field
    existed."""

    autograph_info__: ClassVar[dict] = {}  # see `_traced_as_it_is`: an instance is called, too

    def __post_init__(self) -> None:
        convert_fields(self)  # JSON and command lines give lists
        object.__setattr__(self, "image_size", _pair(self.image_size))
        check_integers("image_size", self.image_size, length=2)
        check_integers("channels", self.channels)
        check_integers("crop_from", self.crop_from, length=2 if isinstance(self.crop_from, tuple) else None)
        object.__setattr__(self, "value_range", tuple(_floats(value) for value in self.value_range))
        of_tensorflow = self.library == "tensorflow"
        area = of_tensorflow and self.resize == "resize-small"
        for field, default in (
            ("interpolation", "area" if area else "bilinear"),
            ("antialias", not of_tensorflow or self.resize in ("crop", "pad")),
            ("dtype", "float32" if of_tensorflow else "uint8"),
        ):
            if getattr(self, field) is None:
                object.__setattr__(self, field, default)
        for field, names in _CHOICES.items():
            check_choice(field, getattr(self, field), get_args(names))
        if self.background is not None:
            check_choice("background", self.background, get_args(Background))
        refuse_first(self._rules())

    def _rules(self) -> Rules:
        yield (
            self.resize == "pad" and self.background is None and self.library == "tensorflow",
            "resize pad fills what the image leaves free with the background, but this model has none; choose crop or "
            "stretch.",
        )
        floats = self.dtype == "float32"
        yield (
            (self.interpolation == "area" and not (floats and self.resize == "resize-small"))
            or {"box": floats, "gaussian": not floats or self.resize == "crop"}.get(str(self.interpolation)),
            f"interpolation {self.interpolation} is for resize-small of float32 (area), for uint8 (box) or for float32 "
            f"but not crop (gaussian), but {self.resize} makes {self.dtype} here; choose another one.",
        )
        yield (
            (self.resize == "resize-small" and self.crop_from is None) or (self.resize == "crop" and self.crop_from),
            f"crop_from is required for resize-small and does not apply to crop, but {self.resize} has crop_from "
            f"{self.crop_from}.",
        )
        full = self.image_size if self.crop_from is None else resizing.pair(self.crop_from)
        yield (
            full[0] < self.image_size[0] or full[1] < self.image_size[1],
            f"crop_from must be at least both sides of {self.image_size}, but is {self.crop_from}.",
        )
        lows, highs = self.channel_ranges()
        yield (
            not len(lows) == len(highs) == self.channels or any(map(operator.ge, lows, highs)),
            "value_range must be (low, high), a number each or one for each channel, with low below high, but is "
            f"{self.value_range}.",
        )

    @classmethod
    def saved(cls, fields: Mapping[str, Any]) -> "Preprocessing":
        """Return the preprocessing of a saved model, also of one that was saved before some fields existed."""
        return cls(**{"background": None, "exif_orientation": False, **fields})

    def channel_ranges(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the low and high end of value_range for each channel."""
        low, high = ((end,) * self.channels if isinstance(end, float) else end for end in self.value_range)
        return low, high

    def with_resize(self, resize: Resize, crop_from: int | tuple[int, int] | None, **changes) -> "Preprocessing":
        """Return the same with another way of resizing: in TensorFlow's way with the filter that is usual for it.

        A model that begins to pad and drops the alpha channel places transparent images on white, and pads with white.
        """
        if resize == "pad" != self.resize and self.background is None:
            changes = {"background": "white", **changes}
        if self.library == "tensorflow":
            changes = {"interpolation": None, "antialias": None, **changes}
        elif self.interpolation == "gaussian" and resize == "crop":
            changes = {"interpolation": "bilinear", **changes}
        return dataclasses.replace(self, resize=resize, crop_from=crop_from, **changes)

    def for_image_size(self, image_size: int | tuple[int, int]) -> "Preprocessing":
        """The same for another image size; it shows the same part of an image, because crop_from grows with it."""
        new, crop_from = _pair(image_size), self.crop_from
        if isinstance(crop_from, int):
            crop_from = resizing.scaled_crop(crop_from, max(self.image_size), max(new))
        elif crop_from is not None:
            crop_from = tuple(map(resizing.scaled_crop, crop_from, self.image_size, new))  # type: ignore[assignment]
        return dataclasses.replace(self, image_size=new, crop_from=crop_from)

    def summary(self) -> str:
        """Describe the preprocessing in words."""
        height, width = self.image_size
        to, full = f"to {height} x {width}", self.crop_from
        before = full if isinstance(full, int) or full is None else f"{full[0]} x {full[1]}"
        on = self.background or "the mean color"
        where = "centered on" if self.padding == "around" else "in the upper left corner on"
        kept = "" if full is None else f" at {before}, center crop"
        resize = {
            "stretch": f"stretched {to}" if full is None else f"stretched to {before}, center crop {to}",
            "crop": f"center crop of this aspect ratio, resized {to}",
            "pad": f"whole image in its aspect ratio{kept}, resized {to}, {where} {on}",
            "resize-small": f"smaller side resized to {before}, center crop {to}",
        }[self.resize]
        way = [str(self.interpolation)]
        way += ["antialiased"] if self.antialias and self.interpolation not in ("area", "nearest") else []
        way += ["rounded to bytes, as Pillow does"] if self.dtype == "uint8" else []
        color = {1: "gray", 3: "RGB"}.get(self.channels, f"{self.channels} channels")
        low, high = (json.dumps(np.round(end, 4).tolist()) for end in self.value_range)
        turned = "turned upright by the EXIF orientation"
        turned = turned if self.exif_orientation else "the EXIF orientation is not applied"
        return f"{color}, {turned}, {resize} ({', '.join(way)}), 0..255 to {low}..{high}"

    def resizing(self) -> dict[str, Any]:
        """Return the fields that say how images are decoded and resized, for JSON."""
        others = ("image_size", "channels", "value_range")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in others}

    def for_channels(self, channels: int) -> "Preprocessing":
        """Return the same for another number of channels; a value range for each channel becomes the mean range."""
        value_range = self.value_range
        if channels != self.channels:
            low, high = value_range
            value_range = float(np.mean(low)), float(np.mean(high))
        return dataclasses.replace(self, channels=channels, value_range=value_range)

    @_traced_as_it_is
    def resized(self, image):
        """Resize a decoded image (..., h, w, C), 0..255 -> (..., height, width, channels), 0..255.

        The result is float32, or uint8 if `dtype` is, or the dtype of the image if it already has the size.
        """
        pixels = self.to_channels(image)
        # Pillow takes arrays.
        image = keras.ops.convert_to_numpy(pixels) if isinstance(image, np.ndarray) else pixels
        known = tuple(image.shape[-3:-1])
        if known == self.image_size and self.crop_from is None:
            return image
        as_keras = self.dtype == "float32" and self.interpolation != "gaussian"
        if self.resize in ("stretch", "crop") and self.crop_from is None and as_keras:
            return ops.image.resize(
                ops.cast(image, "float32"),
                self.image_size,
                interpolation=self.interpolation,
                antialias=self.antialias,
                crop_to_aspect_ratio=self.resize == "crop",
                data_format="channels_last",
            )
        if self.dtype == "uint8":
            image = _as_bytes(image)
            if isinstance(image, np.ndarray):
                return _each(image, self._bytes_resized)
            if resizing.is_tensor_of_tensorflow(image):
                return graph.preprocessed_bytes(image, self)
        return self._resampled(image)

    def placements(self, sides, xp) -> list[Placement]:
        """Return the placements of height and width; see `keras_vit.images.resizing.placements`."""
        how = self.image_size, self.resize, self.crop_from, self.library
        return resizing.placements(sides, *how, xp, padding=self.padding)

    def boxes_in_picture(self, boxes, picture_size: tuple[int, int]) -> np.ndarray:
        """Boxes in the model's input -> boxes in the image file that it was made of.

        Args:
            boxes: (..., 4), center x and y, width and height as shares of the input, as detectors give them.
            picture_size: height and width of the image in pixels.

        Returns:
            (..., 4) float32: left, top, right, bottom in pixels of the image; what lies outside of it is not cut off.
        """
        boxes = np.asarray(boxes, np.float64)
        rows, columns = self.axes([np.float64(side) for side in picture_size])
        (height, width), (x, y, w, h) = self.image_size, np.moveaxis(boxes, -1, 0)
        edges = [(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height]
        axes = zip(edges, (columns, rows, columns, rows), strict=True)
        return np.stack([edge * scale + shift for edge, (scale, shift) in axes], -1).astype("float32")

    def boxes_in_input(self, corners, picture_size: tuple[int, int]) -> np.ndarray:
        """The inverse of `boxes_in_picture`: left, top, right, bottom in pixels -> shares of the input (..., 4)."""
        corners = np.asarray(corners, np.float64)
        rows, columns = self.axes([np.float64(side) for side in picture_size])
        axes = enumerate((columns, rows, columns, rows))
        left, top, right, bottom = ((corners[..., edge] - shift) / scale for edge, (scale, shift) in axes)
        height, width = self.image_size
        box = [(left + right) / 2 / width, (top + bottom) / 2 / height, (right - left) / width, (bottom - top) / height]
        return np.stack(box, -1).astype("float32")

    def axes(self, sides, xp: Any = np) -> list[tuple[Any, Any]]:
        """Return, for rows and columns, the image pixels for each input pixel, and where the input begins.

        Args:
            sides: height and width of the image, float64.
            xp: numpy, or tensorflow in a graph.
        """
        # The blurred image is the padded square: both axes are alike, without rounding of their lengths.
        if self.interpolation == "gaussian" and self.resize == "pad" and self.padding == "after":
            scale = xp.maximum(*(side / length for side, length in zip(sides, self.image_size, strict=True)))
            return [(scale, 0.0 * scale)] * 2
        scaled = ((place.window / place.resized, place) for place in self.placements(sides, xp))
        return [(scale, place.first + (place.begin - place.before) * scale) for scale, place in scaled]

    def _bytes_resized(self, image: np.ndarray) -> np.ndarray:
        """(h, w, C) uint8 -> (height, width, C) uint8, by Pillow."""
        places = self.placements([np.float64(side) for side in image.shape[:2]], np)
        rows, columns = (Placement(*map(int, place)) for place in places)
        window = image[rows.first : rows.first + rows.window, columns.first : columns.first + columns.window]
        resized = resizing.resize_with_pillow(window, (rows.resized, columns.resized), str(self.interpolation))
        height, width = self.image_size
        resized = resized[rows.begin : rows.begin + height, columns.begin : columns.begin + width]
        if resized.shape[:2] == self.image_size:
            return resized
        filled = np.tile(np.array(self.fill(), np.uint8), (height, width, 1))
        filled[rows.before :, columns.before :][: resized.shape[0], : resized.shape[1]] = resized
        return filled

    def _resampled(self, image):
        """Images (..., h, w, C) -> (..., height, width, C) on any backend: a product for each axis."""
        matrices = self._matrices(image)
        fill = ops.convert_to_tensor(np.array(self.fill(), np.float32)) if self.resize == "pad" else None
        pixels = ops.cast(image, "float32")
        rounds = self.dtype == "uint8"
        if fill is None or rounds:
            result = resizing.resample(pixels, *matrices, round_bytes=rounds, ops=ops)
            if fill is not None:
                inside = [ops.cast(ops.sum(matrix, axis=1) > 0.5, "float32") for matrix in matrices]
                result = result + (1.0 - inside[0][:, None, None] * inside[1][None, :, None]) * fill
        else:
            # Where the weights are 0, the fill remains.
            result = fill + resizing.resample(pixels - fill, *matrices, round_bytes=False, ops=ops)
        return ops.cast(result, "uint8") if rounds else result

    def _matrices(self, image):
        """The weights (height, h) of rows and (width, w) of columns of images (..., h, w, C).

        Sides may be unknown before a graph runs. It takes no memory for a padded square of a long image.
        """
        shape = ops.shape(image)[-3:-1]
        static = all(isinstance(side, int) for side in shape)
        xp: Any = np if static else ops
        sides = [np.float64(side) if static else ops.cast(side, "float64") for side in shape]
        kernel, matrices = (self.interpolation, self.antialias), []
        blurs = self.interpolation == "gaussian"
        places = self.placements(sides, xp)
        if blurs and self.resize == "pad" and self.padding == "after":  # what is blurred is the padded square
            scale = self.axes(sides, xp)[0][0]
            places = [
                place._replace(window=xp.round(scale * length), resized=0.0 * scale + length)
                for place, length in zip(places, self.image_size, strict=True)
            ]
        for side, length, place in zip(sides, self.image_size, places, strict=True):
            begin, count = place.begin - place.before, xp.maximum(side, place.window)
            if static:
                matrix = resizing.weights(place.window, place.resized, begin, length, *kernel)
                matrix = np.pad(matrix, ((0, 0), (int(place.first), int(count - place.window - place.first))))
                matrix = matrix[:, : int(side)]
            else:
                numbers = (count, place.resized, begin)
                floats = (ops.cast(number, "float64" if blurs else "float32") for number in numbers)
                matrix = resizing.weights(*floats, length, *kernel, ops=ops)[:, : ops.cast(side, "int32")]
            matrices.append(ops.cast(ops.convert_to_tensor(matrix), "float32"))
        return matrices

    def fill(self) -> tuple[float, ...]:
        """Return the color beside a padded image for each channel, 0..255."""
        if self.background is not None:
            gray = 127.5 if self.interpolation == "gaussian" else 128.0  # the half of 0..255, of bytes rounded
            return ({"white": 255.0, "gray": gray, "black": 0.0}[self.background],) * self.channels
        lows, highs = self.channel_ranges()
        means = (-low / (high - low) for low, high in zip(lows, highs, strict=True))
        return tuple(float(min(max(round(255 * mean), 0), 255)) for mean in means)

    @_traced_as_it_is
    def decode(self, data):
        """Decode an image file -> uint8 (h, w, C), upright, as the original library does.

        `tf.io.decode_jpeg` with its defaults is faster and less exact than the decoders of timm and transformers, and
        does not turn an image upright. C is that of the file, with its alpha.

        Args:
            data: a path, or the bytes of a file: the result is a NumPy array. A string tensor of TensorFlow with the
                bytes of a file, also in the graph of a `tf.data.Dataset`: the result is a tensor.

        Raises UserError for a path or bytes that are no image; a tensor is INVALID_ARGUMENT when the graph runs.
        """
        if isinstance(data, str | os.PathLike | bytes):
            name = "The file" if isinstance(data, bytes) else os.fspath(data)
            content = data if isinstance(data, bytes) else existing_file(data, "give an image file").read_bytes()
            accurate = self.library != "tensorflow"
            return decode_file(content, str(name), accurate=accurate, upright=self.exif_orientation)
        return graph.decode_image(data, accurate=self.library != "tensorflow", upright=self.exif_orientation)

    @_traced_as_it_is
    def read(self, data, *, most_pixels: int = LARGEST_IMAGE):
        """An image file, a string tensor of TensorFlow -> (height, width, channels), 0..255, decoded and resized.

        `resized(decode(data))` in less time. A file of more pixels is INVALID_ARGUMENT when the graph runs.
        """
        return self.resized(graph.decode_to_channels(data, self, most_pixels=most_pixels))

    @_traced_as_it_is
    def to_channels(self, image):
        """Decoded images (..., h, w, C), 1 to 4 channels -> (..., h, w, channels) of the same dtype, without alpha."""
        return to_channels(image, self.channels, self.background)

    @_traced_as_it_is
    def normalize(self, image):
        """Pixels 0..255 of any dtype -> float32 in value_range; (x - 127.5) / 127.5 for the official range."""
        low, high = (np.asarray(end) for end in self.value_range)
        scale = 255.0 / (high - low)
        zero = ops.convert_to_tensor((-low * scale).astype(np.float32))
        return (ops.cast(image, "float32") - zero) / ops.convert_to_tensor(scale.astype(np.float32))

    @_traced_as_it_is
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
        return self.normalize(self.resized(_pixels(image, upright=self.exif_orientation)))

    def layer(self, name: str | None = None) -> "PreprocessingLayer":
        """Return a Keras layer that does the same: images (B, h, w, C), 0..255 -> (B, height, width, channels) float32.

        keras.Sequential([keras.Input((None, None, 3), dtype="uint8"), preprocessing.layer(), model])
        """
        return PreprocessingLayer(self, name=name)


@keras.saving.register_keras_serializable("keras_vit")
class PreprocessingLayer(keras.layers.Layer):
    """`Preprocessing` of a batch as a layer; see `Preprocessing.layer`. Its output is float32 in every dtype policy."""

    def __init__(self, preprocessing: Preprocessing | dict, name: str | None = None, **kwargs):
        super().__init__(name=name, **{**kwargs, "dtype": "float32", "autocast": False, "trainable": False})
        saved = preprocessing
        self.preprocessing = Preprocessing.saved(saved) if isinstance(saved, dict) else saved

    def call(self, images):
        return self.preprocessing(images)

    def compute_output_shape(self, input_shape):
        return input_shape[0], *self.preprocessing.image_size, self.preprocessing.channels

    def compute_output_spec(self, images):
        return keras.KerasTensor(self.compute_output_shape(images.shape), "float32")

    def get_config(self):
        return {**super().get_config(), "preprocessing": dataclasses.asdict(self.preprocessing)}


def _pixels(image, *, upright: bool):
    """Return a PIL image as (h, w, C) uint8, alpha kept, `upright` if turned by EXIF; else what can be pixels."""
    if not hasattr(image, "getbands"):
        if isinstance(image, np.ndarray) or not hasattr(image, "shape"):
            refuse_first(_unusable(image))
            _warn_of_range(image)
        return image
    if upright:
        image = importlib.import_module("PIL.ImageOps").exif_transpose(image)
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


def _unusable(image: np.ndarray) -> Rules:
    yield (
        not isinstance(image, np.ndarray),
        f"An image should be an array of pixels or a PIL image, but is a {type(image).__name__}.",
    )
    yield (
        image.ndim not in (3, 4) or image.dtype.kind in "OSUMmc",
        f"An image should be numbers (h, w, C), or a batch (B, h, w, C), but is {image.dtype} of shape {image.shape}.",
    )
    yield (
        image.shape[-1] > 4 and image.shape[-3] <= 4,
        f"The channels of an image should come last, but its shape is {image.shape}; use "
        "numpy.moveaxis(image, -3, -1).",
    )
    yield image.dtype.kind == "f" and np.isnan(image).any(), "An image should have pixels of 0 to 255, but has NaN."


def _warn_of_range(image: np.ndarray) -> None:
    if image.dtype == np.uint8 or not image.size:
        return
    least, most = image.min(), image.max()
    problem = f"the largest is {most:.6g}; multiply images of 0 to 1 by 255" if 0 < most <= 1 else None
    if least < -1 or most > 256:
        problem = f"they are {least:.6g} to {most:.6g}; scale them"
    if problem:
        warnings.warn(f"The pixels of an image should be 0 to 255, but {problem}.", stacklevel=4)


def _pair(size) -> Any:
    with explained(f"image_size must be one integer or (height, width) in pixels, but is {size!r}.", TypeError):
        return tuple(operator.index(side) for side in ((size, size) if isinstance(size, int | np.integer) else size))


def _floats(value) -> float | tuple[float, ...]:
    return tuple(float(number) for number in value) if isinstance(value, list | tuple) else float(value)


def _as_bytes(image):
    if isinstance(image, np.ndarray):
        return image if image.dtype == np.uint8 else np.clip(np.round(image), 0, 255).astype(np.uint8)
    if keras.backend.standardize_dtype(image.dtype) == "uint8":
        return image
    return ops.cast(ops.clip(ops.round(image), 0, 255), "uint8")


def _each(images: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply a function of one image (h, w, C) to images (..., h, w, C)."""
    if images.ndim == 3:
        return function(images)
    return np.stack([_each(image, function) for image in images])


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


def _on_white(image, rgb):
    """Blend an image (h, w, C) with colors `rgb` (h, w, 3) on white. Without alpha, return `rgb`."""

    def blended():
        alpha = image[..., -1:]
        if keras.backend.is_float_dtype(image.dtype):
            opacity = ops.cast(alpha, "float32") / 255.0
            return ops.cast(255.0 - (255.0 - ops.cast(rgb, "float32")) * opacity, image.dtype)
        # As `keras_vit.images.decode.on_white`, in two bytes: as floats, 32 megapixels would take gigabytes.
        darkness = ops.cast(255 - rgb, "uint16") * ops.cast(alpha, "uint16")
        return 255 - ops.cast((darkness + 127) // 255, image.dtype)

    if image.shape[-1] is not None:
        return blended() if image.shape[-1] % 2 == 0 else rgb
    return ops.cond(ops.equal(ops.shape(image)[-1] % 2, 0), blended, lambda: rgb)

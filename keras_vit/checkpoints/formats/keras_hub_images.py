"""The image converters of keras-hub: how they resize and scale, read and written.

They are `keras.layers.Resizing`, then a factor and an offset. For images of whole numbers in an array, keras-hub rounds
after resizing, but not in a tf.data pipeline, as its models are trained and served; here nothing is rounded.
"""

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keras_vit.checkpoints.formats.file_config import (
    ImageProcessing,
    ValueRange,
    check_field,
    check_supported,
    pair,
    part,
)

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing

CONVERTER, PREPROCESSOR = "image_converter.json", "preprocessor.json"
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos3")
# The folder and the beginning of the names of the classes of a family.
_FAMILIES = {
    "ViTBackbone": ("vit", "ViT"),
    "DeiTBackbone": ("deit", "DeiT"),
    "DINOV2Backbone": ("dinov2", "DINOV2"),
    "DINOV3Backbone": ("dinov3", "DINOV3"),
    "SigLIPVisionEncoder": ("siglip", "SigLIP"),
    "CLIPVisionEncoder": ("clip", "CLIP"),
}


def read_converter(files: Mapping[str, dict]) -> ImageProcessing | None:
    """The images that the converter of a preset makes; None without one."""
    converter = files.get(CONVERTER)
    if converter is None:
        converter = part(part(files.get(PREPROCESSOR, {}), "config", PREPROCESSOR), "image_converter", PREPROCESSOR)
    fields = part(converter, "config", CONVERTER)
    if not fields:
        return None
    interpolation = fields.get("interpolation", "bilinear")
    check_supported("interpolation", interpolation, _INTERPOLATIONS, CONVERTER)
    crops, pads = fields.get("crop_to_aspect_ratio", True), fields.get("pad_to_aspect_ratio", False)
    own: dict[str, Any] = {
        "resize": "pad" if pads else "crop" if crops else "stretch",
        "interpolation": interpolation,
        "antialias": bool(fields.get("antialias", False)),
        "background": "black" if pads else None,
    }
    size = [fields["height"], fields["width"]] if {"height", "width"} <= fields.keys() else fields.get("image_size")
    return ImageProcessing(own, pair({"image_size": size}, "image_size"), value_range=_value_range(fields))


def _value_range(fields: dict) -> ValueRange:
    """The values of the pixels 0 and 255."""
    scale, offset = fields.get("scale"), fields.get("offset")
    if {"mean", "variance"} <= fields.keys():  # of the first presets
        means, deviations = fields["mean"], [math.sqrt(each) for each in fields["variance"]]
        scale = [(1.0 if scale is None else scale) / deviation for deviation in deviations]
        offset = [-mean / deviation for mean, deviation in zip(means, deviations, strict=True)]
    scale, offset = 1.0 if scale is None else scale, 0.0 if offset is None else offset
    for name, value in (("scale", scale), ("offset", offset)):
        numbers = value if isinstance(value, list) else [value]
        is_right = all(isinstance(each, int | float) and -1e6 < each < 1e6 for each in numbers) and numbers
        check_field(is_right and (name == "offset" or min(numbers) > 0), name, "finite numbers", value, CONVERTER)
    if not isinstance(scale, list) and not isinstance(offset, list):
        return float(offset), float(255 * scale + offset)
    length = max(len(value) for value in (scale, offset) if isinstance(value, list))
    scales, offsets = (value if isinstance(value, list) else [value] * length for value in (scale, offset))
    check_field(len(scales) == len(offsets), "scale and offset", "one number per channel", fields, CONVERTER)
    return tuple(map(float, offsets)), tuple(255 * s + o for s, o in zip(scales, offsets, strict=True))


def write_converter(preprocessing: "Preprocessing", family: str, *, classifies: bool) -> dict[str, dict]:
    """The files that say how images are made. Warns where no converter makes those of the model."""
    folder, name = _FAMILIES[family]
    lows, highs = preprocessing.channel_ranges()
    resize, filter_ = preprocessing.resize, preprocessing.interpolation
    fields = {
        "image_size": list(preprocessing.image_size),
        "scale": [(high - low) / 255 for low, high in zip(lows, highs, strict=True)],
        "offset": list(lows),
        "interpolation": filter_ if filter_ in _INTERPOLATIONS else "bilinear",
        "antialias": bool(preprocessing.antialias),
        "crop_to_aspect_ratio": resize in ("crop", "resize-small"),
        "pad_to_aspect_ratio": resize == "pad",
    }
    is_exact = preprocessing.dtype == "float32" and preprocessing.crop_from is None and filter_ in _INTERPOLATIONS
    if not is_exact or (resize == "pad" and preprocessing.background != "black"):
        warnings.warn(
            f"The image converters of keras-hub cannot make the images of this model ({preprocessing.summary()}); "
            "the written one makes similar ones.",
            stacklevel=5,
        )
    converter = serialized(f"{name}ImageConverter", f"{folder}.{folder}_image_converter", fields)
    files = {CONVERTER: converter}
    if classifies:
        module = f"{folder}.{folder}_image_classifier_preprocessor"
        files[PREPROCESSOR] = serialized(f"{name}ImageClassifierPreprocessor", module, {"image_converter": converter})
    return files


def serialized(name: str, module: str, config: dict) -> dict[str, Any]:
    """An object of keras-hub as Keras serializes it."""
    return {
        "module": f"keras_hub.src.models.{module}",
        "class_name": name,
        "config": config,
        "registered_name": f"keras_hub>{name}",
    }

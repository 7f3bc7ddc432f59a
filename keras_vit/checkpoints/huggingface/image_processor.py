"""Read the image processor of transformers: how it resizes and normalizes."""

import re
from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints.huggingface.config_json import is_side, number
from keras_vit.errors import UserError
from keras_vit.models.config import Resize

# The first has the fields of the image processor under "image_processor".
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
# The closest filters in PIL: bilinear (2) and box (4). No config.json of transformers asks for "pad".
RESAMPLE: Mapping[Resize, int] = {"stretch": 2, "crop": 2, "resize-small": 4}
INTERPOLATION: Mapping[Resize, str] = {"stretch": "bilinear", "crop": "bilinear", "resize-small": "box"}
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by their number in PIL
# Defaults of transformers' image processors for fields missing in preprocessor_config.json.
_SQUARE = {"height": 224, "width": 224}
_STRETCHED: dict[str, Any] = {
    "do_resize": True,
    "size": _SQUARE,
    "resample": 2,
    "do_center_crop": False,
    "crop_size": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_CROPPED: dict[str, Any] = {"do_resize": True, "size": {"shortest_edge": 224}, "resample": 3, "do_center_crop": True}
_CROPPED |= {"crop_size": _SQUARE, "image_mean": [0.48145466, 0.4578275, 0.40821073]}
_CROPPED |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
_PROCESSORS = {"ViT": _STRETCHED, "Bit": _CROPPED, "ViTHybrid": _CROPPED, "CLIP": _CROPPED}
_PROCESSORS |= {"DINOv3ViT": _STRETCHED | {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}}
_PROCESSORS |= {"Siglip": _STRETCHED | {"resample": 3}}
# Images are stretched to a square of this size, whose center is taken; DeiT's own code keeps their aspect.
_PROCESSORS |= {"DeiT": _STRETCHED | {"size": 256, "resample": 3, "do_center_crop": True, "crop_size": _SQUARE}}
_STRETCHED_BEFORE_CROP = "stretched_before_crop"
ValueRange = tuple[float | tuple[float, ...], float | tuple[float, ...]]


def completed_processor(fields: dict) -> dict:
    """The fields with the defaults of the processor's class; empty if there are none."""
    if not fields:
        return {}
    kind = fields.get("image_processor_type") or fields.get("feature_extractor_type") or "ViTImageProcessor"
    family = re.sub(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", kind) if isinstance(kind, str) else None
    if family not in _PROCESSORS:
        raise _unsupported("image_processor_type", kind)
    # transformers takes null for false where it expects a flag.
    given = {name: False if value is None and name.startswith("do_") else value for name, value in fields.items()}
    processor = _PROCESSORS[family] | {name: value for name, value in given.items() if value is not None}
    if family == "DeiT":
        sides = _sides(processor["size"]) or ()
        if len(sides) == 2 and sides[0] == sides[1] and _flag(processor, "do_center_crop"):
            processor |= {"size": {"shortest_edge": sides[0]}, _STRETCHED_BEFORE_CROP: True}
    elif isinstance(processor["size"], int) and (family != "ViT" or not _flag(processor, "default_to_square")):
        processor["size"] = {"shortest_edge": processor["size"]}
    return processor


def processor_resize(processor: dict) -> tuple[Resize, int | None, tuple[int, int] | None]:
    """(resize, crop_from, size) of Preprocessing that equals transformers' image processor but for antialiasing.

    Both shrink bilinearly; "stretch" is not antialiased, as in the original code of ViT, and the processor is.

    Raises UserError if Preprocessing has no equivalent.
    """
    if not processor:
        return "stretch", None, None
    for field in ("do_flip_channel_order", "do_pad"):
        if _flag(processor, field, default=False):
            raise _unsupported(field, True)
    resizes, crops = _flag(processor, "do_resize"), _flag(processor, "do_center_crop")
    size, crop_size, resample = (processor[field] for field in ("size", "crop_size", "resample"))
    sides, crop = _sides(size), _sides(crop_size)
    if not resizes:
        if crops:
            raise _unsupported("do_resize", False)
        return "stretch", None, None
    if sides is None:
        raise _unsupported("size", size)
    if crops and (crop is None or len(crop) != 2):
        raise _unsupported("crop_size", crop_size)
    resize: Resize
    if len(sides) == 2:
        if crops and crop != sides:
            raise _unsupported("crop_size", crop_size)
        resize, crop_from, crop = "stretch", None, sides
    elif not crops:
        raise _unsupported("size", size)
    elif crop == sides * 2 and resample != RESAMPLE["resize-small"]:
        resize, crop_from = "crop", None
    elif crop is not None and sides[0] >= max(crop):
        resize, crop_from = "resize-small", sides[0]
    else:
        raise _unsupported("crop_size", crop_size)
    if isinstance(resample, bool) or not isinstance(resample, int) or not 0 <= resample < len(_FILTERS):
        raise _unsupported("resample", resample)
    assert crop is not None
    return resize, crop_from, (crop[0], crop[1])


def other_filter(processor: dict, resize: Resize) -> str | None:
    """How the processor resizes, if it is not as `resize` does here."""
    if not processor or not processor["do_resize"]:
        return None
    if processor.get(_STRETCHED_BEFORE_CROP):
        return f"{_FILTERS[processor['resample']]} interpolation, stretched to a square before the center crop"
    return None if processor["resample"] == RESAMPLE[resize] else f"{_FILTERS[processor['resample']]} interpolation"


def _sides(size: Any) -> tuple[int, ...] | None:
    """(height, width), or (shortest edge,), of a processor's size; None if it is neither."""
    if isinstance(size, dict):
        size = {name: side for name, side in size.items() if side is not None}
        names = ("shortest_edge",) if size.keys() == {"shortest_edge"} else ("height", "width")
        sides = tuple(size[name] for name in names) if size.keys() == set(names) else ()
    elif isinstance(size, list):
        sides = tuple(size) if len(size) == 2 else ()
    else:
        sides = (size, size)
    return sides if sides and all(is_side(side) for side in sides) else None


def _unsupported(field: str, value: object) -> UserError:
    return UserError(
        f"preprocessor_config.json has the unsupported {field}={value!r:.80}; change that field to resize "
        "images in another way, and keep image_mean and image_std in the file."
    )


def processor_range(processor: dict) -> ValueRange | None:
    """Value range of transformers' image processor, which rescales and normalizes unless flags disable it."""
    rescales, normalizes = (_flag(processor, field) for field in ("do_rescale", "do_normalize"))
    factor = number(processor, "rescale_factor", float)
    white = 255 * (factor or 1 / 255) if rescales else 255.0
    if not normalizes:
        return 0.0, white
    return value_range_of(processor.get("image_mean"), processor.get("image_std"), white)


def _flag(processor: dict, field: str, *, default: bool = True) -> bool:
    value = processor.get(field, default)
    if not isinstance(value, bool):
        raise UserError(f"preprocessor_config.json should give true or false for {field!r}, but gives {value!r:.80}.")
    return value


def value_range_of(mean: Any, std: Any, white: float = 1.0) -> ValueRange | None:
    """(mean, std) of images in [0, white] -> `Preprocessing.value_range`."""
    if mean is None or std is None:
        return None
    channels = [mean, std]
    if not all(isinstance(part, list) and all(_is_moderate(n) for n in part) for part in channels):
        raise UserError(
            f"The mean and standard deviation of the images should be lists of numbers, but are {mean!r}, {std!r}."
        )
    if len(mean) != len(std) or not mean or min(std) <= 0:
        raise UserError(
            f"The images' mean {mean} and standard deviation {std} should have one positive number per channel."
        )
    low = tuple(-m / s for m, s in zip(mean, std, strict=True))
    high = tuple((white - m) / s for m, s in zip(mean, std, strict=True))
    if len(set(low)) == len(set(high)) == 1:
        return low[0], high[0]
    return low, high


def _is_moderate(number: object) -> bool:
    return isinstance(number, int | float) and -1e6 < number < 1e6

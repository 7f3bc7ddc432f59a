"""The image processors of transformers: how they resize and normalize, read and written."""

import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from keras_vit.checkpoints.formats import file_config
from keras_vit.checkpoints.formats.layout import inexpressible
from keras_vit.errors import refuse_first
from keras_vit.images.resizing import Interpolation, scaled_crop

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing

# The first has the fields of the image processor under "image_processor".
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# The filters of Pillow by their numbers; hamming, 5, is not supported.
_FILTERS: tuple[Interpolation, ...] = ("nearest", "lanczos3", "bilinear", "bicubic", "box")
# Defaults of transformers' image processors for fields missing in preprocessor_config.json.
_SQUARE = {"height": 224, "width": 224}
_IMAGENET = {"image_mean": file_config.IMAGENET_MEAN, "image_std": file_config.IMAGENET_STD}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_STRETCHED: dict[str, Any] = {
    "do_resize": True,
    "size": _SQUARE,
    "resample": 2,
    "do_center_crop": False,
    "crop_size": None,
    **_HALF,
}
_CROPPED: dict[str, Any] = {
    "do_resize": True,
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": _SQUARE,
    "image_mean": file_config.CLIP_MEAN,
    "image_std": file_config.CLIP_STD,
}
# Of detectors, which see the whole image, as segmentation models.
_OWL = _CROPPED | {"size": 768, "do_center_crop": False, "crop_size": None}
_PROCESSORS = {
    "ViT": _STRETCHED,
    "Bit": _CROPPED,
    "ViTHybrid": _CROPPED,
    "CLIP": _CROPPED,
    "ChineseCLIP": _CROPPED,
    "DINOv3ViT": _STRETCHED | _IMAGENET,
    "Siglip": _STRETCHED | {"resample": 3},
    "OwlViT": _OWL,
    "Owlv2": _OWL | {"size": 960, "resample": 2, "do_pad": True},
    "Eomt": _STRETCHED | _IMAGENET | {"size": 640},
    "DeiT": _STRETCHED | {"size": 256, "resample": 3, "do_center_crop": True, "crop_size": _SQUARE},
}
# The processors that the published files of a family name, for a folder without one.
_OF_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {}),
    "deit": ("DeiT", _IMAGENET),
    "vit_mae": ("ViT", _IMAGENET),
    "vit_msn": ("ViT", _IMAGENET),
    "clip": ("CLIP", {}),
    "metaclip_2": ("CLIP", {}),
    "chinese_clip": ("ChineseCLIP", {}),
    "ijepa": ("ViT", {}),
    "siglip": ("Siglip", {}),
    "dinov2": ("Bit", {"size": {"shortest_edge": 256}, **_IMAGENET}),
    "dinov3": ("DINOv3ViT", {}),
    "owlvit": ("OwlViT", {}),
    "owlv2": ("Owlv2", {}),
    "eomt": ("Eomt", {"do_pad": True}),
    "bit": ("Bit", _HALF),
    "vit-hybrid": ("ViTHybrid", _HALF),
}
_DTYPE = "dtype of resized pixels"
_FILL = "color beside a padded image"
_FILTER = "filter instead of resample"


def read_processor(
    files: Mapping[str, dict], model_type: str | None, image_size: tuple[int, int] | None
) -> file_config.ImageProcessing | None:
    """The images that the processor beside a model makes, else that of its family; None if neither is known."""
    own = _own_processor(files)
    processor = _completed(own or _processor_of_family(model_type))
    if not processor:
        return None
    fields, size = _resize(processor)
    if not own and size is not None and image_size is not None and image_size != size:
        # The processor of the family, at the size of this model.
        if (full := fields.get("crop_from")) is not None:
            new = image_size
            fields["crop_from"] = (
                tuple(map(scaled_crop, full, size, new))
                if isinstance(full, tuple)
                else scaled_crop(full, max(size), max(new))
            )
        size = image_size
    return file_config.ImageProcessing(fields, size, value_range=_value_range(processor))


def has_processor(files: Mapping[str, dict]) -> bool:
    """Whether a processor lies beside the model."""
    return bool(_own_processor(files))


def _own_processor(files: Mapping[str, dict]) -> dict:
    """The fields of the image processor: those in processor_config.json, which transformers 5 writes, go first."""
    nested, own = (files.get(name, {}) for name in PROCESSOR_FILES)
    fields = nested.get("image_processor")
    return fields if isinstance(fields, dict) else own


def _processor_of_family(model_type: str | None) -> dict:
    """The fields of the processor of a family, by model_type; empty for another one."""
    for name, (family, fields) in reversed(_OF_FAMILY.items()):
        if re.match(rf"{name}(_|$)", model_type or ""):
            return {"image_processor_type": f"{family}ImageProcessor", **fields}
    return {}


def _completed(fields: dict) -> dict:
    """The fields with the defaults of the processor's class; empty if there are none."""
    if not fields:
        return {}
    name = fields.get("image_processor_type") or fields.get("feature_extractor_type") or "ViTImageProcessor"
    family = re.sub(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", name) if isinstance(name, str) else None
    _refuse([("image_processor_type", name, family not in _PROCESSORS)])
    # transformers takes null for false where it expects a flag.
    given = {field: False if value is None and field.startswith("do_") else value for field, value in fields.items()}
    processor = _PROCESSORS[str(family)] | {field: value for field, value in given.items() if value is not None}
    if family in ("OwlViT", "Owlv2", "Eomt"):
        return _of_whole_image(processor, str(family))
    square = family in ("ViT", "DeiT", "DINOv3ViT") and _flag(processor, "default_to_square")
    if isinstance(processor["size"], int) and not square:
        processor["size"] = {"shortest_edge": processor["size"]}
    # DINOv3's own resizes the values of 0 to 1, without rounding them to bytes.
    return processor | {_DTYPE: "float32" if family == "DINOv3ViT" else "uint8"}


def _of_whole_image(processor: dict, family: str) -> dict:
    """The fields of a processor of OWL-ViT, OWLv2 or EoMT in the terms of the others, with its padding."""
    size = processor["size"]
    if isinstance(size, dict) and size.get("shortest_edge") is not None:
        sides = (size["shortest_edge"], size.get("longest_edge") or size["shortest_edge"])
        size = dict(zip(("height", "width"), sides, strict=True))
    padded = _flag(processor, "do_pad", default=False)
    if _flag(processor, "do_split_image", default=False):
        warnings.warn(
            "The original cuts images into overlapping windows (do_split_image); here the whole image is stretched "
            "to the size of one.",
            stacklevel=5,
        )
    # OWLv2 as it was trained, and as the Owlv2ImageProcessor of transformers 4 is written after: gray beside the
    # image, then scikit-image's resize, whatever `resample` says. That of transformers 5.24 pads with black, and its
    # form on torch cuts the blur off at 3 standard deviations.
    fill = ("gray" if family == "Owlv2" else "black") if padded else None
    processor = processor | {"size": size, "do_pad": False, _FILL: fill, _DTYPE: "uint8"}
    return processor | ({_DTYPE: "float32", _FILTER: "gaussian"} if family == "Owlv2" else {})


def _resize(processor: dict) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """Return fields of Preprocessing, and the size of the model's images; the size is None where it keeps it."""
    fields: dict[str, Any] = {"library": "transformers", "background": None, "dtype": processor[_DTYPE]}
    if processor.get(_FILL):
        fields |= {"resize": "pad", "padding": "after", "background": processor[_FILL]}
    sides, crop = (_sides(processor[field]) or () for field in ("size", "crop_size"))
    is_whole = len(sides) == 2 and not _flag(processor, "do_center_crop")
    _check_resizing(processor, sides, crop, is_whole=is_whole)
    if not _flag(processor, "do_resize"):
        return fields, None
    fields["interpolation"] = processor.get(_FILTER, _FILTERS[processor["resample"]])
    if is_whole:
        return fields, (sides[0], sides[1])
    if len(sides) == 1:
        fields |= {"resize": "resize-small", "crop_from": sides[0]}
    elif sides != crop:
        fields["crop_from"] = sides
    return fields, (crop[0], crop[1])


def _check_resizing(processor: dict, sides: tuple[int, ...], crop: tuple[int, ...], *, is_whole: bool) -> None:
    resizes, crops = _flag(processor, "do_resize"), _flag(processor, "do_center_crop")
    size, crop_size, resample = (processor[field] for field in ("size", "crop_size", "resample"))
    is_inside = len(crop) == 2 and not any(map(operator.lt, sides * (3 - len(sides)), crop))
    _refuse(
        [
            *((field, True, _flag(processor, field, default=False)) for field in ("do_flip_channel_order", "do_pad")),
            ("do_resize", False, crops and not resizes),
            ("resample", resample, resizes and (type(resample) is not int or not 0 <= resample < len(_FILTERS))),
            ("size", size, resizes and not is_whole and not (sides and crops)),
            ("crop_size", crop_size, resizes and not is_whole and not is_inside),
        ]
    )


def _refuse(rules: Iterable[tuple[str, object, bool]]) -> None:
    """Raise UserError for the first field whose value is unsupported."""
    refuse_first(
        (
            is_unsupported,
            f"preprocessor_config.json has the unsupported {field}={value!r:.80}; change that field to resize images "
            "in another way, and keep image_mean and image_std in the file.",
        )
        for field, value, is_unsupported in rules
    )


def processor_config(preprocessing: "Preprocessing", model_type: str) -> dict:
    """The content of preprocessor_config.json for a family of transformers.

    Its pixels are those of `preprocessing`, but for what only the code of JAX does (no antialiasing, no rounding to
    bytes), and the side to which timm rounds the place of a crop. Cropping the largest centered square and resizing it
    equals resizing the smaller side and cropping the center.

    Raises UserError for a resize that no processor has.
    """
    own = _of_whole if model_type in _WHOLE else _of_classifier
    family, fields = own(preprocessing, _WHOLE.get(model_type, ""))
    mean, std = file_config.mean_and_std(preprocessing)
    interpolation = preprocessing.interpolation
    if interpolation in (None, "gaussian"):  # that of OWLv2's processor says bilinear
        interpolation = "bilinear"
    elif interpolation == "area":
        interpolation = "box"
    if interpolation == "box" and model_type not in _WHOLE:
        warnings.warn(
            "preprocessor_config.json asks for the interpolation box, which transformers has in one backend: load it "
            "by AutoImageProcessor.from_pretrained(…, backend='pil').",
            stacklevel=4,
        )
    return {
        "image_processor_type": f"{family}ImageProcessor",
        "do_resize": True,
        "resample": _FILTERS.index(interpolation),
        **fields,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }


# Families which see the whole image.
_WHOLE = {"eomt": "Eomt", "eomt_dinov3": "Eomt", "owlvit": "OwlViT", "owlv2": "Owlv2"}


def _check_resize(is_possible: bool, preprocessing: "Preprocessing") -> None:
    if not is_possible:
        height, width = preprocessing.image_size
        how = f"{preprocessing.resize!r} to {height}x{width}"
        raise inexpressible("transformers has no processor for each resize, and crops squares alone", how)


def _of_whole(preprocessing: "Preprocessing", family: str) -> tuple[str, dict]:
    """Name of the image processor and its own fields, for a model of the whole image."""
    height, width = preprocessing.image_size
    padded = preprocessing.resize == "pad" and preprocessing.padding == "after" and family != "OwlViT"
    is_possible = preprocessing.crop_from is None and (padded or preprocessing.resize == "stretch")
    _check_resize(is_possible, preprocessing)
    if family == "Eomt":  # one that neither pads nor splits gives images of any size
        edges = {"shortest_edge": height, "longest_edge": width}
        return family, {"size": edges, "do_pad": padded, "do_split_image": not padded}
    fields = {"do_center_crop": False} if family == "OwlViT" else {"do_pad": padded}
    return family, {"size": {"height": height, "width": width}, **fields}


def _of_classifier(preprocessing: "Preprocessing", family: str) -> tuple[str, dict]:
    """Name of the image processor and its own fields, for other models."""
    (height, width), crop_from, resize = preprocessing.image_size, preprocessing.crop_from, preprocessing.resize
    is_square = resize != "crop" or height == width
    is_by_edge = resize != "resize-small" or isinstance(crop_from, int)
    _check_resize(resize != "pad" and is_by_edge and is_square, preprocessing)
    target = {"height": height, "width": width}
    crop = {"do_center_crop": True, "crop_size": target}
    if resize != "stretch":
        return "Bit", {"size": {"shortest_edge": crop_from if isinstance(crop_from, int) else height}, **crop}
    if crop_from is not None:
        full = (crop_from, crop_from) if isinstance(crop_from, int) else crop_from
        return "DeiT", {"size": {"height": full[0], "width": full[1]}, **crop}
    is_dinov3 = preprocessing.library == "transformers" and preprocessing.dtype == "float32"
    return "DINOv3ViT" if is_dinov3 else "ViT", {"size": target}


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
    return sides if sides and all(file_config.is_side(side) for side in sides) else None


def _value_range(processor: dict) -> file_config.ValueRange | None:
    """Value range of transformers' image processor, which rescales and normalizes unless flags disable it."""
    rescales, normalizes = (_flag(processor, field) for field in ("do_rescale", "do_normalize"))
    factor = file_config.number(processor, "rescale_factor", float)
    white = 255 * (factor or 1 / 255) if rescales else 255.0
    if not normalizes:
        return 0.0, white
    return file_config.value_range_of(processor.get("image_mean"), processor.get("image_std"), white)


def _flag(processor: dict, field: str, *, default: bool = True) -> bool:
    value = processor.get(field, default)
    file_config.check_field(isinstance(value, bool), field, "true or false", value, PROCESSOR_FILES[1])
    return value

"""Read the config.json and preprocessor_config.json of transformers and timm."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints.huggingface.config_json import (
    FAMILY_DEFAULTS,
    TRANSFORMERS_GELU,
    family_sizes,
    vision_config,
)
from keras_vit.checkpoints.timm_models import timm_model
from keras_vit.errors import UserError
from keras_vit.files.safetensors import read_json
from keras_vit.models.config import Classifier, Gelu, Resize

# All names in transformers -> `ViTConfig.gelu`.
_GELU: dict[str, Gelu] = {name: gelu for gelu, name in TRANSFORMERS_GELU.items()}
_GELU |= {"gelu_new": "tanh", "gelu_fast": "tanh", "gelu_python": "erf"}
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
}
_CROPPED: dict[str, Any] = {"do_resize": True, "size": {"shortest_edge": 224}, "resample": 3, "do_center_crop": True}
_CROPPED |= {"crop_size": _SQUARE, "image_mean": [0.48145466, 0.4578275, 0.40821073]}
_CROPPED |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
_PROCESSORS = {"ViT": _STRETCHED, "Bit": _CROPPED, "ViTHybrid": _CROPPED, "CLIP": _CROPPED, "DINOv3ViT": _STRETCHED}
_PROCESSORS |= {"Siglip": _STRETCHED | {"resample": 3}}
# Supported model types of transformers; ViT-MSN is ViT without a pooler.
_MODEL_TYPES = ("vit", "vit_msn", "vit-hybrid", "bit", *FAMILY_DEFAULTS)
# Defaults of transformers' config classes for fields missing in config.json; of ViTHybridConfig as in 4.57, the last
# version that has it.
_VIT_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "qkv_bias": True,
    "pooler_act": "tanh",
}
_HYBRID_BACKBONE: dict[str, Any] = {
    "layer_type": "bottleneck",
    "global_padding": "same",
    "embedding_dynamic_padding": True,
}
_HYBRID_BACKBONE |= {"depths": [3, 4, 9]}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vit": _VIT_DEFAULTS,
    "vit_msn": _VIT_DEFAULTS | {"layer_norm_eps": 1e-6},
    "vit-hybrid": _VIT_DEFAULTS | {"patch_size": 1, "backbone_config": _HYBRID_BACKBONE},
    **FAMILY_DEFAULTS,
}
_BIT_DEFAULTS: dict[str, Any] = {
    "layer_type": "preactivation",
    "global_padding": None,
    "num_groups": 32,
    "hidden_act": "relu",
    "output_stride": 32,
    "embedding_dynamic_padding": False,
    "depths": [3, 4, 6, 3],
}
# Required fields that the arrays do not contain; without a model_type they have no defaults.
_NOT_IN_ARRAYS = ("num_attention_heads", "hidden_act", "layer_norm_eps")
# Sizes that are also in the arrays: ViTConfig field -> name in transformers, in timm.
_SIZES = {"hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "mlp_dim": "intermediate_size"}
_TIMM_SIZES = {"hidden_size": "embed_dim", "num_layers": "depth"}

ValueRange = tuple[float | tuple[float, ...], float | tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class FileConfig:
    """Settings of a config.json; None where it has none."""

    num_heads: int | None = None
    num_groups: int | None = None
    gelu: Gelu | None = None
    layer_norm_epsilon: float | None = None
    layer_scale: float | None = None
    image_size: tuple[int, int] | None = None
    image_size_is_exact: bool = True
    """Whether the position embeddings must have the grid of this size."""
    classifier: Classifier | None = None
    resize: Resize = "stretch"
    """See Preprocessing."""
    crop_from: int | None = None
    """See Preprocessing."""
    other_resize: str | None = None
    """How the original resizes images, if not as `resize` does here."""
    value_range: ValueRange | None = None
    """See Preprocessing."""
    sizes: Mapping[str, tuple[str, object]] = dataclasses.field(default_factory=dict)
    """Values that the arrays must agree with: ViTConfig field -> (name in config.json, value)."""
    resnet_sizes: Mapping[str, tuple[str, object]] = dataclasses.field(default_factory=dict)
    """The same for a ResNet or the stem of a hybrid."""
    names_model: bool = False
    """Whether it names the architecture, which determines all settings."""


def read_file_config(path: pathlib.Path, layout: str, model_types: tuple[str, ...] = ()) -> FileConfig:
    """Read the configs beside the weights; `path` is the folder or the file of weights in it.

    model_types: those of transformers that have the arrays of the layout.
    """
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".npz" or not (folder / "config.json").is_file():
        return FileConfig()
    config = read_json(folder / "config.json")
    if "architecture" in config or "pretrained_cfg" in config:
        return _timm(config)
    kind = config.get("model_type")
    if layout == "huggingface" and kind is not None and kind not in _MODEL_TYPES:
        raise UserError(
            f"config.json has the unsupported model_type={kind!r:.80}; supported are {', '.join(_MODEL_TYPES)}."
        )
    if model_types and kind is not None and kind not in model_types:
        raise UserError(
            f"config.json says model_type={kind!r:.80}, but the arrays are those of {' or '.join(model_types)}; "
            "replace it by the one that belongs to them."
        )
    processor = folder / "preprocessor_config.json"
    return _transformers(config, read_json(processor) if processor.is_file() else {}, layout)


def _transformers(fields: dict, processor: dict, layout: str) -> FileConfig:
    config = _completed(vision_config(fields)) if layout == "huggingface" else fields
    backbone = config.get("backbone_config") or config
    if not isinstance(backbone, dict):
        raise UserError(f"config.json should give backbone_config as an object, but gives {backbone!r:.80}.")
    kind, processor = config.get("model_type"), _completed_processor(processor)
    is_bit = kind == "bit" or backbone.get("model_type", kind and "bit" if backbone is not config else None) == "bit"
    sizes: dict[str, tuple[str, object]] = {}
    if is_bit:
        backbone = _BIT_DEFAULTS | backbone
        _refuse_other_operators(backbone)
        sizes = _bit_sizes(backbone)
    common: dict[str, Any] = {
        "num_groups": _number(backbone, "num_groups"),
        "image_size": _pair(config, "image_size"),
        "value_range": _processor_range(processor),
        "resnet_sizes": sizes,
    }
    common["resize"], common["crop_from"], size = _processor_resize(processor)
    common["other_resize"] = _other_filter(processor, common["resize"])
    if kind == "bit":  # the model accepts any size
        common["image_size"] = common["image_size"] or size
        return FileConfig(**common)
    act = config.get("hidden_act")
    if act is not None and (not isinstance(act, str) or act not in _GELU):
        raise UserError(f"config.json has the unsupported activation {act!r:.80}; supported are {', '.join(_GELU)}.")
    if config.get("pooler_act", "tanh") != "tanh":
        raise UserError(
            f"config.json has the unsupported pooler activation {config['pooler_act']!r:.80}; supported is tanh."
        )
    sizes = _sizes(config, _SIZES)
    if "qkv_bias" in config:
        sizes["qkv_bias"] = "qkv_bias", config["qkv_bias"]
    sizes |= family_sizes(config)
    return FileConfig(
        **common,
        num_heads=_number(config, "num_attention_heads"),
        # DINOv2's SwiGLU ignores hidden_act.
        gelu="silu" if config.get("use_swiglu_ffn") else _GELU[act] if act else None,
        layer_scale=_number(config, "layerscale_value", float),
        layer_norm_epsilon=_number(config, "layer_norm_eps", float),
        sizes=sizes,
    )


def _completed(fields: dict) -> dict:
    """config.json with the defaults of its class; transformers writes only values that differ from them."""
    kind = fields.get("model_type")
    if kind == "bit":
        return _BIT_DEFAULTS | fields
    if kind is None:
        if missing := [field for field in _NOT_IN_ARRAYS if fields.get(field) is None]:
            raise UserError(
                f"config.json has neither model_type nor {', '.join(missing)}, which are not in the arrays; use the "
                "complete config.json."
            )
        return fields
    # transformers accepts null for the backbone only, where it means the default.
    return _DEFAULTS[kind] | {name: value for name, value in fields.items() if value is not None}


def _bit_sizes(backbone: dict) -> dict[str, tuple[str, object]]:
    depths = backbone["depths"]
    if not isinstance(depths, list | tuple) or not all(_is_side(depth) for depth in depths):
        raise UserError(f"config.json should give 'depths' as a list of positive numbers, but gives {depths!r:.80}.")
    return {
        "block_units": ("depths", tuple(depths)),
        "preactivation": ("layer_type == 'preactivation'", backbone["layer_type"] == "preactivation"),
    }


def _refuse_other_operators(backbone: dict) -> None:
    """Raise UserError for a Bit other than BiT and the stem of the hybrids, which no published weights use."""
    layer_type, padding = backbone.get("layer_type"), backbone.get("global_padding")
    same = isinstance(padding, str) and padding.upper() == "SAME"
    if (layer_type, same) not in (("preactivation", False), ("bottleneck", True)) or (padding and not same):
        raise UserError(
            "config.json should describe a Bit of layer_type 'preactivation' with global_padding null, or "
            f"'bottleneck' with 'same', but says {layer_type!r} with {padding!r}."
        )
    expected = {"hidden_act": "relu", "output_stride": 32, "embedding_dynamic_padding": same}
    for field, value in expected.items():
        if backbone.get(field, value) != value:
            raise UserError(
                f"config.json should give {field}={value!r} for this Bit, but gives {backbone[field]!r:.80}."
            )


def _timm(config: dict) -> FileConfig:
    pretrained = config.get("pretrained_cfg")
    pretrained = pretrained if isinstance(pretrained, dict) else config
    arguments = config.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise UserError(f"config.json should give model_args as an object, but gives {arguments!r:.80}.")
    model = timm_model(config.get("architecture", pretrained.get("architecture")), arguments)
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool not in (None, "token", "avg", "map"):
        raise UserError(f"config.json has the unsupported global_pool={pool!r:.80}; supported are token, avg and map.")
    size = _pair(arguments, "img_size")
    pools: dict[str | None, Classifier] = {"token": "token", "avg": "gap", "map": "map"}
    return FileConfig(
        classifier=pools.get(pool),
        num_heads=_number(arguments, "num_heads") or model.num_heads,
        gelu=model.gelu,
        layer_norm_epsilon=model.layer_norm_epsilon,
        layer_scale=_number(arguments, "init_values", float),
        image_size=size or _pair(pretrained, "input_size"),
        image_size_is_exact=size is not None,  # after fine-tuning, input_size is still that of pretraining
        value_range=_range(pretrained.get("mean"), pretrained.get("std")),
        other_resize=_timm_resize(pretrained),
        sizes=_sizes(arguments, _TIMM_SIZES) | _timm_settings(arguments),
        names_model=True,
    )


def _timm_settings(arguments: dict) -> dict[str, tuple[str, object]]:
    """Values of model_args that the arrays must agree with: ViTConfig field -> (name, value)."""
    settings: dict[str, tuple[str, object]] = {}
    for name, field in (("reg_tokens", "num_registers"), ("pre_norm", "pre_norm"), ("class_token", "has_class_token")):
        if arguments.get(name) is not None:
            settings[field] = name, arguments[name]
    if arguments.get("no_embed_class") is not None and arguments.get("class_token") is not False:
        settings["prefix_positions"] = "not no_embed_class", not arguments["no_embed_class"]
    return settings


def _timm_resize(pretrained: dict) -> str | None:
    """What timm does to images besides stretching them with bilinear interpolation, as is done here."""
    filter_, crop = pretrained.get("interpolation", "bilinear"), pretrained.get("crop_mode", "squash")
    ways = [] if filter_ == "bilinear" else [f"{filter_!s:.80} interpolation"]
    if crop != "squash":
        ways.append(f"crop_mode={crop!r:.80} and crop_pct={pretrained.get('crop_pct')!r:.80}")
    return " and ".join(ways) or None


def _sizes(config: dict, names: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    sizes: dict[str, tuple[str, object]] = {field: (name, _number(config, name)) for field, name in names.items()}
    sizes["patch"] = ("patch_size", _pair(config, "patch_size"))
    return {field: (name, value) for field, (name, value) in sizes.items() if value is not None}


def _number(config: dict, field: str, kind: type[int] | type[float] = int) -> Any:
    value: Any = config.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value < 10**6:
        raise UserError(f"config.json should give a positive number for {field!r}, but gives {value!r:.80}.")
    return kind(value)


def _pair(config: dict, field: str) -> tuple[int, int] | None:
    size = config.get(field)
    if size is None:
        return None
    pair: Any = [size, size] if isinstance(size, int) else size
    if field == "input_size" and isinstance(size, list) and len(size) == 3:  # channels come first
        pair = size[1:]
    if not (isinstance(pair, list) and len(pair) == 2 and all(_is_side(side) for side in pair)):
        raise UserError(f"config.json should give {field!r} as one or two numbers of pixels, but gives {size!r:.80}.")
    return pair[0], pair[1]


def _is_side(side: Any) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and 0 < side < 10**5


def _completed_processor(fields: dict) -> dict:
    """preprocessor_config.json with the defaults of its class; empty if it is."""
    if not fields:
        return {}
    kind = fields.get("image_processor_type") or fields.get("feature_extractor_type") or "ViTImageProcessor"
    family = re.sub(r"(ImageProcessor(Fast|Pil)?|FeatureExtractor)$", "", kind) if isinstance(kind, str) else None
    if family not in _PROCESSORS:
        raise _unsupported("image_processor_type", kind)
    processor = _PROCESSORS[family] | {name: value for name, value in fields.items() if value is not None}
    if family != "ViT" and isinstance(processor["size"], int):
        processor["size"] = {"shortest_edge": processor["size"]}
    return processor


def _processor_resize(processor: dict) -> tuple[Resize, int | None, tuple[int, int] | None]:
    """(resize, crop_from, size) of Preprocessing that equals transformers' image processor.

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


def _other_filter(processor: dict, resize: Resize) -> str | None:
    """The interpolation that the processor asks for, if it is not the one that `resize` has here."""
    if not processor or not processor["do_resize"] or processor["resample"] == RESAMPLE[resize]:
        return None
    return f"{_FILTERS[processor['resample']]} interpolation"


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
    return sides if sides and all(_is_side(side) for side in sides) else None


def _unsupported(field: str, value: object) -> UserError:
    return UserError(
        f"preprocessor_config.json has the unsupported {field}={value!r:.80}; change that field to resize "
        "images in another way, and keep image_mean and image_std in the file."
    )


def _processor_range(processor: dict) -> ValueRange | None:
    """Value range of transformers' image processor, which rescales and normalizes unless flags disable it."""
    rescales, normalizes = (_flag(processor, field) for field in ("do_rescale", "do_normalize"))
    factor = _number(processor, "rescale_factor", float)
    white = 255 * (factor or 1 / 255) if rescales else 255.0
    if not normalizes:
        return 0.0, white
    found = _range(processor.get("image_mean"), processor.get("image_std"), white)
    if found is None and white != 1.0:
        raise UserError("preprocessor_config.json should give image_mean and image_std beside its own rescaling.")
    return found


def _flag(processor: dict, field: str, *, default: bool = True) -> bool:
    value = processor.get(field, default)
    if not isinstance(value, bool):
        raise UserError(f"preprocessor_config.json should give true or false for {field!r}, but gives {value!r:.80}.")
    return value


def _range(mean: Any, std: Any, white: float = 1.0) -> ValueRange | None:
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

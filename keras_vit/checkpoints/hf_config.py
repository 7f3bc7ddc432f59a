"""Read the config.json and the image processor's file of transformers and timm."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keras_vit.checkpoints.huggingface.config_json import (
    FAMILY_DEFAULTS,
    TRANSFORMERS_GELU,
    family_sizes,
    heads_of,
    is_side,
    number,
    pair,
    vision_config,
)
from keras_vit.checkpoints.huggingface.image_processor import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    PROCESSOR_FILES,
    ValueRange,
    completed_processor,
    processor_of_family,
    processor_range,
    processor_resize,
    value_range_of,
)
from keras_vit.checkpoints.key_mapping import Weight
from keras_vit.checkpoints.timm_models import components_of, default_pooling, is_gated, layer_scale_of, timm_model
from keras_vit.errors import UserError
from keras_vit.files.kinds import kind_of
from keras_vit.files.safetensors import read_json, stored_image_size
from keras_vit.images.geometry import Resize, scaled_crop
from keras_vit.models.config import Classifier, Gelu, ModelConfig
from keras_vit.models.resizing import Resampler

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing

# All names in transformers -> `ViTConfig.gelu`.
_GELU: dict[str, Gelu] = {name: gelu for gelu, name in TRANSFORMERS_GELU.items()}
_GELU |= {"gelu_new": "tanh", "gelu_fast": "tanh", "gelu_python": "erf"}
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
# Defaults of timm's transforms for fields missing in pretrained_cfg.
_TIMM_MODES: Mapping[str, Resize] = {"center": "resize-small", "squash": "stretch", "border": "pad"}
_TIMM_FILTERS = {name: name for name in ("nearest", "bilinear", "bicubic", "box")} | {"lanczos": "lanczos3"}
_TIMM_RESIZING = {"interpolation": "bicubic", "crop_mode": "center", "crop_pct": 0.875}
# Sizes that are also in the arrays: ViTConfig field -> name in transformers, in timm.
_SIZES = {"hidden_size": "hidden_size", "num_layers": "num_hidden_layers", "mlp_dim": "intermediate_size"}
_TIMM_SIZES = {"hidden_size": "embed_dim", "num_layers": "depth"}
# Arguments of timm that are in the arrays -> ViTConfig field.
_TIMM_SETTINGS = {"reg_tokens": "num_registers", "pre_norm": "pre_norm", "class_token": "has_class_token"}
_TIMM_SETTINGS |= {"qkv_bias": "qkv_bias", "fc_norm": "norm_after_pooling"}


# Where a model with convolutions before the encoder, or without encoder, takes the image.
_FIRST_CONVOLUTIONS = (
    "conv_root/kernel",
    "conv_stem/0/conv/kernel",
    "resnet/root_block/standardized_conv2d/kernel",
)


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
    preprocessing: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Preprocessing: how the original resizes images of `processed_size`; empty if no file says it."""
    processed_size: tuple[int, int] | None = None
    """Height and width to which the image processor leads; the image size of DINOv2's weights is another."""
    crop_shares: Mapping[tuple[int, int] | None, float] = dataclasses.field(default_factory=dict)
    """timm's crop_pct of an image size, and of all others under None: the share of the resized image in the crop."""
    value_range: ValueRange | None = None
    """See Preprocessing."""
    sizes: Mapping[str, tuple[str, object]] = dataclasses.field(default_factory=dict)
    """Values that the arrays must agree with: ViTConfig field -> (name in config.json, value)."""
    resnet_sizes: Mapping[str, tuple[str, object]] = dataclasses.field(default_factory=dict)
    """The same for a ResNet or the stem of a hybrid."""
    heads: tuple[str, ...] = ()
    """The heads that it says there are, as far as it says so."""
    channels: tuple[str, int] | None = None
    """(name in config.json, channels of the images), if it says so."""
    num_classes: tuple[str, int] | None = None
    """(name in config.json, width of the head), if it says so."""
    names_model: bool = False
    """Whether it names the architecture, which determines all settings."""
    resampler: Resampler | None = None
    """How the original resizes position embeddings, if not as others of its layout."""

    def preprocessing_at(
        self, image_size: int | tuple[int, int], channels: int, value_range: ValueRange
    ) -> "Preprocessing":
        """The preprocessing of the original for images of a size; the official one, if no file says it."""
        from keras_vit.images.preprocessing import Preprocessing  # imported here: it imports Keras, which takes seconds

        size = (image_size, image_size) if isinstance(image_size, int) else image_size
        fields = {"channels": channels, "value_range": value_range, **self.preprocessing}
        if not self.crop_shares:
            return Preprocessing(self.processed_size or size, **fields).for_image_size(size)
        share = self.crop_shares.get(size, self.crop_shares[None])
        full = math.floor(size[0] / share), math.floor(size[1] / share)
        if fields["resize"] == "resize-small":
            fields["crop_from"] = full[0] if full[0] == full[1] else full
        elif full != size:
            fields["crop_from"] = full
        return Preprocessing(size, **fields)

    def differences(self, image_size: tuple[int, int] | None) -> list[str]:
        """How the original preprocesses images in another way, after its name.

        image_size: height and width of the model's images, if they are those that the file says.
        """
        sentences = []
        if self.processed_size is not None and image_size not in (None, self.processed_size):
            sentences.append(
                f"gives its model images of {_pixels(self.processed_size)}, although the position embeddings are for "
                f"{_pixels(image_size)}, which the model here takes; pass image_size={max(self.processed_size)} for "
                "its predictions."
            )
        return sentences


def _pixels(size: tuple[int, int] | None) -> str:
    return "x".join(map(str, size or ())) + " pixels"


def read_file_config(path: pathlib.Path, layout: str, model_types: tuple[str, ...] = ()) -> FileConfig:
    """Read the configs beside the weights; `path` is the folder or the file of weights in it.

    model_types: those of transformers that have the arrays of the layout.
    """
    folder = path if path.is_dir() else path.parent
    kind = kind_of(path)
    if kind == "npz" or not (folder / "config.json").is_file():
        return FileConfig(image_size=stored_image_size(path)) if kind == "safetensors" else FileConfig()
    config = read_json(folder / "config.json")
    if "architecture" in config or "pretrained_cfg" in config:
        return _timm(config)
    model_type = config.get("model_type")
    if model_type is not None and model_type not in _MODEL_TYPES:
        raise UserError(
            f"config.json has the unsupported model_type={model_type!r:.80}; supported are {', '.join(_MODEL_TYPES)}."
        )
    if model_types and model_type is not None and model_type not in model_types:
        raise UserError(
            f"config.json says model_type={model_type!r:.80}, but the arrays are those of {' or '.join(model_types)}; "
            "replace it by the one that belongs to them."
        )
    return _transformers(config, _image_processor(folder), layout, model_types)


def _image_processor(folder: pathlib.Path) -> dict:
    """The fields of the image processor: those in processor_config.json, which transformers 5 writes, go first."""
    nested, own = (read_json(path) if (path := folder / name).is_file() else {} for name in PROCESSOR_FILES)
    fields = nested.get("image_processor")
    return fields if isinstance(fields, dict) else own


def _transformers(fields: dict, processor: dict, layout: str, model_types: tuple[str, ...]) -> FileConfig:
    config = _completed(vision_config(fields)) if layout == "huggingface" else fields
    backbone = config.get("backbone_config") or config
    if not isinstance(backbone, dict):
        raise UserError(f"config.json should give backbone_config as an object, but gives {backbone!r:.80}.")
    kind = config.get("model_type")
    given, processor = bool(processor), completed_processor(processor or processor_of_family(kind))
    is_bit = kind == "bit" or backbone.get("model_type", kind and "bit" if backbone is not config else None) == "bit"
    sizes: dict[str, tuple[str, object]] = {}
    if is_bit:
        backbone = _BIT_DEFAULTS | backbone
        _refuse_other_operators(backbone)
        sizes = _bit_sizes(backbone)
    common: dict[str, Any] = {
        "num_groups": number(backbone, "num_groups"),
        "image_size": pair(config, "image_size"),
        "value_range": processor_range(processor),
        "resnet_sizes": sizes,
        "channels": _number_of(config, "num_channels"),
        # The head of CLIP is a projection.
        "num_classes": None if "clip" in (kind, *model_types) else _num_labels(fields),
    }
    common["preprocessing"], size = processor_resize(processor)
    if not given and size is not None and common["image_size"] not in (None, size):
        # The processor of the family, at the size of this model.
        if (crop_from := common["preprocessing"].get("crop_from")) is not None:
            new = common["image_size"]
            common["preprocessing"]["crop_from"] = (
                tuple(map(scaled_crop, crop_from, size, new))
                if isinstance(crop_from, tuple)
                else scaled_crop(crop_from, max(size), max(new))
            )
        size = common["image_size"]
    common["processed_size"] = size
    if kind == "bit":  # the model accepts any size
        common["image_size"] = common["image_size"] or (size if given else None)
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
    # Without a model_type, the arrays may still tell the family.
    family = kind or next((name for name in model_types if name in FAMILY_DEFAULTS), None)
    if family is not None and family.startswith("dinov2") and "use_swiglu_ffn" not in config:
        sizes["gated_mlp"] = "no use_swiglu_ffn and thus a gated MLP", False
    sizes |= family_sizes(config, family)
    if family is not None:
        because = f"model_type={family!r} and thus"
        if family != "dinov3_vit":
            sizes["position_embedding"] = f"{because} positions", "learned"
        if not family.startswith("siglip"):
            sizes["num_class_tokens"] = f"{because} class tokens", 2 if family == "deit" else 1
    return FileConfig(
        **common,
        classifier="map" if layout == "huggingface" and kind in ("siglip", "siglip_vision_model") else None,
        heads=heads_of(fields) if layout == "huggingface" else (),
        num_heads=number(config, "num_attention_heads"),
        # DINOv2's SwiGLU ignores hidden_act.
        gelu="silu" if config.get("use_swiglu_ffn") else _GELU[act] if act else None,
        layer_scale=number(config, "layerscale_value", float),
        layer_norm_epsilon=number(config, "layer_norm_eps", float),
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


def _number_of(config: dict, field: str) -> tuple[str, int] | None:
    value = number(config, field)
    return None if value is None else (field, value)


def _num_labels(config: dict) -> tuple[str, int] | None:
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return "classes in id2label", len(names)
    return _number_of(config, "num_labels")


def _bit_sizes(backbone: dict) -> dict[str, tuple[str, object]]:
    depths = backbone["depths"]
    if not isinstance(depths, list | tuple) or not all(is_side(depth) for depth in depths):
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
    name = str(config.get("architecture") or pretrained.get("architecture"))
    model = timm_model(name, arguments)
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool not in (None, "token", "avg", "map"):
        raise UserError(f"config.json has the unsupported global_pool={pool!r:.80}; supported are token, avg and map.")
    size, scale = pair(arguments, "img_size"), {"init_values": layer_scale_of(name)} | arguments
    pools: dict[str | None, Classifier] = {"token": "token", "avg": "gap", "map": "map"}
    return FileConfig(
        classifier=pools.get(pool, default_pooling(name)),
        num_heads=number(arguments, "num_heads") or model.num_heads,
        gelu=model.gelu,
        layer_norm_epsilon=model.layer_norm_epsilon,
        layer_scale=number(scale, "init_values", float) if scale["init_values"] else None,  # 0 is none, too
        image_size=size or pair(pretrained, "input_size"),
        image_size_is_exact=size is not None,  # after fine-tuning, input_size is still that of pretraining
        value_range=value_range_of(pretrained.get("mean") or IMAGENET_MEAN, pretrained.get("std") or IMAGENET_STD),
        channels=_number_of(arguments, "in_chans"),
        num_classes=_number_of(config, "num_classes") if config.get("num_classes") else None,  # 0 is that of features
        **_timm_resize(pretrained),
        sizes=_sizes(arguments, _TIMM_SIZES) | _timm_settings(name, arguments),
        names_model=True,
        heads=("head",) if config.get("num_classes") else (),
        resampler="bilinear" if name.startswith("flexivit_") else None,
    )


def _timm_settings(architecture: str, arguments: dict) -> dict[str, tuple[str, object]]:
    """What the architecture's name and model_args say of the arrays: ViTConfig field -> (name, value)."""
    settings: dict[str, tuple[str, object]] = {}
    for field, (name, value) in components_of(architecture).items():
        if name not in arguments:
            settings[field] = f"architecture={architecture!r} and thus {name}", value
    for name, field in _TIMM_SETTINGS.items():
        if arguments.get(name) is not None:
            settings[field] = name, arguments[name]
    if "pos_embed" in arguments:
        learned = arguments["pos_embed"] not in ("", "none")
        settings["position_embedding"] = "pos_embed and thus", "learned" if learned else "none"
    ratio, width = number(arguments, "mlp_ratio", float), number(arguments, "embed_dim")
    if ratio is not None and width is not None:
        hidden = int(width * ratio)
        settings["mlp_dim"] = "mlp_ratio and thus", hidden // 2 if is_gated(architecture) else hidden
    if arguments.get("no_embed_class") is not None and arguments.get("class_token") is not False:
        settings["prefix_positions"] = "not no_embed_class", not arguments["no_embed_class"]
    return settings


def _timm_resize(pretrained: dict) -> dict[str, Any]:
    """The fields `preprocessing` and `crop_shares` of a pretrained_cfg (resolve_data_config of timm)."""
    given = {name: value for name, value in pretrained.items() if value}
    filter_, mode, share = (given.get(name, default) for name, default in _TIMM_RESIZING.items())
    if filter_ not in _TIMM_FILTERS or mode not in _TIMM_MODES:
        name, value, known = (
            ("interpolation", filter_, _TIMM_FILTERS)
            if filter_ not in _TIMM_FILTERS
            else ("crop_mode", mode, _TIMM_MODES)
        )
        raise UserError(f"config.json has the unsupported {name}={value!r:.80}; supported are {', '.join(known)}.")
    shares: dict[tuple[int, int] | None, float] = {None: share}
    if (size := pair(pretrained, "test_input_size")) is not None:
        shares[size] = given.get("test_crop_pct", share)
    for value in shares.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 1.0:
            raise UserError(f"config.json should give a crop_pct of 0.01 to 1, but gives {value!r:.80}.")
    fields = {"library": "timm", "background": None, "resize": _TIMM_MODES[mode]}
    return {"preprocessing": fields | {"interpolation": _TIMM_FILTERS[filter_]}, "crop_shares": shares}


def _sizes(config: dict, names: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    sizes: dict[str, tuple[str, object]] = {field: (name, number(config, name)) for field, name in names.items()}
    sizes["patch"] = ("patch_size", pair(config, "patch_size"))
    return {field: (name, value) for field, (name, value) in sizes.items() if value is not None}


def refuse_contradictions(config: ModelConfig, sizes: Mapping[str, tuple[str, object]]) -> None:
    """Raise UserError if config.json says another value of a field than the arrays have."""
    for field, (name, value) in sizes.items():
        if getattr(config, field) != value:
            raise UserError(
                f"config.json says {name}={value!s:.80}, but the arrays are of a model with {getattr(config, field)}; "
                "replace it by the one that belongs to them."
            )


def refuse_other_widths(weights: Mapping[str, Weight], file_config: FileConfig) -> None:
    """Raise UserError if config.json counts other channels or classes than the arrays have."""
    for counted, axis, keys in (
        (file_config.channels, -2, (*_FIRST_CONVOLUTIONS, "embedding/kernel")),
        (file_config.num_classes, -1, ("head/kernel", "resnet/head/conv2d/kernel")),
    ):
        weight = next((weights[key] for key in keys if key in weights and len(weights[key].shape) >= 2), None)
        if counted is not None and weight is not None and weight.shape[axis] != counted[1]:
            raise UserError(
                f"config.json says {counted[0]}={counted[1]}, but {weight.source.key!r} has {weight.shape[axis]}; "
                "replace it by the one that belongs to the arrays."
            )

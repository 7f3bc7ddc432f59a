"""timm's config.json: `architecture`, `model_args` and `pretrained_cfg`, read and written."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keras_vit.checkpoints.formats import timm_models
from keras_vit.checkpoints.formats.file_config import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    FileConfig,
    ImageProcessing,
    Sizes,
    ValueRange,
    check_field,
    check_supported,
    mean_and_std,
    named_number,
    number,
    pair,
    part,
    sizes_in,
    value_range_of,
)
from keras_vit.checkpoints.formats.layout import Layout
from keras_vit.errors import UserError
from keras_vit.images.resizing import Resize
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import Classifier, Gelu, ViTConfig

if TYPE_CHECKING:
    from keras_vit.images.preprocessing import Preprocessing

CONFIG = "config.json"
# Defaults of timm's transforms for fields missing in pretrained_cfg.
_RESIZING = {"interpolation": "bicubic", "crop_mode": "center", "crop_pct": 0.875}
_MODES: Mapping[str, Resize] = {"center": "resize-small", "squash": "stretch", "border": "pad"}
_FILTERS = {name: name for name in ("nearest", "bilinear", "bicubic", "box")} | {"lanczos": "lanczos3"}
# Fields of ViTConfig -> arguments of timm that are in the arrays, too.
_SIZES = {"hidden_size": "embed_dim", "num_layers": "depth"}
# Arguments of timm that are in the arrays -> field of ViTConfig.
_SETTINGS = {"reg_tokens": "num_registers", "pre_norm": "pre_norm", "class_token": "has_class_token"}
_SETTINGS |= {"qkv_bias": "qkv_bias", "fc_norm": "norm_after_pooling"}
# Arguments that follow from keys and shapes of the arrays, and arguments that do not affect the outputs.
# fmt: off
_IN_ARRAYS = {
    "img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias",
    "init_values", "global_pool", "no_embed_class",
}
_IN_ARRAYS_OF_VIT = _IN_ARRAYS | {
    "class_token", "pos_embed", "reg_tokens", "pre_norm", "fc_norm", "final_norm", "layers", "channels", "width_factor",
    "stem_chs",
}
_WITHOUT_EFFECT = {
    "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "weight_init", "fix_init", "zero_init_last",
    "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate",
}
# fmt: on
# Arguments that are supported with one value only.
_FIXED = {"pool_include_prefix": False, "use_naflex": False, "output_stride": 32, "qk_norm": False}
_FIXED |= {"scale_attn_norm": False, "scale_mlp_norm": False, "proj_bias": True}
# Arguments for which null is what the architectures have anyway, or what shows in the arrays.
_NULLABLE = {"fc_norm", "init_values", "norm_layer", "embed_norm_layer", *_WITHOUT_EFFECT}
# The same of the class Eva, where null is always the default.
_IN_ARRAYS_OF_EVA = _IN_ARRAYS | {"num_reg_tokens", "swiglu_mlp", "swiglu_align_to"}
_FIXED_OF_EVA = {"rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True, "use_rot_pos_emb": True}
_FIXED_OF_EVA |= {"use_abs_pos_emb": False, "use_fc_norm": False, "class_token": True, "qkv_fused": True}
_FIXED_OF_EVA |= {"scale_mlp": False, "scale_attn_inner": False, "use_post_norm": False, "qk_norm": False}
_FIXED_OF_EVA |= {"use_pre_transformer_norm": False, "attn_only_layer_scale": False, "rope_grid_offset": 0}
_FIXED_OF_EVA |= {"attn_type": "eva"}


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for an architecture or argument that is not supported."""
    config = files[CONFIG]
    nested = config.get("pretrained_cfg")
    pretrained = nested if isinstance(nested, dict) else config
    name = timm_models.current_name(str(config.get("architecture") or pretrained.get("architecture")))
    arguments = part(config, "model_args")
    pool = arguments.get("global_pool", config.get("global_pool"))
    pools: dict[str | None, Classifier] = {"token": "token", "avg": "gap", "map": "map"}
    check_supported("global_pool", pool, (None, *pools))
    size = pair(arguments, "img_size")
    common = FileConfig(
        classifier=pools.get(pool),
        num_heads=number(arguments, "num_heads"),
        image_size=size or pair(pretrained, "input_size"),
        image_size_is_exact=size is not None,  # after fine-tuning, input_size is still that of pretraining
        images=_images(pretrained),
        channels=named_number(arguments, "in_chans"),
        num_classes=named_number(config, "num_classes") if config.get("num_classes") else None,  # 0 is that of features
        sizes=sizes_in(arguments, _SIZES),
        heads=("head",) if config.get("num_classes") else (),
    )
    if name.startswith("vit_pe_") and layout.rotates_pairs is not False:
        return _perception_encoder(name, arguments, common)
    if layout.rotates_pairs:
        return _eva02(name, arguments, common)
    is_rotary = layout.settings.get("position_embedding") == "rotary"
    return _eva(name, arguments, common, layout) if is_rotary else _vit(name, arguments, common)


def _check_arguments(arguments: Mapping[str, object], free: Collection[str], fixed: Mapping[str, object]) -> None:
    for name, value in arguments.items():
        if name not in free and name not in _WITHOUT_EFFECT:
            is_comparable = isinstance(value, bool) == isinstance(fixed.get(name), bool)  # False equals 0
            check_supported(name, value, [fixed[name]] if name in fixed and is_comparable else ())


def _vit(name: str, arguments: dict, common: FileConfig) -> FileConfig:
    check_supported("architecture", name.partition(".")[0], timm_models.TIMM_MODELS)
    model = timm_models.TIMM_MODELS[name.partition(".")[0]]
    # Without its own norm_layer, CLIP would have timm's epsilon of 1e-6.
    nullable = _NULLABLE if model.layer_norm_epsilon == 1e-6 else _NULLABLE - {"norm_layer"}
    known = {field: value for field, value in arguments.items() if value is not None or field not in nullable}
    gelu = model.gelu
    if "act_layer" in known:  # null, too, replaces that of the architecture
        activation = known.pop("act_layer")
        activation = "gelu" if activation is None else activation
        check_supported("act_layer", activation, timm_models.ACTIVATIONS if gelu else ())
        gelu = timm_models.ACTIVATIONS[activation]
    _check_arguments(known, [field for field in _IN_ARRAYS_OF_VIT if known.get(field) is not None], _FIXED)
    scale = {"init_values": timm_models.layer_scale_of(name)} | arguments
    settings = _settings(name, arguments)
    final_norm = arguments.get("final_norm") is not False
    if not final_norm:
        settings.pop("norm_after_pooling", None)
    elif common.classifier == "gap" and "_gap_" not in name and arguments.get("fc_norm") is None:
        settings["norm_after_pooling"] = "global_pool='avg' and thus fc_norm", True
    if common.classifier == "token":
        settings.pop("norm_after_pooling", None)
    return dataclasses.replace(
        common,
        classifier=common.classifier or timm_models.default_pooling(name),
        num_heads=common.num_heads or model.num_heads,
        gelu=gelu,
        layer_norm_epsilon=model.layer_norm_epsilon,
        settings={"final_norm": final_norm},
        layer_scale=number(scale, "init_values", float) if scale["init_values"] else None,  # 0 is none, too
        sizes={**common.sizes, **settings},
        resampler="bilinear" if name.startswith("flexivit_") else None,
    )


def _settings(architecture: str, arguments: dict) -> Sizes:
    """Return what name and model_args say of the arrays: ViTConfig field -> (name, value)."""
    settings: Sizes = {}
    for field, (name, value) in timm_models.components_of(architecture).items():
        if name not in arguments:
            settings[field] = f"architecture={architecture!r} and thus {name}", value
    for name, field in _SETTINGS.items():
        if arguments.get(name) is not None:
            settings[field] = name, arguments[name]
    if "pos_embed" in arguments:
        learned = arguments["pos_embed"] not in ("", "none")
        settings["position_embedding"] = "pos_embed and thus", "learned" if learned else "none"
    ratio, width = number(arguments, "mlp_ratio", float), number(arguments, "embed_dim")
    if ratio is not None and width is not None:
        hidden = int(width * ratio)
        settings["mlp_dim"] = "mlp_ratio and thus", hidden // 2 if timm_models.is_gated(architecture) else hidden
    has_class_token = arguments.get("class_token", timm_models.has_class_token(architecture))
    if arguments.get("no_embed_class") is not None and has_class_token:
        settings["prefix_positions"] = "not no_embed_class", not arguments["no_embed_class"]
    return settings


def _eva(name: str, arguments: dict, common: FileConfig, layout: Layout) -> FileConfig:
    check_supported("architecture", name.partition(".")[0], timm_models.EVA_MODELS)
    model = timm_models.EVA_MODELS[name.partition(".")[0]]
    given = {field: value for field, value in arguments.items() if value is not None}
    _check_arguments(given, _IN_ARRAYS_OF_EVA, _FIXED_OF_EVA)
    gated = arguments.get("swiglu_mlp", model.gated_mlp)
    sizes: Sizes = {
        "qkv_bias": ("qkv_bias", arguments.get("qkv_bias", model.qkv_bias)),
        "gated_mlp": ("swiglu_mlp", gated),
        "num_registers": ("num_reg_tokens", arguments.get("num_reg_tokens", 4)),
        "has_class_token": ("class_token", True),
    }
    ratio, width = number(arguments, "mlp_ratio", float), number(arguments, "embed_dim")
    align = given.get("swiglu_align_to", model.align if model.gated_mlp else 1) or 1 if gated else 1
    if ratio is not None and width is not None and isinstance(align, int):
        sizes["mlp_dim"] = "mlp_ratio and thus", -(-int(width * ratio) // align) * align
    return dataclasses.replace(
        common,
        classifier=common.classifier or model.classifier,
        num_heads=common.num_heads or model.num_heads,
        gelu=layout.gelu,
        layer_norm_epsilon=1e-5,
        layer_scale=number(arguments, "init_values", float) or 1e-5,
        sizes={**common.sizes, **sizes},
    )


# The heads of EVA-02 in timm 1.0.31, and whether their MLPs have a norm. Those of CLIP have one in attention, too.
_EVA02 = {"tiny": (3, False), "small": (6, False), "base": (12, True), "large": (16, True)}
_FIXED_OF_EVA02 = {**_FIXED_OF_EVA, "rope_type": "cat", "rope_temperature": 10000, "rope_rotate_half": False}
_FIXED_OF_EVA02 |= {"use_abs_pos_emb": True, "num_reg_tokens": 0, "swiglu_mlp": True, "no_embed_class": False}
_FREE_OF_EVA02 = {"qkv_fused", "scale_mlp", "scale_attn_inner", "use_fc_norm", "ref_feat_shape", "swiglu_align_to"}
_FREE_OF_EVA02 |= _IN_ARRAYS - {"init_values", "no_embed_class"}


def _parts_of(name: str, pattern: str) -> Sequence[Any]:
    """The groups of a pattern in the name of an architecture. Raises UserError for another name."""
    architecture = name.partition(".")[0]
    match = re.fullmatch(pattern, architecture)
    if match is None:
        check_supported("architecture", architecture, ())
    return match.groups() if match else ()


def _eva02(name: str, arguments: dict, common: FileConfig) -> FileConfig:
    size, of_clip = _parts_of(name, r"eva02_(?:(tiny|small|base|large)_patch14|(base_patch16|large_patch14)_clip)_\d+")
    is_clip = of_clip is not None
    num_heads, mlp_norm = _EVA02[size or of_clip.partition("_")[0]]
    given = {field: value for field, value in arguments.items() if value is not None}
    _check_arguments(given, _FREE_OF_EVA02, _FIXED_OF_EVA02)
    classifier = common.classifier or ("token" if is_clip else "gap")
    after_pooling = given.get("use_fc_norm", classifier == "gap")
    sizes: Sizes = {"mlp_norm": ("scale_mlp", given.get("scale_mlp", mlp_norm))}
    sizes["attention_norm"] = "scale_attn_inner", given.get("scale_attn_inner", is_clip)
    sizes |= {"norm_after_pooling": ("use_fc_norm", after_pooling)} if classifier == "gap" else {}
    return dataclasses.replace(
        common,
        classifier=classifier,
        num_heads=common.num_heads or num_heads,
        gelu="silu",
        layer_norm_epsilon=1e-6,
        settings={"rotary_reference": pair(arguments, "ref_feat_shape") or (16, 16)},
        sizes={**common.sizes, **sizes},
    )


# The heads of Perception Encoders in timm 1.0.31, and the reference of those that pool (core); of others it is 32.
_PE = {"tiny": (3, 24), "small": (6, 24), "base": (12, 14), "large": (16, 24), "gigantic": (16, 32)}
_FIXED_OF_PE = {**_FIXED_OF_EVA02, "swiglu_mlp": False, "attn_type": "rope", "use_pre_transformer_norm": True}
_FIXED_OF_PE |= {"rope_grid_indexing": "xy", "scale_mlp": False, "use_fc_norm": False, "qkv_fused": True}
_FREE_OF_PE = {"rope_grid_offset", "ref_feat_shape", "attn_pool_num_heads", "attn_pool_mlp_ratio", "class_token"}
_FREE_OF_PE |= _IN_ARRAYS - {"no_embed_class"}


def _perception_encoder(name: str, arguments: dict, common: FileConfig) -> FileConfig:
    family, size = _parts_of(name, r"vit_pe_(core|lang|spatial)_(tiny|small|base|large|gigantic)_patch\d+_\d+")
    (num_heads, side), is_core, is_largest = _PE[size], family == "core", size == "gigantic"
    given = {field: value for field, value in arguments.items() if value is not None}
    _check_arguments(given, _FREE_OF_PE, {**_FIXED_OF_PE, "use_post_transformer_norm": is_core})
    offset, side = given.get("rope_grid_offset", 0.0 if is_largest else 1.0), side if is_core else 32
    check_field(offset in (0, 1), "rope_grid_offset", "0 or 1", offset)
    check_supported("global_pool", common.classifier, (None, "map") if is_core else (None, "token", "gap"))
    scaled = not is_core and (family == "lang" or is_largest or "init_values" in given)
    heads = {"pool_heads": number(arguments, "attn_pool_num_heads") or 8}
    return dataclasses.replace(
        common,
        classifier="map" if is_core else common.classifier or "gap",
        num_heads=common.num_heads or num_heads,
        gelu="erf",
        layer_norm_epsilon=1e-5,
        layer_scale=number(arguments, "init_values", float) or 0.1 if scaled else None,
        settings={
            "rotary_reference": pair(arguments, "ref_feat_shape") or (side, side),
            "rotary_offset": float(offset),
            "rotary_columns_first": True,
            "final_norm": is_core,
            **(heads if is_core else {}),
        },
    )


def _rotary_arguments(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    """The architecture of a model that is rotary beside its learned positions, and its arguments."""
    assert config.rotary_reference is not None
    own: dict[str, Any] = {"ref_feat_shape": list(config.rotary_reference)}
    if config.pre_norm:
        own |= {"rope_grid_offset": config.rotary_offset, "class_token": config.has_class_token}
        if not config.final_norm:
            return "vit_pe_spatial_tiny_patch16_512", own
        ratio = ((config.pool_mlp_dim or config.mlp_dim) + 0.5) / config.hidden_size
        own |= {"attn_pool_num_heads": config.pool_heads or config.num_heads, "attn_pool_mlp_ratio": ratio}
        return "vit_pe_core_tiny_patch16_384", own
    own |= {"use_fc_norm": config.norm_after_pooling}
    if not (config.mlp_norm or config.attention_norm):
        return "eva02_tiny_patch14_224", own
    return "eva02_base_patch14_224", {**own, "scale_mlp": config.mlp_norm, "scale_attn_inner": config.attention_norm}


def _images(pretrained: dict) -> ImageProcessing:
    """The images of a pretrained_cfg (resolve_data_config of timm)."""
    given = {name: value for name, value in pretrained.items() if value}
    filter_, mode, share = (given.get(name, default) for name, default in _RESIZING.items())
    check_supported("interpolation", filter_, _FILTERS)
    check_supported("crop_mode", mode, _MODES)
    shares: dict[tuple[int, int] | None, float] = {None: share}
    if (size := pair(pretrained, "test_input_size")) is not None:
        shares[size] = given.get("test_crop_pct", share)
    for value in shares.values():
        is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0.01 <= value <= 1.0
        check_field(is_share, "crop_pct", "a number of 0.01 to 1", value)
    value_range = value_range_of(given.get("mean", IMAGENET_MEAN), given.get("std", IMAGENET_STD))
    return images(_FILTERS[filter_], shares, _MODES[mode], value_range)


def images(
    interpolation: str,
    crop_shares: Mapping[tuple[int, int] | None, float],
    resize: Resize = "resize-small",
    value_range: ValueRange | None = None,
) -> ImageProcessing:
    """Images that timm makes with Pillow."""
    fields = {"library": "timm", "background": None, "resize": resize, "interpolation": interpolation}
    return ImageProcessing(fields, crop_shares=crop_shares, value_range=value_range)


_POOLS = {"token": "token", "gap": "avg", "map": "map"}
# Architectures by what no argument of timm changes, and LayerNorm's epsilon.
_CLIP = "vit_base_patch16_clip_224", 1e-5
_GATED = "vit_giant_patch14_dinov2", 1e-6  # packed SwiGLU
_DISTILLED = "deit_base_distilled_patch16_224", 1e-6
_PLAIN = "vit_base_patch16_224", 1e-6


def write_config(model: Blueprint) -> dict[str, dict]:
    """The config.json that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads."""
    config, preprocessing = model.config, model.preprocessing
    if not isinstance(config, ViTConfig) or config.stem is not None:
        raise _needs_file("timm builds a ResNet or hybrid only by the name of one of its own sizes")
    beside = config.rotary_reference is not None
    arguments_of = _rotary_arguments if beside else _eva_arguments if config.is_rotary else _vit_arguments
    architecture, own = arguments_of(config)
    packed = config.gated_mlp and not config.is_rotary
    arguments = {
        "img_size": list(preprocessing.image_size),
        "patch_size": list(config.patch),
        "in_chans": preprocessing.channels,
        "embed_dim": config.hidden_size,
        "depth": config.num_layers,
        "num_heads": config.num_heads,
        # timm takes the integer part of embed_dim * mlp_ratio.
        "mlp_ratio": (config.mlp_dim * (2 if packed else 1) + 0.5) / config.hidden_size,
        "qkv_bias": config.qkv_bias,
        "init_values": config.layer_scale,
        "global_pool": _POOLS[config.classifier],
        **own,
    }
    fields = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "num_features": config.hidden_size,
        "model_args": arguments,
        "pretrained_cfg": _pretrained_cfg(preprocessing, model.num_classes, architecture == _DISTILLED[0]),
    }
    return {CONFIG: fields | ({"label_names": list(model.labels)} if model.labels else {})}


def _vit_arguments(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    if config.distillation == "head":
        if not config.prefix_positions:
            raise _needs_file("timm's distilled models have positions of class and distillation token, unlike this one")
        architecture, epsilon = _DISTILLED
    elif config.gated_mlp:
        architecture, epsilon = _GATED
    else:
        architecture, epsilon = _CLIP if config.layer_norm_epsilon == 1e-5 else _PLAIN
    _check_epsilon(config, epsilon)
    activations: dict[Gelu, str] = {gelu: name for name, gelu in timm_models.ACTIVATIONS.items()}
    arguments: dict[str, Any] = {"pre_norm": config.pre_norm, "act_layer": activations[config.gelu]}
    arguments |= {} if config.final_norm else {"final_norm": False}
    if architecture != _DISTILLED[0]:
        arguments |= {
            "pos_embed": "learn" if config.position_embedding == "learned" else "none",
            "class_token": config.has_class_token,
            "no_embed_class": bool(config.num_registers) or not config.has_class_token or not config.prefix_positions,
            "reg_tokens": config.num_registers,
            "fc_norm": config.norm_after_pooling,
        }
    return architecture, arguments


def _eva_arguments(config: ViTConfig) -> tuple[str, dict[str, Any]]:
    _check_epsilon(config, 1e-5)
    architecture = f"vit_small{'_plus' * config.gated_mlp}_patch16_dinov3{'_qkvb' * config.qkv_bias}"
    aligned = {"swiglu_align_to": 1} if config.gated_mlp else {}
    return architecture, {"num_reg_tokens": config.num_registers, **aligned}


def _check_epsilon(config: ViTConfig, epsilon: float) -> None:
    if config.layer_norm_epsilon != epsilon or config.classifier not in _POOLS:
        raise _needs_file(
            f"timm has no architecture with LayerNorm's epsilon {config.layer_norm_epsilon} and the classifier "
            f"{config.classifier!r} for this model"
        )


def _needs_file(reason: str) -> UserError:
    """The error of a model that timm cannot build from a config.json."""
    return UserError(f"{reason}; give the name of a .safetensors file instead of a folder.")


def _pretrained_cfg(preprocessing: "Preprocessing", num_classes: int, distilled: bool) -> dict:
    height, width = preprocessing.image_size
    mode, share = _crop(preprocessing)
    interpolation = {"lanczos3": "lanczos", "area": "box"}.get(name := str(preprocessing.interpolation), name)
    mean, std = mean_and_std(preprocessing)
    return {
        "input_size": [preprocessing.channels, height, width],
        "fixed_input_size": True,
        "interpolation": interpolation,
        "crop_pct": share,
        "crop_mode": mode,
        "mean": mean,
        "std": std,
        "num_classes": num_classes,
        "first_conv": "patch_embed.proj",
        "classifier": ["head", "head_dist"] if distilled else "head",
    }


def _crop(preprocessing: "Preprocessing") -> tuple[str, float]:
    """(crop_mode, crop_pct) of a preprocessing. Raises UserError for one that timm does not have."""
    size, full = preprocessing.image_size, preprocessing.crop_from or preprocessing.image_size
    if preprocessing.resize == "pad" and preprocessing.background is not None:
        raise _needs_file("timm pads with the mean color, not with white")
    if preprocessing.resize == "crop" and size[0] != size[1]:
        raise _needs_file(f"timm cannot resize by 'crop' to {size[0]}x{size[1]}, which is not square")
    sides = (full, full) if isinstance(full, int) else full
    # timm takes the integer part of size / crop_pct.
    for share in (size[0] / sides[0], size[1] / sides[1], size[0] / (sides[0] + 0.5), size[1] / (sides[1] + 0.5)):
        if all(math.floor(side / share) == length for side, length in zip(size, sides, strict=True)):
            modes = {"stretch": "squash", "pad": "border"}
            return modes.get(preprocessing.resize, "center"), share
    raise _needs_file(f"timm's crop_pct cannot express images of {size} that are cropped from {full}")

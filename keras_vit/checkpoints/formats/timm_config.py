"""timm's config.json: `architecture`, `model_args` and `pretrained_cfg`, read and written."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keras_vit.checkpoints.formats.file_config import (
    FileConfig,
    Sizes,
    check_supported,
    named_number,
    number,
    pair,
    part,
    sizes_in,
)
from keras_vit.checkpoints.formats.images import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageProcessing,
    ValueRange,
    value_range_of,
)
from keras_vit.checkpoints.formats.layout import Layout, WrittenModel
from keras_vit.checkpoints.formats.timm_models import (
    ACTIVATIONS,
    components_of,
    current_name,
    default_pooling,
    has_class_token,
    is_gated,
    layer_scale_of,
    timm_model,
)
from keras_vit.errors import UserError
from keras_vit.images.resizing import Resize
from keras_vit.models.config import Classifier, ViTConfig

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


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for an architecture or argument that is not supported."""
    config = files.get(CONFIG)
    if config is None:
        return FileConfig()
    name, arguments = architecture_of(config)
    model, found = timm_model(name, arguments), common_fields(config, arguments)
    scale = {"init_values": layer_scale_of(name)} | arguments
    settings = _settings(name, arguments)
    if found.classifier == "gap" and "_gap_" not in name and arguments.get("fc_norm") is None:
        settings["norm_after_pooling"] = "global_pool='avg' and thus fc_norm", True
    if found.classifier == "token":
        settings.pop("norm_after_pooling", None)
    return dataclasses.replace(
        found,
        classifier=found.classifier or default_pooling(name),
        num_heads=found.num_heads or model.num_heads,
        gelu=model.gelu,
        layer_norm_epsilon=model.layer_norm_epsilon,
        layer_scale=number(scale, "init_values", float) if scale["init_values"] else None,  # 0 is none, too
        sizes={**found.sizes, **settings},
        resampler="bilinear" if name.startswith("flexivit_") else None,
    )


def architecture_of(config: dict) -> tuple[str, dict]:
    """(architecture, model_args) of a config.json."""
    name = str(config.get("architecture") or _pretrained_of(config).get("architecture"))
    return current_name(name), part(config, "model_args")


def _pretrained_of(config: dict) -> dict:
    pretrained = config.get("pretrained_cfg")
    return pretrained if isinstance(pretrained, dict) else config


def common_fields(config: dict, arguments: dict) -> FileConfig:
    """Read the fields that do not depend on the architecture from config.json and its model_args."""
    pool = arguments.get("global_pool", config.get("global_pool"))
    size, pretrained = pair(arguments, "img_size"), _pretrained_of(config)
    pools: dict[str | None, Classifier] = {"token": "token", "avg": "gap", "map": "map"}
    check_supported("global_pool", pool, (None, *pools))
    return FileConfig(
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


def _settings(architecture: str, arguments: dict) -> Sizes:
    """Return what name and model_args say of the arrays: ViTConfig field -> (name, value)."""
    settings: Sizes = {}
    for field, (name, value) in components_of(architecture).items():
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
        settings["mlp_dim"] = "mlp_ratio and thus", hidden // 2 if is_gated(architecture) else hidden
    if arguments.get("no_embed_class") is not None and arguments.get("class_token", has_class_token(architecture)):
        settings["prefix_positions"] = "not no_embed_class", not arguments["no_embed_class"]
    return settings


def _images(pretrained: dict) -> ImageProcessing:
    """The images of a pretrained_cfg (resolve_data_config of timm)."""
    given = {name: value for name, value in pretrained.items() if value}
    filter_, mode, share = (given.get(name, default) for name, default in _RESIZING.items())
    for name, value, known in (("interpolation", filter_, _FILTERS), ("crop_mode", mode, _MODES)):
        check_supported(name, value, known)
    shares: dict[tuple[int, int] | None, float] = {None: share}
    if (size := pair(pretrained, "test_input_size")) is not None:
        shares[size] = given.get("test_crop_pct", share)
    for value in shares.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 1.0:
            raise UserError(f"config.json should give a crop_pct of 0.01 to 1, but gives {value!r:.80}.")
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
# Architectures by what no argument of timm changes.
_CLIP = "vit_base_patch16_clip_224"  # LayerNorm's epsilon 1e-5
_GATED = "vit_giant_patch14_dinov2"  # packed SwiGLU
_DISTILLED = "deit_base_distilled_patch16_224"
_PLAIN = "vit_base_patch16_224"


def write_config(model: WrittenModel) -> dict[str, dict]:
    """The config.json that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads.

    Raises UserError for a model that no arguments of timm describe.
    """
    config = model.config
    if not isinstance(config, ViTConfig) or config.stem is not None:
        raise needs_file("timm builds a ResNet or hybrid only by the name of one of its own sizes")
    architecture = _architecture(config)
    arguments = size_arguments(model, hidden=config.mlp_dim * (2 if config.gated_mlp else 1)) | {
        "pre_norm": config.pre_norm,
        "global_pool": _POOLS[config.classifier],
        "act_layer": {gelu: name for name, gelu in ACTIVATIONS.items()}[config.gelu],
    }
    if architecture != _DISTILLED:
        arguments |= {
            "pos_embed": "learn" if config.position_embedding == "learned" else "none",
            "class_token": config.has_class_token,
            "no_embed_class": bool(config.num_registers) or not config.has_class_token or not config.prefix_positions,
            "reg_tokens": config.num_registers,
            "fc_norm": config.norm_after_pooling,
        }
    return written(model, architecture, arguments)


def size_arguments(model: WrittenModel, hidden: int) -> dict[str, Any]:
    """The arguments that all architectures have; `hidden` is the width of the MLP as timm counts it."""
    config, preprocessing = model.vit, model.preprocessing
    return {
        "img_size": list(preprocessing.image_size),
        "patch_size": list(config.patch),
        "in_chans": preprocessing.channels,
        "embed_dim": config.hidden_size,
        "depth": config.num_layers,
        "num_heads": config.num_heads,
        # timm takes the integer part of embed_dim * mlp_ratio.
        "mlp_ratio": (hidden + 0.5) / config.hidden_size,
        "qkv_bias": config.qkv_bias,
        "init_values": config.layer_scale,
    }


def written(model: WrittenModel, architecture: str, arguments: dict) -> dict[str, dict]:
    """config.json of an architecture with these model_args."""
    fields = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "num_features": model.vit.hidden_size,
        "model_args": arguments,
        "pretrained_cfg": _pretrained_cfg(model.preprocessing, model.num_classes, architecture == _DISTILLED),
    }
    return {CONFIG: fields | ({"label_names": list(model.labels)} if model.labels else {})}


def _architecture(config: ViTConfig) -> str:
    if config.distillation == "head":
        if not config.prefix_positions:
            raise needs_file("timm's distilled models have positions of class and distillation token, unlike this one")
        found, epsilon = _DISTILLED, 1e-6
    elif config.gated_mlp:
        found, epsilon = _GATED, 1e-6
    else:
        found, epsilon = (_CLIP, 1e-5) if config.layer_norm_epsilon == 1e-5 else (_PLAIN, 1e-6)
    if config.layer_norm_epsilon != epsilon or config.classifier not in _POOLS:
        raise needs_file(
            f"timm has no architecture with LayerNorm's epsilon {config.layer_norm_epsilon} and the classifier "
            f"{config.classifier!r} for this model"
        )
    return found


def needs_file(reason: str) -> UserError:
    """The error of a model that timm cannot build from a config.json."""
    return UserError(f"{reason}; give the name of a .safetensors file instead of a folder.")


def _pretrained_cfg(preprocessing: "Preprocessing", num_classes: int, distilled: bool) -> dict:
    height, width = preprocessing.image_size
    mode, share = _crop(preprocessing)
    interpolation = {"lanczos3": "lanczos", "area": "box"}.get(name := str(preprocessing.interpolation), name)
    lows, highs = preprocessing.channel_ranges()
    scales = [high - low for low, high in zip(lows, highs, strict=True)]
    return {
        "input_size": [preprocessing.channels, height, width],
        "fixed_input_size": True,
        "interpolation": interpolation,
        "crop_pct": share,
        "crop_mode": mode,
        "mean": [-low / scale for low, scale in zip(lows, scales, strict=True)],
        "std": [1.0 / scale for scale in scales],
        "num_classes": num_classes,
        "first_conv": "patch_embed.proj",
        "classifier": ["head", "head_dist"] if distilled else "head",
    }


def _crop(preprocessing: "Preprocessing") -> tuple[str, float]:
    """(crop_mode, crop_pct) of a preprocessing. Raises UserError for one that timm does not have."""
    size, full = preprocessing.image_size, preprocessing.crop_from or preprocessing.image_size
    if preprocessing.resize == "pad" and preprocessing.background is not None:
        raise needs_file("timm pads with the mean color, not with white")
    if preprocessing.resize == "crop" and size[0] != size[1]:
        raise needs_file(f"timm cannot resize by 'crop' to {size[0]}x{size[1]}, which is not square")
    sides = (full, full) if isinstance(full, int) else full
    # timm takes the integer part of size / crop_pct.
    for share in (size[0] / sides[0], size[1] / sides[1], size[0] / (sides[0] + 0.5), size[1] / (sides[1] + 0.5)):
        if all(math.floor(side / share) == length for side, length in zip(size, sides, strict=True)):
            modes = {"stretch": "squash", "pad": "border"}
            return modes.get(preprocessing.resize, "center"), share
    raise needs_file(f"timm's crop_pct cannot express images of {size} that are cropped from {full}")

"""Read and write the config.json of transformers' DeiT, MAE, DINOv2, DINOv3, CLIP and SigLIP."""

from collections.abc import Mapping
from typing import Any

from keras_vit.errors import UserError
from keras_vit.models.config import Gelu, ViTConfig

# `ViTConfig.gelu` -> name in transformers.
TRANSFORMERS_GELU: Mapping[Gelu, str] = {
    "erf": "gelu",
    "tanh": "gelu_pytorch_tanh",
    "quick": "quick_gelu",
    "silu": "silu",
}
# Defaults of the config classes of transformers 5.23 for fields missing in config.json.
_BASE: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224}
_BASE |= {"hidden_act": "gelu", "patch_size": 16}
_VIT = {**_BASE, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "qkv_bias": True}
_DINOV2 = {**_BASE, "mlp_ratio": 4, "layer_norm_eps": 1e-6, "qkv_bias": True, "use_swiglu_ffn": False}
_DINOV2 |= {"layerscale_value": 1.0}
_DINOV3 = {**_BASE, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "layer_norm_eps": 1e-5}
_DINOV3 |= {"rope_theta": 100.0, "query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True}
_DINOV3 |= {"mlp_bias": True, "layerscale_value": 1.0, "use_gated_mlp": False, "num_register_tokens": 0}
_CLIP = {**_BASE, "intermediate_size": 3072, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {**_BASE, "intermediate_size": 3072, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_SIGLIP |= {"vision_use_head": True}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "deit": _VIT | {"pooler_act": "tanh"},
    "vit_mae": _VIT,
    "dinov2": _DINOV2 | {"patch_size": 14},
    "dinov2_with_registers": _DINOV2 | {"num_register_tokens": 4},
    "dinov3_vit": _DINOV3,
    "clip_vision_model": _CLIP,
    "clip": _CLIP,
    "siglip_vision_model": _SIGLIP,
    "siglip": _SIGLIP,
}
_ARCHITECTURES = {"deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
# Fields that ViTConfig has as well, with the same meaning.
_SAME = {"num_register_tokens": "num_registers", "key_bias": "key_bias", "use_swiglu_ffn": "gated_mlp"}
_SAME |= {"use_gated_mlp": "gated_mlp", "query_bias": "qkv_bias"}
# Fields that are supported with one value only.
_FIXED = {"rope_theta": 100.0, "proj_bias": True, "mlp_bias": True, "vision_use_head": True}


def vision_config(fields: dict) -> dict:
    """The fields of the vision tower, which are an object of their own beside those of a text tower."""
    if fields.get("model_type") not in ("clip", "siglip"):
        return fields
    older = fields.get("vision_config_dict") or {}  # of old versions, whose values go first
    tower = fields.get("vision_config") or older
    if not isinstance(tower, dict):
        raise UserError(f"config.json should give vision_config as an object, but gives {tower!r:.80}.")
    complete = FAMILY_DEFAULTS[fields["model_type"]] | tower
    for name, value in older.items() if isinstance(older, dict) else ():
        if name in complete and value != complete[name]:
            raise UserError(
                f"config.json gives {name}={complete[name]!r:.80} in vision_config and {value!r:.80} in "
                "vision_config_dict; remove the wrong one."
            )
    return {**tower, "model_type": fields["model_type"]}


def heads_of(fields: dict) -> tuple[str, ...]:
    """The heads of the architecture that a config.json names, where another one has the same other arrays."""
    names = fields.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    if any(name.endswith("WithTeacher") for name in names):
        return "head", "head_distillation"
    has_head = ("ForImageClassification", "VisionModelWithProjection", "CLIPModel")
    return ("head",) if any(name.endswith(has_head) for name in names) else ()


def family_sizes(config: dict, kind: str | None) -> dict[str, tuple[str, object]]:
    """Values of a completed config.json that the arrays must agree with: ViTConfig field -> (name, value).

    Raises UserError for values that no model here has.
    """
    if kind not in FAMILY_DEFAULTS:
        return {}
    for name, value in _FIXED.items():
        if config.get(name, value) != value:
            raise UserError(
                f"config.json has the unsupported {name}={config[name]!r:.80}; supported is a model with {value}."
            )
    if config.get("query_bias") != config.get("value_bias"):
        raise UserError("config.json gives a bias to only one of query and value; supported are both or none.")
    sizes: dict[str, tuple[str, object]] = {
        field: (name, config[name]) for name, field in _SAME.items() if name in config
    }
    if not config.get("query_bias", True):
        sizes.pop("key_bias", None)  # there is none without one of the query
    if "mlp_ratio" in config:
        ratio = config["mlp_ratio"]
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < 1000:
            raise UserError(f"config.json should give a positive number for 'mlp_ratio', but gives {ratio!r:.80}.")
        width = config.get("hidden_size")
        if isinstance(width, int):
            sizes["mlp_dim"] = (
                f"mlp_ratio={ratio!r} and thus",
                _mlp_dim(width, ratio, gated=bool(config.get("use_swiglu_ffn"))),
            )
    return sizes


def _mlp_dim(hidden_size: int, ratio: float, *, gated: bool) -> int:
    """DINOv2's SwiGLU takes two thirds of the width, rounded up to a multiple of 8."""
    hidden = int(hidden_size * ratio)
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


def family_fields(config: ViTConfig, family: str, image_size: tuple[int, int], num_classes: int) -> dict[str, Any]:
    """The fields of config.json for one of these families, but for those about labels and channels.

    Raises UserError for sizes that it cannot express.
    """
    towers = {"clip_vision_model": "CLIPVisionModel", "siglip_vision_model": "SiglipVisionModel"}
    fields: dict[str, Any] = {
        "model_type": family,
        "architectures": [_architecture(config, family, num_classes)],
        "image_size": image_size[0] if image_size[0] == image_size[1] else list(image_size),
        "patch_size": config.patch_size if isinstance(config.patch_size, int) else list(config.patch_size),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": TRANSFORMERS_GELU[config.gelu],
        "layer_norm_eps": config.layer_norm_epsilon,
    }
    if family in towers and (list in map(type, (fields["image_size"], fields["patch_size"]))):
        raise UserError(
            f"A {towers[family]} of transformers has square images and patches, but these are {image_size} and "
            f"{config.patch}; adapt the model to square images, or choose another layout."
        )
    if family.startswith("dinov2"):
        if image_size[0] != image_size[1]:
            raise UserError(
                f"DINOv2 of transformers takes stored positions for those of square images, but these are of "
                f"{image_size}; adapt the model to square images, or choose another layout."
            )
        fields |= {"mlp_ratio": _mlp_ratio(config), "use_swiglu_ffn": config.gated_mlp, "qkv_bias": config.qkv_bias}
        fields["hidden_act"] = "gelu" if config.gated_mlp else fields["hidden_act"]
    else:
        fields["intermediate_size"] = config.mlp_dim
    if family == "deit":
        fields |= {"qkv_bias": config.qkv_bias, "pooler_act": "tanh"}
    if family == "dinov3_vit":
        biases = {"query_bias": config.qkv_bias, "value_bias": config.qkv_bias}
        fields |= {**biases, "key_bias": config.qkv_bias and config.key_bias, "use_gated_mlp": config.gated_mlp}
        fields["rope_theta"] = 100.0
    if family in ("dinov2_with_registers", "dinov3_vit"):
        fields["num_register_tokens"] = config.num_registers
    if family.startswith("dino"):
        fields["layerscale_value"] = config.layer_scale
    if family == "dinov2":
        fields["use_mask_token"] = False
    if family == "clip_vision_model" and num_classes:
        fields["projection_dim"] = num_classes
    return fields


def _architecture(config: ViTConfig, family: str, num_classes: int) -> str:
    if family == "clip_vision_model":
        return "CLIPVisionModelWithProjection" if num_classes else "CLIPVisionModel"
    if family in ("siglip_vision_model", "dinov3_vit"):
        return "SiglipVisionModel" if family.startswith("siglip") else "DINOv3ViTModel"
    teacher = "WithTeacher" if config.distillation == "head" else ""
    return _ARCHITECTURES[family] + (f"ForImageClassification{teacher}" if num_classes else "Model")


def _mlp_ratio(config: ViTConfig) -> int:
    for ratio in range(1, 65):
        if _mlp_dim(config.hidden_size, ratio, gated=config.gated_mlp) == config.mlp_dim:
            return ratio
    raise UserError(
        f"DINOv2 of transformers has an MLP that is a multiple of the width, but {config.mlp_dim} does not follow from "
        f"{config.hidden_size}; choose another layout."
    )


def number(config: dict, field: str, kind: type[int] | type[float] = int) -> Any:
    value: Any = config.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value < 10**6:
        raise UserError(f"config.json should give a positive number for {field!r}, but gives {value!r:.80}.")
    return kind(value)


def pair(config: dict, field: str) -> tuple[int, int] | None:
    size = config.get(field)
    if size is None:
        return None
    sides: Any = [size, size] if isinstance(size, int) else size
    if field in ("input_size", "test_input_size") and isinstance(size, list) and len(size) == 3:  # channels come first
        sides = size[1:]
    if not (isinstance(sides, list) and len(sides) == 2 and all(is_side(side) for side in sides)):
        raise UserError(f"config.json should give {field!r} as one or two numbers of pixels, but gives {size!r:.80}.")
    return sides[0], sides[1]


def is_side(side: Any) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and 0 < side < 10**5

"""transformers' DINOv2, with registers or without, and DINOv3, with rotary positions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.checkpoints.formats.file_config import FileConfig, Sizes, check_field, number, same_fields
from keras_vit.checkpoints.formats.layout import DEFAULTS, Layout, check_square, inexpressible
from keras_vit.checkpoints.formats.transformers import config_json
from keras_vit.checkpoints.formats.transformers.vit import STORED_ATTENTION
from keras_vit.checkpoints.key_mapping import CONV, POSITIONS, Rule, block_rules, dense, norm, packed_mlp
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import ViTConfig

_DINOV2 = {name: value for name, value in config_json.BASE.items() if name != "intermediate_size"}
_DINOV2 |= {"layer_norm_eps": 1e-6, "qkv_bias": True, "mlp_ratio": 4, "use_swiglu_ffn": False, "layerscale_value": 1.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "dinov2": _DINOV2 | {"patch_size": 14},
    "dinov2_with_registers": _DINOV2 | {"num_register_tokens": 4},
}
_NAMES = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
# Stored, and in memory.
_GATES = ("encoder.layer.0.mlp.weights_in.weight", "encoder.layer.0.mlp.gate_proj.weight")
_NORMS = "norm1", "norm2"
# Keys of the two layers of the MLP, of a gated one with its gate.
GATED = ("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj")
SCALES = "layer_scale{n}.lambda1"


def _identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    for prefix in ("dinov2.", "dinov2_with_registers.", ""):
        first = ("embeddings.patch_embeddings.projection.weight", "encoder.layer.0.norm1.weight")
        if all(f"{prefix}{key}" in arrays for key in first):
            return _layout(
                prefix,
                registers=f"{prefix}embeddings.register_tokens" in arrays,
                gated=bool(arrays.keys() & {f"{prefix}{first}" for first in _GATES}),
                classifies="classifier.weight" in arrays,
            )
    return None


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    config = model.config
    if not isinstance(config, ViTConfig) or config.layer_scale is None or config.position_embedding == "rotary":
        return None
    return {
        **DEFAULTS,
        **dict.fromkeys(("gated_mlp", "layer_scale", "num_registers", "prefix_positions", "qkv_bias"), None),
        "gelu": ("silu",) if config.gated_mlp else None,
        "classifier": ("token+gap",) if model.num_classes else ("token",),
    }


def _type(config: ViTConfig) -> str:
    return "dinov2_with_registers" if config.num_registers else "dinov2"


def _layout_for(model: Blueprint) -> Layout:
    config, prefix = model.vit, f"{_type(model.vit)}." if model.num_classes else ""
    layout = _layout(
        prefix, registers=config.num_registers > 0, gated=config.gated_mlp, classifies=model.num_classes > 0
    )
    if not config.num_registers:
        return layout
    # Of pretraining alone, zeros as initially; every file has it.
    mask = {f"{prefix}embeddings.mask_token": np.zeros((1, config.hidden_size), np.float32)}
    return dataclasses.replace(layout, constants=mask)


def _layout(prefix: str, *, registers: bool, gated: bool, classifies: bool) -> Layout:
    """SwiGLU packs gate and value. Only DINOv2 with registers resizes positions with antialiasing."""
    layer = f"{prefix}encoder.layer.{{i}}."
    mlp = ("mlp.weights_in", "mlp.weights_out") if gated else ("mlp.fc1", "mlp.fc2")
    rules = (
        Rule(("cls",), f"{prefix}embeddings.cls_token"),
        Rule(("registers/tokens",), f"{prefix}embeddings.register_tokens"),
        Rule((POSITIONS,), f"{prefix}embeddings.position_embeddings"),
        Rule((), f"{prefix}embeddings.mask_token"),
        *dense("embedding", f"{prefix}embeddings.patch_embeddings.projection", CONV),
        *(packed_mlp(layer, mlp[0]) if gated else ()),
        *block_rules(layer, _NORMS, STORED_ATTENTION, mlp, SCALES),
        *block_rules(layer, _NORMS, config_json.ATTENTION_IN_MEMORY, GATED),
        *norm("Transformer/encoder_norm", f"{prefix}layernorm"),
        *dense("head", "classifier"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        resampler="bicubic-antialias" if registers else "bicubic",
        square_positions=True,
        settings={"classifier": "token+gap"} if classifies else {},
        model_types=("dinov2_with_registers",) if registers else ("dinov2",),
    )


def _read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    config = config_json.completed(files[config_json.CONFIG], layout, _DEFAULTS)
    gated = config.get("use_swiglu_ffn")
    sizes: Sizes = {
        **config_json.positions_and_tokens(config, layout),
        "gated_mlp": ("no use_swiglu_ffn and thus a gated MLP", False) if gated is None else ("use_swiglu_ffn", gated),
        **same_fields(config, {"num_register_tokens": "num_registers"}),
        **mlp_size(config, gated=bool(gated)),
    }
    # SwiGLU ignores hidden_act.
    return config_json.read_vit(files, config, layout, sizes, **({"gelu": "silu"} if gated else {}))


def _write_config(model: Blueprint) -> dict[str, dict]:
    config = model.vit
    check_square("DINOv2 of transformers", model.preprocessing.image_size)
    name, end = _type(config), "ForImageClassification" if model.num_classes else "Model"
    fields = config_json.vit_fields(model, name, _NAMES[name] + end)
    del fields["intermediate_size"]
    fields |= {"mlp_ratio": mlp_ratio(config), "use_swiglu_ffn": config.gated_mlp, "qkv_bias": config.qkv_bias}
    fields["hidden_act"] = "gelu" if config.gated_mlp else fields["hidden_act"]
    fields["layerscale_value"] = config.layer_scale
    fields |= {"num_register_tokens": config.num_registers} if config.num_registers else {"use_mask_token": False}
    return config_json.written(model, fields)


def _mlp_dim(hidden_size: int, ratio: float, *, gated: bool) -> int:
    """DINOv2's SwiGLU takes two thirds of the width, rounded up to a multiple of 8."""
    hidden = int(hidden_size * ratio)
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


def mlp_size(config: dict, *, gated: bool) -> Sizes:
    """The width of the MLP, if the config tells it."""
    ratio, width = number(config, "mlp_ratio", float), config.get("hidden_size")
    if ratio is None or not isinstance(width, int):
        return {}
    return {"mlp_dim": (f"mlp_ratio={config['mlp_ratio']!r} and thus", _mlp_dim(width, ratio, gated=gated))}


def mlp_ratio(config: ViTConfig) -> int:
    """The ratio that gives the width of the MLP. Raises UserError if none does."""
    for ratio in range(1, 65):
        if _mlp_dim(config.hidden_size, ratio, gated=config.gated_mlp) == config.mlp_dim:
            return ratio
    own = f"one of {config.mlp_dim} at {config.hidden_size}"
    raise inexpressible("DINOv2 of transformers has an MLP that is a multiple of the width", own)


DINOV2 = config_json.HuggingFace(
    _identify, read_config=_read_config, expressible=_expressible, layout_for=_layout_for, write_config=_write_config
)


# DINOv3

_DINOV3: dict[str, Any] = {**config_json.BASE, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
_DINOV3 |= {"layer_norm_eps": 1e-5, "query_bias": True, "key_bias": False, "value_bias": True}
_DINOV3 |= {"layerscale_value": 1.0, "use_gated_mlp": False, "num_register_tokens": 0}


def _identify_v3(arrays: Mapping[str, LazyArray]) -> Layout | None:
    if "embeddings.patch_embeddings.weight" in arrays:
        for prefix in ("", "model."):  # the second in memory
            if f"{prefix}layer.0.norm1.weight" in arrays:
                return _v3_layout(prefix, gated=f"{prefix}layer.0.mlp.gate_proj.weight" in arrays)
    return None


def _expressible_in_v3(model: Blueprint) -> dict[str, tuple | None] | None:
    config = model.config
    if not isinstance(config, ViTConfig) or config.position_embedding != "rotary":
        return None
    return {
        **DEFAULTS,
        **dict.fromkeys(("gated_mlp", "num_registers", "key_bias", "qkv_bias", "gelu"), None),
        "layer_scale": () if config.layer_scale is None else None,
        "position_embedding": ("rotary",),
        "classifier": () if model.num_classes else ("token",),
    }


def _v3_layout_for(model: Blueprint) -> Layout:
    config = model.vit
    # Of pretraining alone, zeros as initially; without registers, every file has an empty array of them.
    zeros = {"embeddings.mask_token": np.zeros((1, 1, config.hidden_size), np.float32)}
    if not config.num_registers:
        zeros["embeddings.register_tokens"] = np.zeros((1, 0, config.hidden_size), np.float32)
    return dataclasses.replace(_v3_layout("", gated=config.gated_mlp), constants=zeros)


def _v3_layout(prefix: str, *, gated: bool) -> Layout:
    """`prefix` is that of the layers."""
    rules = (
        Rule(("cls",), "embeddings.cls_token"),
        Rule(("registers/tokens",), "embeddings.register_tokens"),
        Rule((), "embeddings.mask_token"),
        *dense("embedding", "embeddings.patch_embeddings", CONV),
        *block_rules(f"{prefix}layer.{{i}}.", _NORMS, config_json.ATTENTION_IN_MEMORY, GATED, SCALES),
        *norm("Transformer/encoder_norm", "norm"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        layer_norm_epsilon=1e-5,
        settings={"position_embedding": "rotary"},
        model_types=("dinov3_vit",),
    )


def _read_v3_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    config = config_json.completed(files[config_json.CONFIG], layout, {"dinov3_vit": _DINOV3})
    config_json.check_values(config, {"rope_theta": 100.0})
    sizes: Sizes = {**v3_sizes(config), "num_class_tokens": ("model_type='dinov3_vit' and thus class tokens", 1)}
    return config_json.read_vit(files, config, layout, sizes)


def v3_sizes(config: dict) -> Sizes:
    """The parts of DINOv3 that the arrays show, too. Raises UserError for unsupported values."""
    config_json.check_values(config, {"proj_bias": True, "mlp_bias": True})
    query, value = config.get("query_bias"), config.get("value_bias")
    check_field(query == value, "query_bias and value_bias", "two equal values", (query, value))
    names = {"num_register_tokens": "num_registers", "use_gated_mlp": "gated_mlp", "query_bias": "qkv_bias"}
    # There is no bias of the key without one of the query.
    return same_fields(config, names | ({"key_bias": "key_bias"} if config.get("query_bias", True) else {}))


def v3_fields(config: ViTConfig) -> dict[str, Any]:
    """The inverse of `v3_sizes`."""
    return {
        "num_register_tokens": config.num_registers,
        "use_gated_mlp": config.gated_mlp,
        "query_bias": config.qkv_bias,
        "value_bias": config.qkv_bias,
        "key_bias": config.qkv_bias and config.key_bias,
    }


def _write_v3_config(model: Blueprint) -> dict[str, dict]:
    own = {"rope_theta": 100.0, "layerscale_value": model.vit.layer_scale}
    return config_json.written(
        model, config_json.vit_fields(model, "dinov3_vit", "DINOv3ViTModel") | v3_fields(model.vit) | own
    )


DINOV3 = config_json.HuggingFace(
    _identify_v3,
    read_config=_read_v3_config,
    expressible=_expressible_in_v3,
    layout_for=_v3_layout_for,
    write_config=_write_v3_config,
)

"""transformers' DINOv3, with rotary positions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.checkpoints.formats.file_config import FileConfig, Sizes
from keras_vit.checkpoints.formats.layout import DEFAULTS, Layout, WrittenModel
from keras_vit.checkpoints.formats.transformers.config_json import (
    BASE,
    CONFIG,
    FILES,
    attention_in_memory,
    completed,
    read_vit,
    refuse_other_values,
    vit_fields,
    written,
)
from keras_vit.checkpoints.formats.transformers.dinov2 import layer_scales
from keras_vit.checkpoints.key_mapping import BLOCK, CONV, Rule, dense, norm
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import ViTConfig

LAYOUT = "huggingface"
SUFFIXES: tuple[str, ...] = ("",)
CONFIG_FILES: tuple[str, ...] = FILES
_DEFAULTS: dict[str, Any] = {**BASE, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
_DEFAULTS |= {"layer_norm_eps": 1e-5, "query_bias": True, "key_bias": False, "value_bias": True}
_DEFAULTS |= {"layerscale_value": 1.0, "use_gated_mlp": False, "num_register_tokens": 0}
_SUPPORTED = {"rope_theta": 100.0, "proj_bias": True, "mlp_bias": True}
# Fields that ViTConfig has as well, with the same meaning.
_SAME = {"num_register_tokens": "num_registers", "key_bias": "key_bias", "use_gated_mlp": "gated_mlp"}
_SAME |= {"query_bias": "qkv_bias"}
_MLP = f"{BLOCK}MlpBlock_3/"


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    if "embeddings.patch_embeddings.weight" in arrays:
        for prefix in ("", "model."):  # the second in memory
            if f"{prefix}layer.0.norm1.weight" in arrays:
                return _layout(prefix, gated=f"{prefix}layer.0.mlp.gate_proj.weight" in arrays)
    return None


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that it has; None for models without rotary positions."""
    config = model.config
    if not isinstance(config, ViTConfig) or config.position_embedding != "rotary":
        return None
    return {
        **DEFAULTS,
        **dict.fromkeys(("gated_mlp", "num_registers", "key_bias", "qkv_bias"), None),
        "gelu": None,
        "layer_scale": () if config.layer_scale is None else None,
        "position_embedding": ("rotary",),
        "classifier": ("token",) * (not model.num_classes),
    }


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    config = model.vit
    # Of pretraining alone, zeros as initially; without registers, every file has an empty array of them.
    zeros = {"embeddings.mask_token": np.zeros((1, 1, config.hidden_size), np.float32)}
    if not config.num_registers:
        zeros["embeddings.register_tokens"] = np.zeros((1, 0, config.hidden_size), np.float32)
    return dataclasses.replace(_layout("", gated=config.gated_mlp), constants=zeros)


def _layout(prefix: str, *, gated: bool) -> Layout:
    """`prefix` is that of the layers."""
    layer = f"{prefix}layer.{{i}}."
    rules = (
        Rule(("cls",), "embeddings.cls_token"),
        Rule(("registers/tokens",), "embeddings.register_tokens"),
        Rule((), "embeddings.mask_token"),
        *dense("embedding", "embeddings.patch_embeddings", CONV),
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}norm1"),
        *attention_in_memory(layer),
        *layer_scales(layer),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}norm2"),
        *dense(f"{_MLP}gate", f"{layer}mlp.gate_proj"),
        *dense(f"{_MLP}Dense_0", f"{layer}mlp.up_proj"),
        *dense(f"{_MLP}Dense_1", f"{layer}mlp.down_proj"),
        *norm("Transformer/encoder_norm", "norm"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        layer_norm_epsilon=1e-5,
        settings={"position_embedding": "rotary"},
        model_types=("dinov3_vit",),
    )


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for unsupported values."""
    if CONFIG not in files:
        return FileConfig()
    config = completed(files[CONFIG], layout, {"dinov3_vit": _DEFAULTS})
    refuse_other_values(config, _SUPPORTED)
    refuse_one_bias(config)
    sizes: Sizes = {field: (name, config[name]) for name, field in _SAME.items() if name in config}
    sizes["num_class_tokens"] = "model_type='dinov3_vit' and thus class tokens", 1
    if not config.get("query_bias", True):
        sizes.pop("key_bias", None)  # there is none without one of the query
    return read_vit(files, config, layout, sizes)


def refuse_one_bias(config: dict) -> None:
    """Raise UserError for a bias of the query without one of the value, or the reverse."""
    if config.get("query_bias") != config.get("value_bias"):
        raise UserError("config.json gives a bias to only one of query and value; supported are both or none.")


def write_config(model: WrittenModel) -> dict[str, dict]:
    """config.json and preprocessor_config.json."""
    config = model.vit
    fields = vit_fields(model, "dinov3_vit", "DINOv3ViTModel")
    fields |= {"query_bias": config.qkv_bias, "value_bias": config.qkv_bias, "use_gated_mlp": config.gated_mlp}
    fields |= {"key_bias": config.qkv_bias and config.key_bias, "num_register_tokens": config.num_registers}
    return written(model, fields | {"rope_theta": 100.0, "layerscale_value": config.layer_scale})

"""transformers' DINOv2, with registers or without."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.checkpoints.formats.file_config import FileConfig, Sizes, number
from keras_vit.checkpoints.formats.layout import DEFAULTS, Layout, WrittenModel
from keras_vit.checkpoints.formats.transformers.config_json import (
    BASE,
    CONFIG,
    FILES,
    attention_in_memory,
    completed,
    positions_and_tokens,
    read_vit,
    vit_fields,
    written,
)
from keras_vit.checkpoints.key_mapping import ATTENTION, BLOCK, CONV, POSITIONS, QKV, Rule, dense, fused, norm
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import ViTConfig

LAYOUT = "huggingface"
SUFFIXES: tuple[str, ...] = ("",)
CONFIG_FILES: tuple[str, ...] = FILES
_DINOV2 = {name: value for name, value in BASE.items() if name != "intermediate_size"}
_DINOV2 |= {"layer_norm_eps": 1e-6, "qkv_bias": True, "mlp_ratio": 4, "use_swiglu_ffn": False, "layerscale_value": 1.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "dinov2": _DINOV2 | {"patch_size": 14},
    "dinov2_with_registers": _DINOV2 | {"num_register_tokens": 4},
}
_NAMES = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
_MLP = f"{BLOCK}MlpBlock_3/"
# Stored, and in memory.
_GATES = ("encoder.layer.0.mlp.weights_in.weight", "encoder.layer.0.mlp.gate_proj.weight")


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    for prefix in ("dinov2.", "dinov2_with_registers.", ""):
        if f"{prefix}embeddings.patch_embeddings.projection.weight" in arrays and (
            f"{prefix}encoder.layer.0.norm1.weight" in arrays
        ):
            return _layout(
                prefix,
                registers=f"{prefix}embeddings.register_tokens" in arrays,
                gated=bool(arrays.keys() & {f"{prefix}{first}" for first in _GATES}),
                classifies="classifier.weight" in arrays,
            )
    return None


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that it has; None for models without its layer scale."""
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


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    config, prefix = model.vit, f"{_type(model.vit)}." if model.num_classes else ""
    found = _layout(
        prefix, registers=config.num_registers > 0, gated=config.gated_mlp, classifies=model.num_classes > 0
    )
    if not config.num_registers:
        return found
    # Of pretraining alone, zeros as initially; every file has it.
    mask = {f"{prefix}embeddings.mask_token": np.zeros((1, config.hidden_size), np.float32)}
    return dataclasses.replace(found, constants=mask)


def _layout(prefix: str, *, registers: bool, gated: bool, classifies: bool) -> Layout:
    """SwiGLU packs gate and value. Only DINOv2 with registers resizes positions with antialiasing."""
    layer = f"{prefix}encoder.layer.{{i}}."
    packed = (f"{_MLP}gate", f"{_MLP}Dense_0")
    rules = (
        Rule(("cls",), f"{prefix}embeddings.cls_token"),
        Rule(("registers/tokens",), f"{prefix}embeddings.register_tokens"),
        Rule((POSITIONS,), f"{prefix}embeddings.position_embeddings"),
        Rule((), f"{prefix}embeddings.mask_token"),
        *dense("embedding", f"{prefix}embeddings.patch_embeddings.projection", CONV),
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}norm1"),
        *(rule for part in QKV for rule in dense(f"{ATTENTION}{part}", f"{layer}attention.attention.{part}")),
        *dense(f"{ATTENTION}out", f"{layer}attention.output.dense"),
        *attention_in_memory(layer),
        *layer_scales(layer),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}norm2"),
        *(
            fused(packed, f"{layer}mlp.weights_in.weight", f"{layer}mlp.weights_in.bias")
            if gated
            else dense(f"{_MLP}Dense_0", f"{layer}mlp.fc1")
        ),
        *dense(f"{_MLP}Dense_1", f"{layer}mlp.{'weights_out' if gated else 'fc2'}"),
        *dense(f"{_MLP}gate", f"{layer}mlp.gate_proj"),  # in memory
        *dense(f"{_MLP}Dense_0", f"{layer}mlp.up_proj"),
        *dense(f"{_MLP}Dense_1", f"{layer}mlp.down_proj"),
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


def layer_scales(layer: str) -> tuple[Rule, ...]:
    """The rules of the factors of both residual branches."""
    return tuple(Rule((f"{BLOCK}LayerScale_{n}/scale",), f"{layer}layer_scale{n + 1}.lambda1") for n in (0, 1))


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for unsupported values."""
    if CONFIG not in files:
        return FileConfig()
    config = completed(files[CONFIG], layout, _DEFAULTS)
    gated = config.get("use_swiglu_ffn")
    sizes: Sizes = {
        **positions_and_tokens(config, layout),
        "gated_mlp": ("no use_swiglu_ffn and thus a gated MLP", False) if gated is None else ("use_swiglu_ffn", gated),
    }
    if "num_register_tokens" in config:
        sizes["num_registers"] = "num_register_tokens", config["num_register_tokens"]
    ratio, width = number(config, "mlp_ratio", float), config.get("hidden_size")
    if ratio is not None and isinstance(width, int):
        sizes["mlp_dim"] = f"mlp_ratio={config['mlp_ratio']!r} and thus", mlp_dim(width, ratio, gated=bool(gated))
    # SwiGLU ignores hidden_act.
    return read_vit(files, config, layout, sizes, **({"gelu": "silu"} if gated else {}))


def write_config(model: WrittenModel) -> dict[str, dict]:
    """config.json and preprocessor_config.json. Raises UserError for sizes that it cannot express."""
    config, (height, width) = model.vit, model.preprocessing.image_size
    if height != width:
        raise UserError(
            f"DINOv2 of transformers takes stored positions for those of square images, but these are of "
            f"{(height, width)}; adapt the model to square images, or choose another layout."
        )
    kind = _type(config)
    fields = vit_fields(model, kind, _NAMES[kind] + ("ForImageClassification" if model.num_classes else "Model"))
    del fields["intermediate_size"]
    fields |= {"mlp_ratio": mlp_ratio(config), "use_swiglu_ffn": config.gated_mlp, "qkv_bias": config.qkv_bias}
    fields["hidden_act"] = "gelu" if config.gated_mlp else fields["hidden_act"]
    fields["layerscale_value"] = config.layer_scale
    fields |= {"num_register_tokens": config.num_registers} if config.num_registers else {"use_mask_token": False}
    return written(model, fields)


def mlp_dim(hidden_size: int, ratio: float, *, gated: bool) -> int:
    """DINOv2's SwiGLU takes two thirds of the width, rounded up to a multiple of 8."""
    hidden = int(hidden_size * ratio)
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


def mlp_ratio(config: ViTConfig) -> int:
    """The ratio that gives the width of the MLP. Raises UserError if none does."""
    for ratio in range(1, 65):
        if mlp_dim(config.hidden_size, ratio, gated=config.gated_mlp) == config.mlp_dim:
            return ratio
    raise UserError(
        f"DINOv2 of transformers has an MLP that is a multiple of the width, but {config.mlp_dim} does not follow from "
        f"{config.hidden_size}; choose another layout."
    )

"""transformers' EoMT, segmentation by DINOv2 or DINOv3 with queries in the last blocks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.checkpoints.formats.file_config import FileConfig, Sizes, check_field, number, part, same_fields
from keras_vit.checkpoints.formats.layout import DEFAULTS, Layout, check_square, inexpressible, unsupported
from keras_vit.checkpoints.formats.transformers import config_json
from keras_vit.checkpoints.formats.transformers.dino import GATED, SCALES, mlp_ratio, mlp_size, v3_fields, v3_sizes
from keras_vit.checkpoints.key_mapping import CONV, DEPTHWISE, POSITIONS, TABLE, Rule, block_rules, dense, norm
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import SegmentationConfig, ViTConfig

_NAMES = {"eomt": "EomtForUniversalSegmentation", "eomt_dinov3": "EomtDinov3ForUniversalSegmentation"}
_COMMON: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 16}
_COMMON |= {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "image_size": 640, "num_channels": 3, "layerscale_value": 1.0}
_COMMON |= {"num_upscale_blocks": 2, "num_blocks": 4, "num_queries": 200, "num_register_tokens": 4, "num_labels": 2}
_DINOV3 = {"intermediate_size": 4096, "query_bias": True, "key_bias": False, "value_bias": True, "use_gated_mlp": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "eomt": {**_COMMON, "mlp_ratio": 4, "use_swiglu_ffn": False},
    "eomt_dinov3": {**_COMMON, **_DINOV3},
}
# Weights of the losses in training, which the original reads from config.json and its files hold.
_NO_OBJECT_WEIGHT = 0.1


def _identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    backbone = [key.removeprefix("network.") for key in arrays if "encoder.backbone." in key]
    if backbone and all(key.startswith("encoder.backbone.") for key in backbone):
        if "encoder.backbone.pos_embed" not in backbone:  # DINOv3's positions are rotary
            raise delta_error()
        raise unsupported(
            "of the original code of EoMT (tue-mps)",
            "convert it with convert_eomt_to_hf.py of transformers and give that folder",
        )
    if "query.weight" not in arrays or "layers.0.norm1.weight" not in arrays:
        return None
    dinov3 = "embeddings.patch_embeddings.weight" in arrays
    return _layout(dinov3=dinov3, gated="layers.0.mlp.gate_proj.weight" in arrays)


def delta_error() -> UserError:
    """The error for weights that are differences."""
    return UserError(
        "The file holds the differences of an EoMT from the DINOv3 that it began with (a delta of tue-mps), not a "
        "model; add the weights of that DINOv3 with the code at github.com/tue-mps/eomt, convert the sum with "
        "transformers and give that folder."
    )


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    config = model.config
    if not isinstance(model.task, SegmentationConfig) or not isinstance(config, ViTConfig):
        return None
    rotary = config.position_embedding == "rotary"
    own: dict[str, tuple | None] = {
        **dict.fromkeys(("gated_mlp", "num_registers", "prefix_positions"), None),
        "gelu": None if rotary or not config.gated_mlp else ("silu",),
        "layer_scale": () if config.layer_scale is None else None,
        "position_embedding": ("rotary", "learned"),
        "classifier": ("none",),
        "with_class_token": (True,),
    }
    return {**DEFAULTS, **own, **(dict.fromkeys(("key_bias", "qkv_bias"), None) if rotary else {})}


def _layout_for(model: Blueprint) -> Layout:
    config, task = model.vit, model.segmentation
    weights = np.ones(task.num_classes + 1, np.float32)
    weights[-1] = _NO_OBJECT_WEIGHT
    constants = {"criterion.empty_weight": weights}
    if not task.mask_attention:
        constants["attn_mask_probs"] = np.zeros(task.num_blocks, np.float32)
    if not config.num_registers:
        constants["embeddings.register_tokens"] = np.zeros((1, 0, config.hidden_size), np.float32)
    layout = _layout(dinov3=config.position_embedding == "rotary", gated=config.gated_mlp)
    return dataclasses.replace(layout, constants=constants)


def _layout(*, dinov3: bool, gated: bool) -> Layout:
    upscale = "upscale_block.block.{i}."
    out, patches = ("o_proj", "patch_embeddings") if dinov3 else ("out_proj", "patch_embeddings.projection")
    attention = tuple(f"attention.{part}" for part in ("q_proj", "k_proj", "v_proj", out))
    rules = (
        Rule(("cls",), "embeddings.cls_token"),
        Rule(("registers/tokens",), "embeddings.register_tokens"),
        Rule((POSITIONS,), "embeddings.position_embeddings.weight", TABLE),
        *dense("embedding", f"embeddings.{patches}", CONV),
        *block_rules(
            "layers.{i}.", ("norm1", "norm2"), attention, GATED if dinov3 or gated else ("mlp.fc1", "mlp.fc2"), SCALES
        ),
        *norm("Transformer/encoder_norm", "layernorm"),
        Rule(("queries/tokens",), "query.weight", TABLE),
        *dense("class_head", "class_predictor"),
        *(rule for n in range(3) for rule in dense(f"mask_head/Dense_{n}", f"mask_head.fc{n + 1}")),
        *dense("upscale_{i}/transposed", f"{upscale}conv1", CONV),
        Rule(("upscale_{i}/depthwise/kernel",), f"{upscale}conv2.weight", DEPTHWISE),
        *norm("upscale_{i}/norm", f"{upscale}layernorm2d"),
        Rule(("mask_attention/probabilities",), "attn_mask_probs"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        resampler="bicubic-antialias",
        settings={"classifier": "none", **({"position_embedding": "rotary"} if dinov3 else {})},
        prefix_positions=False,
        torch=True,
        model_types=("eomt_dinov3",) if dinov3 else ("eomt",),
        ignored=("criterion.empty_weight", "embeddings.position_ids"),
        task="segmentation",
    )


def _read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    config = config_json.completed(files[config_json.CONFIG], layout, _DEFAULTS)
    sizes: Sizes = config_json.positions_and_tokens(config, layout)
    own: dict[str, Any] = {}
    if layout.model_types == ("eomt_dinov3",):
        del sizes["position_embedding"]
        theta = part(config, "rope_parameters").get("rope_theta", 100.0)
        check_field(theta == 100.0, "rope_theta", "100", theta)
        sizes |= v3_sizes(config)
    else:
        gated = bool(config.get("use_swiglu_ffn"))
        sizes |= {"gated_mlp": ("use_swiglu_ffn", gated), **mlp_size(config, gated=gated)}
        sizes |= same_fields(config, {"num_register_tokens": "num_registers"})
        own = {"gelu": "silu"} if gated else {}
    task: Sizes = {
        name: (name, number(config, name)) for name in ("num_queries", "num_blocks") if config.get(name) is not None
    }
    if isinstance(config.get("num_upscale_blocks"), int):
        task["num_upscale_blocks"] = "num_upscale_blocks", config["num_upscale_blocks"]
    if (labels := config_json.num_labels(config)) is not None:
        task["num_classes"] = labels
    activation = config_json.gelu_of(config["hidden_act"]) if config.get("hidden_act") else None
    own |= {"task_sizes": task, "task_settings": {"gelu": activation}, "num_classes": None}
    return config_json.read_vit(files, config, layout, sizes, **own)


def _write_config(model: Blueprint) -> dict[str, dict]:
    config, task = model.vit, model.segmentation
    check_square("EoMT of transformers", model.preprocessing.image_size, config.patch)
    name = "eomt_dinov3" if config.position_embedding == "rotary" else "eomt"
    if task.gelu != config.gelu and not (name == "eomt" and config.gated_mlp):
        own = f"{config.gelu!r} in its blocks and {task.gelu!r} in its heads"
        raise inexpressible("EoMT of transformers has one activation", own)
    fields = config_json.vit_fields(model, name, _NAMES[name]) | {
        "num_register_tokens": config.num_registers,
        "layerscale_value": config.layer_scale,
        "num_queries": task.num_queries,
        "num_blocks": task.num_blocks,
        "num_upscale_blocks": task.num_upscale_blocks,
        "no_object_weight": _NO_OBJECT_WEIGHT,
    }
    if name == "eomt":
        del fields["intermediate_size"]
        fields |= {"mlp_ratio": mlp_ratio(config), "use_swiglu_ffn": config.gated_mlp}
        fields["hidden_act"] = config_json.TRANSFORMERS_GELU[task.gelu]
    else:
        fields |= v3_fields(config) | {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
    return config_json.written(model, fields)


EOMT = config_json.HuggingFace(
    _identify,
    read_config=_read_config,
    expressible=_expressible,
    layout_for=_layout_for,
    write_config=_write_config,
    has_task=True,
)

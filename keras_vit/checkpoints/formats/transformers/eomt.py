"""transformers' EoMT, segmentation by DINOv2 or DINOv3 with queries in the last blocks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_vit.checkpoints.formats.file_config import FileConfig, Sizes, number
from keras_vit.checkpoints.formats.layout import DEFAULTS, Layout, WrittenModel
from keras_vit.checkpoints.formats.transformers.config_json import (
    CONFIG,
    FILES,
    TRANSFORMERS_GELU,
    check_square,
    completed,
    gelu_of,
    num_labels,
    positions_and_tokens,
    read_vit,
    refuse_other_values,
    vit_fields,
    written,
)
from keras_vit.checkpoints.formats.transformers.dinov2 import layer_scales, mlp_dim, mlp_ratio
from keras_vit.checkpoints.formats.transformers.dinov3 import refuse_one_bias
from keras_vit.checkpoints.key_mapping import (
    ATTENTION,
    BLOCK,
    CONV,
    DEPTHWISE,
    POSITIONS,
    QKV,
    TABLE,
    Rule,
    dense,
    norm,
)
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import SegmentationConfig, ViTConfig

LAYOUT = "huggingface"
SUFFIXES: tuple[str, ...] = ("",)
CONFIG_FILES: tuple[str, ...] = FILES
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
_MLP = f"{BLOCK}MlpBlock_3/"


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format.

    Raises UserError for files of the original code.
    """
    backbone = [key.removeprefix("network.") for key in arrays if "encoder.backbone." in key]
    if backbone and all(key.startswith("encoder.backbone.") for key in backbone):
        if "encoder.backbone.pos_embed" not in backbone:  # DINOv3's positions are rotary
            raise delta_error()
        raise UserError(
            "The file is of the original code of EoMT (tue-mps); convert it with convert_eomt_to_hf.py of "
            "transformers and give that folder."
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


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that it has; None for models of other tasks."""
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


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    config, task = model.vit, model.segmentation
    weights = np.ones(task.num_classes + 1, np.float32)
    weights[-1] = _NO_OBJECT_WEIGHT
    constants = {"criterion.empty_weight": weights}
    if not task.mask_attention:
        constants["attn_mask_probs"] = np.zeros(task.num_blocks, np.float32)
    if not config.num_registers:
        constants["embeddings.register_tokens"] = np.zeros((1, 0, config.hidden_size), np.float32)
    found = _layout(dinov3=config.position_embedding == "rotary", gated=config.gated_mlp)
    return dataclasses.replace(found, constants=constants)


def _layout(*, dinov3: bool, gated: bool) -> Layout:
    layer, upscale = "layers.{i}.", "upscale_block.block.{i}."
    out, patches = ("o_proj", "patch_embeddings") if dinov3 else ("out_proj", "patch_embeddings.projection")
    projections = zip((*QKV, "out"), ("q_proj", "k_proj", "v_proj", out), strict=True)
    ungated = ("up_proj", "down_proj") if dinov3 else ("fc1", "fc2")
    hidden, output = ("up_proj", "down_proj") if gated else ungated
    rules = (
        Rule(("cls",), "embeddings.cls_token"),
        Rule(("registers/tokens",), "embeddings.register_tokens"),
        Rule((POSITIONS,), "embeddings.position_embeddings.weight", TABLE),
        *dense("embedding", f"embeddings.{patches}", CONV),
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}norm1"),
        *(rule for part, key in projections for rule in dense(f"{ATTENTION}{part}", f"{layer}attention.{key}")),
        *layer_scales(layer),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}norm2"),
        *dense(f"{_MLP}gate", f"{layer}mlp.gate_proj"),
        *dense(f"{_MLP}Dense_0", f"{layer}mlp.{hidden}"),
        *dense(f"{_MLP}Dense_1", f"{layer}mlp.{output}"),
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


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for unsupported values."""
    if CONFIG not in files:
        return FileConfig()
    config = completed(files[CONFIG], layout, _DEFAULTS)
    sizes: Sizes = positions_and_tokens(config, layout)
    if "num_register_tokens" in config:
        sizes["num_registers"] = "num_register_tokens", config["num_register_tokens"]
    own: dict[str, Any] = {}
    activation = gelu_of(config["hidden_act"]) if config.get("hidden_act") else None
    if layout.model_types == ("eomt_dinov3",):
        del sizes["position_embedding"]
        sizes |= _dinov3_biases(config)
    else:
        gated, ratio, width = (config.get(name) for name in ("use_swiglu_ffn", "mlp_ratio", "hidden_size"))
        sizes["gated_mlp"] = "use_swiglu_ffn", bool(gated)
        exact = number(config, "mlp_ratio", float)
        if exact is not None and isinstance(width, int):
            sizes["mlp_dim"] = f"mlp_ratio={ratio!r} and thus", mlp_dim(width, exact, gated=bool(gated))
        own = {"gelu": "silu"} if gated else {}
    task: Sizes = {
        name: (name, number(config, name)) for name in ("num_queries", "num_blocks") if config.get(name) is not None
    }
    if isinstance(config.get("num_upscale_blocks"), int):
        task["num_upscale_blocks"] = "num_upscale_blocks", config["num_upscale_blocks"]
    if (labels := num_labels(config)) is not None:
        task["num_classes"] = labels
    own |= {"task_sizes": task, "task_settings": {"gelu": activation}, "num_classes": None}
    return read_vit(files, config, layout, sizes, **own)


def _dinov3_biases(config: dict) -> Sizes:
    """Fields that only DINOv3 has. Raises UserError for unsupported values."""
    refuse_other_values(config, {"proj_bias": True, "mlp_bias": True})
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_theta", 100.0) != 100.0:
        raise UserError(f"config.json has the unsupported rope_parameters={rope!r:.80}; supported is theta 100.")
    refuse_one_bias(config)
    fields = {"use_gated_mlp": "gated_mlp", "query_bias": "qkv_bias"}
    fields |= {"key_bias": "key_bias"} if config.get("query_bias") else {}
    return {field: (name, config[name]) for name, field in fields.items() if name in config}


def write_config(model: WrittenModel) -> dict[str, dict]:
    """config.json and preprocessor_config.json. Raises UserError for sizes that they cannot express."""
    config, task = model.vit, model.segmentation
    check_square(model, "EoMT")
    kind = "eomt_dinov3" if config.position_embedding == "rotary" else "eomt"
    fields = vit_fields(model, kind, _NAMES[kind])
    fields |= {
        "num_register_tokens": config.num_registers,
        "layerscale_value": config.layer_scale,
        "num_queries": task.num_queries,
        "num_blocks": task.num_blocks,
        "num_upscale_blocks": task.num_upscale_blocks,
        "no_object_weight": _NO_OBJECT_WEIGHT,
    }
    if kind == "eomt":
        del fields["intermediate_size"]
        fields |= {"mlp_ratio": mlp_ratio(config), "use_swiglu_ffn": config.gated_mlp}
        fields["hidden_act"] = TRANSFORMERS_GELU[task.gelu]
    else:
        fields |= {"query_bias": config.qkv_bias, "value_bias": config.qkv_bias, "use_gated_mlp": config.gated_mlp}
        fields |= {"key_bias": config.qkv_bias and config.key_bias}
        fields["rope_parameters"] = {"rope_theta": 100.0, "rope_type": "default"}
    if task.gelu != config.gelu and not (kind == "eomt" and config.gated_mlp):
        raise UserError(
            f"EoMT of transformers has one activation, but this model has {config.gelu!r} in its blocks and "
            f"{task.gelu!r} in its heads; save it as a .keras file."
        )
    return written(model, fields)

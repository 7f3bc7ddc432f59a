"""transformers' ViT, ViT-MSN, ViTMAE, DeiT, I-JEPA, and the hybrids of ViTHybrid."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints.formats.file_config import FileConfig, part
from keras_vit.checkpoints.formats.layout import DEFAULTS, Layout, WrittenModel
from keras_vit.checkpoints.formats.transformers import bit
from keras_vit.checkpoints.formats.transformers.config_json import (
    BASE,
    CONFIG,
    FILES,
    attention_in_memory,
    completed,
    positions_and_tokens,
    read_vit,
    refuse_other_values,
    vit_fields,
    written,
)
from keras_vit.checkpoints.key_mapping import ATTENTION, BLOCK, CONV, POSITIONS, QKV, Rule, dense, norm
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import ResNetConfig, ViTConfig

LAYOUT = "huggingface"
SUFFIXES: tuple[str, ...] = ("",)
CONFIG_FILES: tuple[str, ...] = FILES
_TYPES = ("vit", "vit_msn", "vit-hybrid", "vit_mae")
_VIT = {**BASE, "qkv_bias": True, "pooler_act": "tanh"}
_BACKBONE = {"layer_type": "bottleneck", "global_padding": "same", "embedding_dynamic_padding": True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vit": _VIT,
    "vit_msn": _VIT | {"layer_norm_eps": 1e-6},
    # Of ViTHybridConfig as in 4.57, the last version that has it.
    "vit-hybrid": _VIT | {"patch_size": 1, "backbone_config": _BACKBONE | {"depths": [3, 4, 9]}},
    "vit_mae": _VIT,
    "deit": _VIT,
    "ijepa": _VIT,
}
_POOLER = "ViTModel of transformers adds a pooler, unless from_pretrained gets add_pooling_layer=False."


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format."""
    for prefix in ("vit.", "deit.", "ijepa.", ""):
        if f"{prefix}embeddings.patch_embeddings.projection.weight" not in arrays:
            continue
        if f"{prefix}encoder.layer.0.norm1.weight" in arrays:
            return None  # DINOv2
        if prefix and "encoder.layer.0.layernorm_before.weight" in arrays:  # a classifier of transformers 5.23
            return _layout(prefix, ("vit_msn",), has_bare_layers=True)
        if f"{prefix}embeddings.cls_token" not in arrays:
            return _layout(prefix, ("ijepa",))
        distilled = f"{prefix}embeddings.distillation_token" in arrays
        ends = f"{prefix}pooler.dense.weight" in arrays or "classifier.weight" in arrays  # which MAE has not
        types = ("deit",) if distilled else _TYPES[: -1 if ends else None]
        return _layout(prefix, types, two_heads="cls_classifier.weight" in arrays)
    return None


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that it has; None for a ResNet."""
    if not isinstance(model.config, ViTConfig):
        return None
    fields = {**DEFAULTS, "gelu": None, "qkv_bias": None}
    if _kind(model.config) == "ijepa":
        return {**fields, "classifier": ("gap",)}
    fields["stem"] = None, ResNetConfig
    if not model.num_classes:
        fields["representation_size"] = None
    if model.config.distillation != "none":
        fields["distillation"] = ("token", "head") if model.num_classes else ("token",)
    return fields


def _kind(config: ViTConfig) -> str:
    """The family in which a model is written: DeiT has a distillation token, I-JEPA the mean of the patches alone."""
    if config.distillation != "none":
        return "deit"
    return "ijepa" if config.classifier == "gap" else "vit"


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    kind, two_heads = _kind(model.vit), model.vit.distillation == "head"
    types = _TYPES if kind == "vit" else (kind,)
    found = _layout(f"{kind}." if model.num_classes else "", types, two_heads=two_heads)
    has_pooler = model.num_classes or model.vit.representation_size or kind != "vit"
    return found if has_pooler else dataclasses.replace(found, notes=(_POOLER,))


def read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    """Read config.json. Raises UserError for unsupported values."""
    if CONFIG not in files:
        return FileConfig()
    config = completed(files[CONFIG], layout, _DEFAULTS)
    refuse_other_values(config, {"pooler_act": "tanh"})
    backbone = bit.settings(part(config, "backbone_config")) if config.get("backbone_config") else {}
    sizes = positions_and_tokens(config, layout, {"deit": 2, "ijepa": 0}.get(layout.model_types[0], 1))
    return read_vit(files, config, layout, sizes, **backbone)


def write_config(model: WrittenModel) -> dict[str, dict]:
    """config.json and preprocessor_config.json."""
    config = model.vit
    kind = _kind(config) if config.stem is None else "vit-hybrid"
    name = {"vit": "ViT", "vit-hybrid": "ViTHybrid", "deit": "DeiT", "ijepa": "IJepa"}[kind]
    teacher = "WithTeacher" if config.distillation == "head" else ""
    architecture = name + (f"ForImageClassification{teacher}" if model.num_classes else "Model")
    fields = vit_fields(model, kind, architecture)
    fields |= {
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate,
        "qkv_bias": config.qkv_bias,
        "pooler_act": "tanh",
        "pooler_output_size": config.representation_size or config.hidden_size,
    }
    if isinstance(config.stem, ResNetConfig):
        fields["backbone_config"] = bit.config_fields(config.stem)
    return written(model, fields)


_BIT = "embeddings.patch_embeddings.backbone.bit."


def _rules_in_memory(layer: str) -> tuple[Rule, ...]:
    """The blocks as the modules of transformers 5 name them; save_pretrained writes the older names."""
    return (
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}layernorm_before"),
        *attention_in_memory(layer),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}layernorm_after"),
        *dense(f"{BLOCK}MlpBlock_3/Dense_0", f"{layer}mlp.fc1"),
        *dense(f"{BLOCK}MlpBlock_3/Dense_1", f"{layer}mlp.fc2"),
    )


def _layout(
    prefix: str, model_types: tuple[str, ...] = _TYPES, *, two_heads: bool = False, has_bare_layers: bool = False
) -> Layout:
    """`prefix` is that of all keys but the classifiers', and with `has_bare_layers` those of the layers."""
    layer = f"{'' if has_bare_layers else prefix}encoder.layer.{{i}}."
    rules = (
        Rule(("cls",), f"{prefix}embeddings.cls_token"),
        Rule(("distillation/tokens",), f"{prefix}embeddings.distillation_token"),
        Rule((POSITIONS,), f"{prefix}embeddings.position_embeddings"),
        Rule((), f"{prefix}embeddings.mask_token"),
        *dense("embedding", f"{prefix}embeddings.patch_embeddings.projection", CONV),
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}layernorm_before"),
        *(rule for part in QKV for rule in dense(f"{ATTENTION}{part}", f"{layer}attention.attention.{part}")),
        *dense(f"{ATTENTION}out", f"{layer}attention.output.dense"),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}layernorm_after"),
        *dense(f"{BLOCK}MlpBlock_3/Dense_0", f"{layer}intermediate.dense"),
        *dense(f"{BLOCK}MlpBlock_3/Dense_1", f"{layer}output.dense"),
        *_rules_in_memory(f"{prefix}layers.{{i}}."),
        *norm("Transformer/encoder_norm", f"{prefix}layernorm"),
        *dense("pre_logits", f"{prefix}pooler.dense"),
        *dense("head", "cls_classifier" if two_heads else "classifier"),
        *dense("head_distillation", "distillation_classifier"),
        *bit.resnet_rules(f"{prefix}{_BIT}"),
    )
    return Layout(
        rules,
        gelu="erf",
        layer_norm_epsilon=1e-6 if has_bare_layers else 1e-12,
        resampler="bicubic",
        torch=True,
        stores_groups=True,
        model_types=model_types,
        ignored=("decoder.mask_token", "decoder.decoder_"),  # of a masked autoencoder
    )

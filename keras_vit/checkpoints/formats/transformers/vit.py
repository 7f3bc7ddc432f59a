"""transformers' ViT, ViT-MSN, ViTMAE, DeiT, I-JEPA, the hybrids of ViTHybrid, and Bit: BiT and their ResNets."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats.file_config import FileConfig, check_field, is_side, named_number, number, pair, part
from keras_vit.checkpoints.formats.layout import DEFAULTS, Layout
from keras_vit.checkpoints.formats.transformers import config_json
from keras_vit.checkpoints.formats.transformers.image_processor import has_processor, read_processor
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import ResNetConfig, ViTConfig

_TYPES = ("vit", "vit_msn", "vit-hybrid", "vit_mae")
_VIT = {**config_json.BASE, "qkv_bias": True, "pooler_act": "tanh"}
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
# Of transformers' BitConfig.
_BIT: dict[str, Any] = {
    "layer_type": "preactivation",
    "global_padding": None,
    "embedding_dynamic_padding": False,
    "num_groups": 32,
    "hidden_act": "relu",
    "output_stride": 32,
    "depths": [3, 4, 6, 3],
}
_POOLER = "ViTModel of transformers adds a pooler, unless from_pretrained gets add_pooling_layer=False."
# The keys of a block as the files have them, and as the modules of transformers 5 name them in memory.
_NORMS = "layernorm_before", "layernorm_after"
STORED_ATTENTION = (*(f"attention.attention.{part}" for part in ("query", "key", "value")), "attention.output.dense")


def _identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
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


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    if not isinstance(model.config, ViTConfig):
        return None
    fields = {**DEFAULTS, "gelu": None, "qkv_bias": None}
    if _type(model.config) == "ijepa":
        return {**fields, "classifier": ("gap",)}
    fields["stem"] = None, ResNetConfig
    if not model.num_classes:
        fields["representation_size"] = None
    if model.config.distillation != "none":
        fields["distillation"] = ("token", "head") if model.num_classes else ("token",)
    return fields


def _type(config: ViTConfig) -> str:
    """The family in which a model is written: DeiT has a distillation token, I-JEPA the mean of the patches alone."""
    if config.distillation != "none":
        return "deit"
    return "ijepa" if config.classifier == "gap" else "vit"


def _layout_for(model: Blueprint) -> Layout:
    name, two_heads = _type(model.vit), model.vit.distillation == "head"
    types = _TYPES if name == "vit" else (name,)
    layout = _layout(f"{name}." if model.num_classes else "", types, two_heads=two_heads)
    has_pooler = model.num_classes or model.vit.representation_size or name != "vit"
    return layout if has_pooler else dataclasses.replace(layout, notes=(_POOLER,))


def _layout(
    prefix: str, model_types: tuple[str, ...] = _TYPES, *, two_heads: bool = False, has_bare_layers: bool = False
) -> Layout:
    """`prefix` is that of all keys but the classifiers', and with `has_bare_layers` those of the layers."""
    layer = f"{'' if has_bare_layers else prefix}encoder.layer.{{i}}."
    rules = (
        keys.Rule(("cls",), f"{prefix}embeddings.cls_token"),
        keys.Rule(("distillation/tokens",), f"{prefix}embeddings.distillation_token"),
        keys.Rule((keys.POSITIONS,), f"{prefix}embeddings.position_embeddings"),
        keys.Rule((), f"{prefix}embeddings.mask_token"),
        *keys.dense("embedding", f"{prefix}embeddings.patch_embeddings.projection", keys.CONV),
        *keys.block_rules(layer, _NORMS, STORED_ATTENTION, ("intermediate.dense", "output.dense")),
        *keys.block_rules(f"{prefix}layers.{{i}}.", _NORMS, config_json.ATTENTION_IN_MEMORY, ("mlp.fc1", "mlp.fc2")),
        *keys.norm("Transformer/encoder_norm", f"{prefix}layernorm"),
        *keys.dense("pre_logits", f"{prefix}pooler.dense"),
        *keys.dense("head", "cls_classifier" if two_heads else "classifier"),
        *keys.dense("head_distillation", "distillation_classifier"),
        *_resnet_rules(f"{prefix}embeddings.patch_embeddings.backbone.bit."),
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


def _read_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    config = config_json.completed(files[config_json.CONFIG], layout, _DEFAULTS)
    config_json.check_values(config, {"pooler_act": "tanh"})
    backbone = _bit_settings(part(config, "backbone_config")) if config.get("backbone_config") else {}
    sizes = config_json.positions_and_tokens(config, layout, {"deit": 2, "ijepa": 0}.get(layout.model_types[0], 1))
    return config_json.read_vit(files, config, layout, sizes, **backbone)


def _write_config(model: Blueprint) -> dict[str, dict]:
    config = model.vit
    model_type = _type(config) if config.stem is None else "vit-hybrid"
    name = {"vit": "ViT", "vit-hybrid": "ViTHybrid", "deit": "DeiT", "ijepa": "IJepa"}[model_type]
    teacher = "WithTeacher" if config.distillation == "head" else ""
    architecture = name + (f"ForImageClassification{teacher}" if model.num_classes else "Model")
    fields = config_json.vit_fields(model, model_type, architecture) | {
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate,
        "qkv_bias": config.qkv_bias,
        "pooler_act": "tanh",
        "pooler_output_size": config.representation_size or config.hidden_size,
    }
    if isinstance(config.stem, ResNetConfig):
        fields["backbone_config"] = _bit_fields(config.stem)
    return config_json.written(model, fields)


VIT = config_json.HuggingFace(
    _identify, read_config=_read_config, expressible=_expressible, layout_for=_layout_for, write_config=_write_config
)


# Bit


def _identify_bit(arrays: Mapping[str, LazyArray]) -> Layout | None:
    for prefix in ("bit.", ""):
        if f"{prefix}embedder.convolution.weight" in arrays:
            return _bit_layout(prefix, preactivation=f"{prefix}embedder.norm.weight" not in arrays)
    return None


def _bit_layout(prefix: str, *, preactivation: bool) -> Layout:
    if preactivation:
        rules = (
            keys.Rule((keys.BIT_ROOT,), f"{prefix}embedder.convolution.weight", keys.CONV),
            *keys.bit_units(f"{prefix}encoder.stages.{{s-1}}.layers.{{u-1}}"),
            *keys.bit_norm("resnet", f"{prefix}norm"),
            *keys.dense("resnet/head/conv2d", "classifier.1"),
        )
    else:
        rules = (*_resnet_rules(prefix), *keys.dense("head", "classifier.1"))
    return Layout(
        rules,
        torch=True,
        stores_groups=True,
        model_types=("bit",),
        ambiguous=() if preactivation else ("global_padding",),
    )


def _resnet_rules(prefix: str) -> tuple[keys.Rule, ...]:
    return (
        keys.Rule(("conv_root/kernel",), f"{prefix}embedder.convolution.weight", keys.CONV),
        *keys.norm("gn_root", f"{prefix}embedder.norm"),
        *keys.bottlenecks(f"{prefix}encoder.stages.{{s-1}}.layers.{{u-1}}"),
    )


def _read_bit_config(files: Mapping[str, dict], layout: Layout) -> FileConfig:
    fields = files[config_json.CONFIG]
    config = config_json.completed({**fields, "model_type": fields.get("model_type") or "bit"}, layout, {"bit": _BIT})
    size = pair(config, "image_size")
    images = read_processor(files, "bit", size)
    if size is None and images is not None and has_processor(files):  # the model accepts any size
        size = images.size
    return FileConfig(
        image_size=size,
        images=images,
        channels=named_number(config, "num_channels"),
        num_classes=config_json.num_labels(fields),
        **_bit_settings(config),
    )


def _bit_settings(backbone: dict) -> dict[str, Any]:
    """The fields of FileConfig for a Bit. Raises UserError for one that has other operators than the models here."""
    backbone = _BIT | backbone
    layer_type, padding, depths = (backbone[name] for name in ("layer_type", "global_padding", "depths"))
    same = isinstance(padding, str) and padding.upper() == "SAME"
    # No published weights have another combination.
    is_known = (layer_type, same) in (("preactivation", False), ("bottleneck", True)) and not (padding and not same)
    what = "'preactivation' with global_padding null, or 'bottleneck' with 'same'"
    check_field(is_known, "layer_type", what, (layer_type, padding))
    config_json.check_values(backbone, {"hidden_act": "relu", "output_stride": 32, "embedding_dynamic_padding": same})
    is_list = isinstance(depths, list | tuple) and all(is_side(depth) for depth in depths)
    check_field(is_list, "depths", "a list of positive numbers", depths)
    sizes = {
        "block_units": ("depths", tuple(depths)),
        "preactivation": ("layer_type == 'preactivation'", layer_type == "preactivation"),
    }
    return {"num_groups": number(backbone, "num_groups"), "resnet_sizes": sizes}


def _write_bit_config(model: Blueprint) -> dict[str, dict]:
    architecture = "BitForImageClassification" if model.num_classes else "BitModel"
    return config_json.written(model, {**_bit_fields(model.resnet), "architectures": [architecture]})


def _bit_fields(config: ResNetConfig) -> dict:
    assert config.stage_channels is not None
    stages = [f"stage{stage + 1}" for stage in range(len(config.block_units))]
    return {
        "model_type": "bit",
        "layer_type": "preactivation" if config.preactivation else "bottleneck",
        "global_padding": None if config.preactivation else "SAME",
        "embedding_dynamic_padding": not config.preactivation,
        "depths": list(config.block_units),
        "embedding_size": config.root_channels,
        "hidden_sizes": list(config.stage_channels),
        "num_groups": config.num_groups,
        "hidden_act": "relu",
        "width_factor": 1,
        "out_features": stages[-1:],
        "out_indices": [len(stages)],
        "stage_names": ["stem", *stages],
    }


BIT = config_json.HuggingFace(
    _identify_bit,
    read_config=_read_bit_config,
    expressible=lambda model: {} if isinstance(model.config, ResNetConfig) else None,
    layout_for=lambda model: _bit_layout("bit.", preactivation=model.resnet.preactivation),
    write_config=_write_bit_config,
)

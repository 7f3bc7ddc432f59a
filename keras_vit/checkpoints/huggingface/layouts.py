"""The keys of transformers' models, and the fields that each family has."""

from collections.abc import Mapping

import numpy as np

from keras_vit.checkpoints.key_mapping import (
    ATTENTION,
    BLOCK,
    CONV,
    POSITIONS,
    QKV,
    SAME,
    TABLE,
    TOKEN,
    Layout,
    Rule,
    bit_norm,
    bit_units,
    bottlenecks,
    dense,
    fused,
    norm,
)
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import ViTConfig

_MLP = f"{BLOCK}MlpBlock_3/"
_TOWERS = ("clip_vision_model", "siglip_vision_model")


def family_of(config: ViTConfig) -> str:
    """The model_type of transformers that has the fields of a configuration; "vit" for all others."""
    if config.position_embedding == "rotary":
        return "dinov3_vit"
    if config.layer_scale is not None:
        return "dinov2_with_registers" if config.num_registers else "dinov2"
    if config.pre_norm:
        return "clip_vision_model"
    if config.classifier == "map":
        return "siglip_vision_model"
    return "deit" if config.distillation != "none" else "vit"


def expressible_fields(config: ViTConfig, family: str, num_classes: int) -> dict[str, tuple | None]:
    """The values of the fields that a family can store, where they are not those of ViT; None for any."""
    gelu = ("silu",) if config.gated_mlp else None
    if family == "deit":
        return {"distillation": ("token", "head") if num_classes else ("token",)}
    if family in ("dinov2", "dinov2_with_registers"):
        own = dict.fromkeys(("gated_mlp", "layer_scale", "num_registers", "prefix_positions"), None)
        return {**own, "gelu": gelu, "classifier": ("token+gap",) if num_classes else ("token",)}
    if family == "dinov3_vit":
        own = dict.fromkeys(("gated_mlp", "layer_scale", "num_registers", "key_bias"), None)
        has_scale = {} if config.layer_scale is not None else {"layer_scale": ()}
        return {**own, **has_scale, "position_embedding": ("rotary",), "classifier": ("token",) * (not num_classes)}
    if family == "clip_vision_model":
        own = {"pre_norm": (True,), "patch_bias": (False,), "qkv_bias": (True,)}
        return {**own, "prefix_positions": None, "head_bias": (False,) if num_classes else None}
    if family == "siglip_vision_model":
        return {"classifier": ("map",) * (not num_classes), "qkv_bias": (True,)}
    return {}


def family_layout(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of arrays of one of these families; None for those of another."""
    for prefix in ("dinov2.", "dinov2_with_registers.", ""):
        if f"{prefix}embeddings.patch_embeddings.projection.weight" in arrays and (
            f"{prefix}encoder.layer.0.norm1.weight" in arrays
        ):
            return _dinov2(
                prefix,
                registers=f"{prefix}embeddings.register_tokens" in arrays,
                gated=f"{prefix}encoder.layer.0.mlp.weights_in.weight" in arrays,
                classifies="classifier.weight" in arrays,
            )
    if "embeddings.patch_embeddings.weight" in arrays and "layer.0.norm1.weight" in arrays:
        return _dinov3(gated="layer.0.mlp.gate_proj.weight" in arrays)
    for prefix in ("vision_model.", ""):
        if f"{prefix}embeddings.patch_embedding.weight" in arrays:
            clip = f"{prefix}pre_layrnorm.weight" in arrays
            return _tower(prefix, _TOWERS[0 if clip else 1])
    return None


def layout_to_write(config: ViTConfig, family: str, num_classes: int) -> Layout:
    """The layout for saving a model of one of these families."""
    if family == "dinov3_vit":
        return _dinov3(gated=config.gated_mlp)
    if family in _TOWERS:
        return _tower("vision_model." if num_classes else "", family)
    return _dinov2(
        f"{family}." if num_classes else "",
        registers=config.num_registers > 0,
        gated=config.gated_mlp,
        classifies=num_classes > 0,
    )


def unused_mask_token(config: ViTConfig, num_classes: int) -> dict[str, np.ndarray]:
    """The [mask] token, of zeros as initially, that some families have in every file and use in pretraining alone.

    Without registers, DINOv3 has an empty array of them.
    """
    family = family_of(config)
    if family == "dinov3_vit":
        arrays = {"embeddings.mask_token": np.zeros((1, 1, config.hidden_size), np.float32)}
        registers = {"embeddings.register_tokens": np.zeros((1, 0, config.hidden_size), np.float32)}
        return arrays if config.num_registers else arrays | registers
    if family == "dinov2_with_registers":
        prefix = f"{family}." if num_classes else ""
        return {f"{prefix}embeddings.mask_token": np.zeros((1, config.hidden_size), np.float32)}
    return {}


def _dinov2(prefix: str, *, registers: bool, gated: bool, classifies: bool) -> Layout:
    """DINOv2; its SwiGLU packs gate and value. Only that with registers resizes positions with antialiasing."""
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
        *_layer_scales(layer),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}norm2"),
        *(
            fused(packed, f"{layer}mlp.weights_in.weight", f"{layer}mlp.weights_in.bias")
            if gated
            else dense(f"{_MLP}Dense_0", f"{layer}mlp.fc1")
        ),
        *dense(f"{_MLP}Dense_1", f"{layer}mlp.{'weights_out' if gated else 'fc2'}"),
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


def _dinov3(*, gated: bool) -> Layout:
    layer = "layer.{i}."
    projections = zip((*QKV, "out"), ("q_proj", "k_proj", "v_proj", "o_proj"), strict=True)
    rules = (
        Rule(("cls",), "embeddings.cls_token"),
        Rule(("registers/tokens",), "embeddings.register_tokens"),
        Rule((), "embeddings.mask_token"),
        *dense("embedding", "embeddings.patch_embeddings", CONV),
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}norm1"),
        *(rule for part, key in projections for rule in dense(f"{ATTENTION}{part}", f"{layer}attention.{key}")),
        *_layer_scales(layer),
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


def _layer_scales(layer: str) -> tuple[Rule, ...]:
    return tuple(Rule((f"{BLOCK}LayerScale_{n}/scale",), f"{layer}layer_scale{n + 1}.lambda1") for n in (0, 1))


def _tower(prefix: str, family: str) -> Layout:
    """The vision towers of CLIP and SigLIP, alone or beside a text tower."""
    layer, head = f"{prefix}encoder.layers.{{i}}.", f"{prefix}head."
    projections = zip((*QKV, "out"), ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True)
    pooling, attention = "MAPHead_0/", "MAPHead_0/MultiHeadDotProductAttention_0/"
    in_projection = tuple(f"{attention}{part}" for part in QKV)
    rules = (
        Rule(("cls",), f"{prefix}embeddings.class_embedding", TOKEN),
        Rule((POSITIONS,), f"{prefix}embeddings.position_embedding.weight", TABLE),
        Rule((), f"{prefix}embeddings.position_ids"),
        *dense("embedding", f"{prefix}embeddings.patch_embedding", CONV),
        *norm("Transformer/pre_norm", f"{prefix}pre_layrnorm"),
        *norm(f"{BLOCK}LayerNorm_0", f"{layer}layer_norm1"),
        *(rule for part, key in projections for rule in dense(f"{ATTENTION}{part}", f"{layer}self_attn.{key}")),
        *norm(f"{BLOCK}LayerNorm_2", f"{layer}layer_norm2"),
        *dense(f"{_MLP}Dense_0", f"{layer}mlp.fc1"),
        *dense(f"{_MLP}Dense_1", f"{layer}mlp.fc2"),
        *norm("Transformer/encoder_norm", f"{prefix}post_layernorm"),
        Rule((f"{pooling}probe",), f"{head}probe", SAME),
        *fused(in_projection, f"{head}attention.in_proj_weight", f"{head}attention.in_proj_bias"),
        *dense(f"{attention}out", f"{head}attention.out_proj"),
        *norm(f"{pooling}LayerNorm_0", f"{head}layernorm"),
        *dense(f"{pooling}MlpBlock_0/Dense_0", f"{head}mlp.fc1"),
        *dense(f"{pooling}MlpBlock_0/Dense_1", f"{head}mlp.fc2"),
        *dense("head", "visual_projection"),
    )
    siglip = family == _TOWERS[1]
    return Layout(
        rules,
        gelu="tanh" if siglip else "quick",
        layer_norm_epsilon=1e-6 if siglip else 1e-5,
        qkv_bias=True,
        resampler="bicubic",
        model_types=(family, "siglip" if siglip else "clip"),
        ignored=("text_model.", "text_projection.", "logit_scale", "logit_bias", f"{prefix}embeddings.position_ids"),
    )


_BACKBONE = "embeddings.patch_embeddings.backbone.bit."
VIT_TYPES = ("vit", "vit_msn", "vit-hybrid", "vit_mae")


def vit_layout(
    prefix: str,
    model_types: tuple[str, ...] = VIT_TYPES,
    *,
    two_heads: bool = False,
    has_bare_layers: bool = False,
    layer_norm_epsilon: float = 1e-12,
) -> Layout:
    """Transformers' ViT, ViTHybrid, ViTMAE, ViT-MSN and DeiT.

    `prefix` is that of all keys but the classifiers'; with `has_bare_layers`, the encoder's layers have none either.
    """
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
        *norm("Transformer/encoder_norm", f"{prefix}layernorm"),
        *dense("pre_logits", f"{prefix}pooler.dense"),
        *dense("head", "cls_classifier" if two_heads else "classifier"),
        *dense("head_distillation", "distillation_classifier"),
        *_resnet(f"{prefix}{_BACKBONE}"),
    )
    return Layout(
        rules,
        gelu="erf",
        layer_norm_epsilon=layer_norm_epsilon,
        resampler="bicubic",
        model_types=model_types,
        ignored=("decoder.mask_token", "decoder.decoder_"),  # of a masked autoencoder
    )


def _resnet(prefix: str) -> tuple[Rule, ...]:
    return (
        Rule(("conv_root/kernel",), f"{prefix}embedder.convolution.weight", CONV),
        *norm("gn_root", f"{prefix}embedder.norm"),
        *bottlenecks(f"{prefix}encoder.stages.{{s-1}}.layers.{{u-1}}"),
    )


def bit_layout(prefix: str) -> Layout:
    return Layout(
        (
            Rule(("resnet/root_block/standardized_conv2d/kernel",), f"{prefix}embedder.convolution.weight", CONV),
            *bit_units(f"{prefix}encoder.stages.{{s-1}}.layers.{{u-1}}"),
            *bit_norm("resnet", f"{prefix}norm"),
            *dense("resnet/head/conv2d", "classifier.1"),
        )
    )


def bottleneck_layout(prefix: str) -> Layout:
    """Transformers' Bit of layer_type "bottleneck" with a classifier."""
    return Layout((*_resnet(prefix), *dense("head", "classifier.1")))

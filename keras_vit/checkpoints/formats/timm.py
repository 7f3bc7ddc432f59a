"""timm's Vision Transformers, hybrids and BiT: their keys and numerics; its configs are in `timm_config.py`."""

import dataclasses
from collections.abc import Mapping

from keras_vit.checkpoints.formats import timm_config
from keras_vit.checkpoints.formats.layout import DEFAULTS, Layout, WrittenModel
from keras_vit.checkpoints.key_mapping import (
    ATTENTION,
    BLOCK,
    CONV,
    POINTWISE_TORCH,
    POSITIONS,
    PROJECTIONS,
    Rule,
    bit_norm,
    bit_units,
    bottlenecks,
    dense,
    fused,
    norm,
)
from keras_vit.errors import UserError
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.config import ResNetConfig

LAYOUT = "timm"
SUFFIXES: tuple[str, ...] = (".safetensors", "")
CONFIG_FILES: tuple[str, ...] = (timm_config.CONFIG,)
_IMAGES = timm_config.images("bicubic", {None: 0.9})  # _cfg of its Vision Transformers
_BIT = Layout(
    (
        Rule(("resnet/root_block/standardized_conv2d/kernel",), "stem.conv.weight", CONV),
        *bit_units("stages.{s-1}.blocks.{u-1}"),
        *bit_norm("resnet", "norm"),
        Rule(("resnet/head/conv2d/kernel",), "head.fc.weight", POINTWISE_TORCH),
        Rule(("resnet/head/conv2d/bias",), "head.fc.bias"),
    ),
    torch=True,
    images=_IMAGES,
)


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format.

    Raises UserError for attention pooling beside other tokens than patches.
    """
    if "patch_embed.proj.weight" not in arrays:
        return _BIT if "stem.conv.weight" in arrays else None
    if "attn_pool.latent" in arrays and arrays.keys() & {"cls_token", "reg_token"}:
        raise UserError(
            "The file is of a model of timm with global_pool='map' beside a class token or registers, which is not "
            "supported; give a checkpoint with the patches alone, such as a SigLIP, or with another pooling."
        )
    hidden, output = (arrays.get(f"blocks.0.mlp.{part}.weight") for part in ("fc1", "fc2"))
    gated = False
    if hidden is not None and output is not None and len(hidden.shape) == len(output.shape) == 2:
        gated = hidden.shape[0] == 2 * output.shape[1]
    found = _vit(
        root_only="patch_embed.backbone.conv.weight" in arrays,
        after_pooling="fc_norm.weight" in arrays,
        gated=gated,
        pre_norm="norm_pre.weight" in arrays,
    )
    # Without heads, features are the mean of both tokens.
    settings = {"distillation": "head" if "dist_token" in arrays else "none"}
    plain = not arrays.keys() & {"dist_token", "reg_token", "blocks.0.ls1.gamma"}
    return dataclasses.replace(
        found,
        settings=settings,
        # Of the models whose class token has no row among the positions, FlexiViT alone is so plain.
        patch_resampler="bilinear" if plain and "cls_token" in arrays else None,
        ambiguous=_ambiguous(arrays),
    )


def _ambiguous(arrays: Mapping[str, LazyArray]) -> tuple[str, ...]:
    """Settings in which models with the same arrays differ.

    OpenAI's CLIP has another GELU than OpenCLIP, and Perception Encoders have the arrays of CLIP beside rotary
    positions. Without a class token, models with a norm before pooling differ in GELU and in the number of heads. Those
    with a norm after pooling have either ordinary blocks or, without biases of query, key and value
    (vit_base_patch16_rpn_224), blocks that normalize after each branch.
    """
    if "norm_pre.weight" in arrays:
        return "gelu", "position_embedding"
    if "cls_token" in arrays:
        return ()
    return ("block",) if "fc_norm.weight" in arrays else ("gelu", "num_heads")


def expressible(model: WrittenModel) -> dict[str, tuple | None] | None:
    """The fields that it has; None for a ResNet other than BiT."""
    config = model.config
    if isinstance(config, ResNetConfig):
        return {} if config.preactivation else None
    return {
        **DEFAULTS,
        **dict.fromkeys(("gated_mlp", "layer_scale", "num_registers", "prefix_positions"), None),
        "with_class_token": None,
        **dict.fromkeys(("gelu", "pre_norm", "qkv_bias", "norm_after_pooling"), None),
        "classifier": ("token", "gap", "map"),
        "position_embedding": ("learned", "none") if config.distillation == "none" else ("learned",),
        "patch_bias": (not config.pre_norm,),
        "distillation": ("none",) if config.num_registers else ("none", "head"),
        "stem": (None, ResNetConfig),
    }


def layout_for(model: WrittenModel) -> Layout:
    """The layout to write a model in."""
    config = model.config
    if isinstance(config, ResNetConfig):
        return _BIT
    found = _vit(
        root_only=isinstance(config.stem, ResNetConfig) and not config.stem.block_units,
        after_pooling=config.norm_after_pooling,
        gated=config.gated_mlp,
        pre_norm=config.pre_norm,
    )
    return dataclasses.replace(found, prefix_positions=False) if config.num_registers else found


def _vit(*, root_only: bool, after_pooling: bool, gated: bool, pre_norm: bool) -> Layout:
    """ViT and hybrids; a backbone without stages has no "stem" in its keys; fc_norm follows the pooling."""
    block, root = "blocks.{i}.", "patch_embed.backbone." if root_only else "patch_embed.backbone.stem."
    mlp = f"{BLOCK}MlpBlock_3/"
    pooling, attention = "MAPHead_0/", "MAPHead_0/MultiHeadDotProductAttention_0/"
    hidden = tuple(f"{mlp}{part}" for part in (("gate", "Dense_0") if gated else ("Dense_0",)))
    rules = (
        Rule(("cls",), "cls_token"),
        Rule(("distillation/tokens",), "dist_token"),
        Rule(("registers/tokens",), "reg_token"),
        Rule((POSITIONS,), "pos_embed"),
        *dense("embedding", "patch_embed.proj", CONV),
        *norm(f"{BLOCK}LayerNorm_0", f"{block}norm1"),
        *fused(PROJECTIONS, f"{block}attn.qkv.weight", f"{block}attn.qkv.bias"),
        *dense(f"{ATTENTION}out", f"{block}attn.proj"),
        *norm(f"{BLOCK}LayerNorm_2", f"{block}norm2"),
        *fused(hidden, f"{block}mlp.fc1.weight", f"{block}mlp.fc1.bias"),
        *dense(f"{mlp}Dense_1", f"{block}mlp.fc2"),
        *(Rule((f"{BLOCK}LayerScale_{n}/scale",), f"{block}ls{n + 1}.gamma") for n in (0, 1)),
        *norm("Transformer/pre_norm", "norm_pre"),
        *norm("Transformer/encoder_norm", "fc_norm" if after_pooling else "norm"),
        Rule((f"{pooling}probe",), "attn_pool.latent"),
        *dense(f"{attention}query", "attn_pool.q"),
        *fused((f"{attention}key", f"{attention}value"), "attn_pool.kv.weight", "attn_pool.kv.bias"),
        *dense(f"{attention}out", "attn_pool.proj"),
        *norm(f"{pooling}LayerNorm_0", "attn_pool.norm"),
        *dense(f"{pooling}MlpBlock_0/Dense_0", "attn_pool.mlp.fc1"),
        *dense(f"{pooling}MlpBlock_0/Dense_1", "attn_pool.mlp.fc2"),
        *dense("pre_logits", "pre_logits.fc"),
        *dense("head", "head"),
        *dense("head_distillation", "head_dist"),
        Rule(("conv_root/kernel",), f"{root}conv.weight", CONV),
        *norm("gn_root", f"{root}norm"),
        *bottlenecks("patch_embed.backbone.stages.{s-1}.blocks.{u-1}"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        layer_norm_epsilon=1e-5 if pre_norm else 1e-6,
        resampler="bicubic-antialias",
        images=_IMAGES,
        prefix_positions=None,
        torch=True,
    )


read_config, write_config = timm_config.read_config, timm_config.write_config

"""timm's Vision Transformers, hybrids and BiT, and its `Eva` with rotary positions: their keys and numerics.

Of the other models of the class Eva in timm 1.0.31, none has the blocks of this package. Configs: `timm_config.py`.
"""

import dataclasses
from collections.abc import Mapping

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats import timm_config
from keras_vit.checkpoints.formats.layout import DEFAULTS, Format, Layout, unsupported
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import ResNetConfig, ViTConfig

# Arrays by which timm's other models are known, and their names; the first that has all of them.
_UNSUPPORTED = (
    ("blocks.0.attn.relative_position_bias_table", "BEiT"),
    ("rel_pos_bias.relative_position_bias_table", "BEiT"),
    ("embeds.proj.weight", "NaFlex ViT"),
    ("layers.0.blocks.0.norm1.weight", "Swin Transformer"),
    ("patch_embed.norm.weight", "AIMv2"),
    ("blocks_token_only.0.gamma_1", "CaiT"),
    ("blocks.0.attn.norm.weight blocks.0.mlp.fc1.weight", "BEiT-3"),
    ("blocks.0.gamma_1 blocks.0.attn.qkv.bias", "ViT with another kind of rotary positions (RoPE-ViT)"),
    ("blocks.0.gamma_1 fc_norm.weight", "ViT with another kind of rotary positions (RoPE-ViT)"),
    ("attn_pool.latent cls_token", "ViT with global_pool='map' beside a class token"),
    ("attn_pool.latent reg_token", "ViT with global_pool='map' beside registers"),
)
_IMAGES = timm_config.images("bicubic", {None: 0.9})  # _cfg of its Vision Transformers
_BIT = Layout(
    (
        keys.Rule((keys.BIT_ROOT,), "stem.conv.weight", keys.CONV),
        *keys.bit_units("stages.{s-1}.blocks.{u-1}"),
        *keys.bit_norm("resnet", "norm"),
        keys.Rule(("resnet/head/conv2d/kernel",), "head.fc.weight", keys.POINTWISE_TORCH),
        keys.Rule(("resnet/head/conv2d/bias",), "head.fc.bias"),
    ),
    torch=True,
    images=_IMAGES,
)


def _packs_gate(arrays: Mapping[str, LazyArray]) -> bool:
    """Whether gate and value of the MLP are one array."""
    hidden, output = (arrays.get(f"blocks.0.mlp.{part}.weight") for part in ("fc1", "fc2"))
    return hidden is not None and output is not None and hidden.shape[:1] == tuple(2 * n for n in output.shape[1:])


def identify(arrays: Mapping[str, LazyArray]) -> Layout | None:
    """The layout of a file with these arrays; None for that of another format. Raises UserError for other models."""
    if "patch_embed.proj.weight" not in arrays and "embeds.proj.weight" not in arrays:
        return _BIT if "stem.conv.weight" in arrays else None
    if arrays.keys() >= {"norm_pre.weight", "pos_embed"} and arrays.keys() & {"attn_pool.latent", "blocks.0.gamma_1"}:
        return _perception_encoder(scaled="blocks.0.gamma_1" in arrays)
    for telling, name in _UNSUPPORTED:
        if arrays.keys() >= set(telling.split()):
            raise unsupported(f"of timm's {name}", "give a ViT or a DINO instead")
    gated = _packs_gate(arrays)
    if "blocks.0.attn.q_proj.weight" in arrays or arrays.keys() >= {"blocks.0.attn.q_bias", "pos_embed"}:
        return _eva_with_positions(arrays, gated=gated)
    if "blocks.0.gamma_1" in arrays:
        return _eva(gated=gated or "blocks.0.mlp.fc1_g.weight" in arrays, packed=gated)
    plain = not arrays.keys() & {"dist_token", "reg_token", "blocks.0.ls1.gamma"}
    return dataclasses.replace(
        _vit(
            root_only="patch_embed.backbone.conv.weight" in arrays,
            after_pooling="fc_norm.weight" in arrays,
            gated=gated,
            pre_norm="norm_pre.weight" in arrays,
        ),
        # Without heads, features are the mean of both tokens.
        settings={"distillation": "head" if "dist_token" in arrays else "none"},
        # Without a last norm, a small Perception Encoder has the arrays of CLIP.
        rotates_pairs=None if _may_rotate(arrays) else False,
        # Of the models whose class token has no row among the positions, FlexiViT alone is so plain.
        patch_resampler="bilinear" if plain and "cls_token" in arrays else None,
        ambiguous=_ambiguous(arrays),
    )


def _eva_with_positions(arrays: Mapping[str, LazyArray], *, gated: bool) -> Layout:
    """The layout of EVA-02. Raises UserError for other models of the class Eva with learned positions."""
    is_eva02 = gated or arrays.keys() >= {"blocks.0.mlp.fc1_g.weight", "pos_embed"}
    if not is_eva02 or "blocks.0.gamma_1" in arrays:
        raise unsupported("of timm's EVA or Sapiens2", "give a ViT, a DINO or an EVA-02 instead")
    fused = "blocks.0.attn.q_proj.weight" not in arrays
    return _eva02(fused=fused, packed=gated, after_pooling="fc_norm.weight" in arrays)


def _may_rotate(arrays: Mapping[str, LazyArray]) -> bool:
    return "norm_pre.weight" in arrays and not arrays.keys() & {"norm.weight", "fc_norm.weight"}


def _ambiguous(arrays: Mapping[str, LazyArray]) -> tuple[str, ...]:
    """Settings in which models with the same arrays differ.

    OpenAI's CLIP has another GELU than OpenCLIP, and Perception Encoders have the arrays of CLIP beside rotary
    positions. Without a class token, models with a norm before pooling differ in GELU and in the number of heads. Those
    with a norm after pooling have either ordinary blocks or, without biases of query, key and value
    (vit_base_patch16_rpn_224), blocks that normalize after each branch.
    """
    if _may_rotate(arrays):
        return ("architecture",)
    if "norm_pre.weight" in arrays:
        return "gelu", "position_embedding"
    if "cls_token" in arrays:
        return ()
    return ("block",) if "fc_norm.weight" in arrays else ("gelu", "num_heads")


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    config = model.config
    if isinstance(config, ResNetConfig):
        return {} if config.preactivation else None
    free = ("gated_mlp", "layer_scale", "num_registers", "with_class_token", "qkv_bias")
    if config.rotary_reference is not None and config.pre_norm:
        return _of_perception_encoder(config)
    if config.rotary_reference is not None:
        own = ("mlp_norm", "attention_norm", "rotary_reference", "with_class_token", "norm_after_pooling")
        return {
            **DEFAULTS,
            **dict.fromkeys(own, None),
            "gated_mlp": (True,),
            "gelu": ("silu",),
            "key_bias": (False,),
            "layer_norm_epsilon": (1e-6,),
            "classifier": ("token", "gap") if config.has_class_token else ("token",),
        }
    if config.position_embedding == "rotary":
        return {
            **DEFAULTS,
            **dict.fromkeys(free, None),
            "gelu": ("silu",) if config.gated_mlp else ("erf",),
            "key_bias": (not config.qkv_bias,),  # that of the key is always 0
            "layer_scale": () if config.layer_scale is None else None,
            "position_embedding": ("rotary",),
            "classifier": ("token", "gap") if config.has_class_token else ("token",),
        }
    return {
        **DEFAULTS,
        **dict.fromkeys((*free, "prefix_positions", "gelu", "pre_norm", "norm_after_pooling"), None),
        "classifier": ("token", "gap", "map"),
        "final_norm": None,
        "position_embedding": ("learned", "none") if config.distillation == "none" else ("learned",),
        "patch_bias": (not config.pre_norm,),
        "distillation": ("none",) if config.num_registers else ("none", "head"),
        "stem": (None, ResNetConfig),
    }


def _of_perception_encoder(config: ViTConfig) -> dict[str, tuple | None]:
    """The values of `_expressible`: core has a last norm and pools all tokens, lang and spatial have neither."""
    own = ("rotary_reference", "rotary_offset", "pool_heads", "pool_mlp_dim", "with_class_token", "final_norm")
    unpooled = ("token", "gap") if config.has_class_token else ("gap",)
    return {
        **DEFAULTS,
        **dict.fromkeys(own, None),
        "pre_norm": (True,),
        "patch_bias": (False,),
        "gelu": ("erf",),
        "layer_norm_epsilon": (1e-5,),
        "rotary_columns_first": (True,),
        "classifier": ("map",) if config.final_norm else unpooled,
        "layer_scale": (None,) if config.final_norm else None,
    }


def _layout_for(model: Blueprint) -> Layout:
    config = model.config
    if isinstance(config, ResNetConfig):
        return _BIT
    if config.position_embedding == "rotary":
        return _eva(gated=config.gated_mlp)
    if config.rotary_reference is not None and config.pre_norm:
        return _perception_encoder(scaled=config.layer_scale is not None)
    if config.rotary_reference is not None:  # tiny and small have neither norms nor separate projections
        whole = not (config.mlp_norm or config.attention_norm)
        return _eva02(fused=whole, packed=whole, after_pooling=config.norm_after_pooling)
    layout = _vit(
        root_only=isinstance(config.stem, ResNetConfig) and not config.stem.block_units,
        after_pooling=config.norm_after_pooling,
        gated=config.gated_mlp,
        pre_norm=config.pre_norm,
    )
    return dataclasses.replace(layout, prefix_positions=False) if config.num_registers else layout


def _vit(*, root_only: bool, after_pooling: bool, gated: bool, pre_norm: bool, scales: str = "ls{n}.gamma") -> Layout:
    """ViT and hybrids; a backbone without stages has no "stem" in its keys; fc_norm follows the pooling."""
    block, root = "blocks.{i}.", "patch_embed.backbone." if root_only else "patch_embed.backbone.stem."
    rules = (
        keys.Rule(("cls",), "cls_token"),
        keys.Rule(("distillation/tokens",), "dist_token"),
        keys.Rule(("registers/tokens",), "reg_token"),
        keys.Rule((keys.POSITIONS,), "pos_embed"),
        *keys.dense("embedding", "patch_embed.proj", keys.CONV),
        *(keys.packed_mlp(block, "mlp.fc1") if gated else ()),
        *keys.block_rules(block, _NORMS, _FUSED, ("mlp.fc1", "mlp.fc2"), scales=scales),
        *keys.norm("Transformer/pre_norm", "norm_pre"),
        *keys.norm("Transformer/encoder_norm", "fc_norm" if after_pooling else "norm"),
        *keys.dense(keys.POOLING_INPUTS[0], "attn_pool.q"),
        *keys.fused(keys.POOLING_INPUTS[1:], "attn_pool.kv.weight", "attn_pool.kv.bias"),
        *keys.pooling_rules("attn_pool.", "latent", "proj", "norm"),
        *keys.dense("pre_logits", "pre_logits.fc"),
        *keys.dense("head", "head"),
        *keys.dense("head_distillation", "head_dist"),
        keys.Rule(("conv_root/kernel",), f"{root}conv.weight", keys.CONV),
        *keys.norm("gn_root", f"{root}norm"),
        *keys.bottlenecks("patch_embed.backbone.stages.{s-1}.blocks.{u-1}"),
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


_NORMS, _FUSED = ("norm1", "norm2"), ("attn.qkv.", "attn.proj")
# Of the class Eva, whose key has no bias.
_BIASES = tuple(
    keys.Rule((f"{keys.ATTENTION}{part}/bias",), f"blocks.{{i}}.attn.{part[0]}_bias") for part in ("query", "value")
)


def _eva(*, gated: bool, packed: bool = False) -> Layout:
    """DINOv3, EUPE and LingBot-Vision. `packed`: gate and value are one array, as with swiglu_align_to=0."""
    block = "blocks.{i}."
    hidden = ("fc1", "fc2") if packed or not gated else ("fc1_x", "fc2", "fc1_g")
    rules = (
        keys.Rule(("cls",), "cls_token"),
        keys.Rule(("registers/tokens",), "reg_token"),
        *keys.dense("embedding", "patch_embed.proj", keys.CONV),
        *(keys.packed_mlp(block, "mlp.fc1") if packed else ()),
        *_BIASES,
        *keys.block_rules(block, _NORMS, _FUSED, tuple(f"mlp.{part}" for part in hidden), scales="gamma_{n}"),
        *keys.norm("Transformer/encoder_norm", "norm"),
        *keys.dense("head", "head"),
    )
    return Layout(
        rules,
        gelu="silu" if gated else "erf",
        layer_norm_epsilon=1e-5,
        images=timm_config.images("bicubic", {None: 1.0}),
        settings={"position_embedding": "rotary"},
        ambiguous=("classifier",),  # DINOv3 of timm averages the patches, that of its authors reads the class token
        torch=True,
    )


def _perception_encoder(*, scaled: bool) -> Layout:
    """Perception Encoders: core, which pools all tokens, and lang and spatial, without a last norm."""
    scales = "gamma_{n}" if scaled else "ls{n}.gamma"
    return dataclasses.replace(
        _vit(root_only=False, after_pooling=False, gated=False, pre_norm=True, scales=scales),
        prefix_positions=True,
        rotates_pairs=True,
        ambiguous=("architecture",),
    )


def _eva02(*, fused: bool, packed: bool, after_pooling: bool) -> Layout:
    """EVA-02. `fused`: query, key and value are one array; `packed`: gate and value are."""
    block, mlp = "blocks.{i}.", keys.BLOCK + "MlpBlock_3/"
    separate = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.proj")
    hidden = ("fc1", "fc2") if packed else ("fc1_x", "fc2", "fc1_g")
    rules = (
        keys.Rule(("cls",), "cls_token"),
        keys.Rule((keys.POSITIONS,), "pos_embed"),
        *keys.dense("embedding", "patch_embed.proj", keys.CONV),
        *(keys.packed_mlp(block, "mlp.fc1") if packed else ()),
        *(_BIASES if fused else ()),
        *keys.block_rules(block, _NORMS, _FUSED if fused else separate, tuple(f"mlp.{part}" for part in hidden)),
        *keys.norm(f"{mlp}norm", f"{block}mlp.norm"),
        *keys.norm(f"{keys.ATTENTION}norm", f"{block}attn.norm"),
        *keys.norm("Transformer/encoder_norm", "fc_norm" if after_pooling else "norm"),
        *keys.dense("head", "head"),
    )
    return Layout(
        rules,
        gelu="silu",
        resampler="bicubic-antialias",
        images=timm_config.images("bicubic", {None: 1.0}),
        torch=True,
        rotates_pairs=True,
        ambiguous=("architecture",),
    )


TIMM = Format(
    "timm",
    identify,
    config_files=(timm_config.CONFIG,),
    read_config=timm_config.read_config,
    suffixes=(".safetensors", ""),
    expressible=_expressible,
    layout_for=_layout_for,
    write_config=timm_config.write_config,
)

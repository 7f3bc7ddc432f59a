"""The JAX codes' files: vit_jax before and after flax's Linen, big_vision, and big_transfer, with TensorFlow's names.

The weights of all models here have the keys of vit_jax as released, those of BiT big_transfer's.
"""

import dataclasses
from collections.abc import Mapping

from keras_vit.checkpoints import key_mapping as keys
from keras_vit.checkpoints.formats.layout import DEFAULTS, HEAD_BIASES, QUERY_BIAS, Format, Layout
from keras_vit.files.lazy_array import LazyArray
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import ResNetConfig, ViTConfig

_SCALE_BIAS = ("scale", "bias")


def _unchanged(*names: str, transform: keys.Transform = keys.SAME) -> tuple[keys.Rule, ...]:
    """Rules for keys that equal the names of the weights."""
    return tuple(keys.Rule((name,), name, transform) for name in names)


def _both(*layers: str, leaves: tuple[str, str] = ("kernel", "bias")) -> tuple[str, ...]:
    return tuple(f"{layer}/{leaf}" for layer in layers for leaf in leaves)


def _attention(name: str, key: str) -> tuple[keys.Rule, ...]:
    return (
        *(keys.Rule((f"{name}{leaf}",), f"{key}{leaf}", keys.TO_HEADS) for leaf in _both(*keys.QKV)),
        keys.Rule((f"{name}out/kernel",), f"{key}out/kernel", keys.FROM_HEADS),
        keys.Rule((f"{name}out/bias",), f"{key}out/bias"),
    )


def block_rules(layer: str, modules: tuple[str, str, str], to: str = keys.BLOCK) -> tuple[keys.Rule, ...]:
    """The rules of an encoder block whose attention, second norm and MLP have these names."""
    attention, second_norm, mlp = modules
    renamed = {f"LayerNorm_0/{leaf}": f"LayerNorm_0/{leaf}" for leaf in _SCALE_BIAS}
    renamed |= {f"LayerNorm_2/{leaf}": f"{second_norm}/{leaf}" for leaf in _SCALE_BIAS}
    renamed |= {f"MlpBlock_3/{leaf}": f"{mlp}/{leaf}" for leaf in _both("Dense_0", "Dense_1")}
    rules = (keys.Rule((f"{to}{name}",), f"{layer}{key}") for name, key in renamed.items())
    return *rules, *_attention(f"{to}MultiHeadDotProductAttention_1/", f"{layer}{attention}/")


_BEFORE_LINEN = ("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
LINEN = ("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
_OUTSIDE_BLOCKS = (
    *_unchanged(
        "cls", *_both("embedding", "pre_logits", "head"), *_both("Transformer/encoder_norm", leaves=_SCALE_BIAS)
    ),
    *_unchanged("MAPHead_0/probe", *_both("MAPHead_0/LayerNorm_0", leaves=_SCALE_BIAS)),
    *_unchanged(*_both("MAPHead_0/MlpBlock_0/Dense_0", "MAPHead_0/MlpBlock_0/Dense_1")),
    *_attention("MAPHead_0/MultiHeadDotProductAttention_0/", "MAPHead_0/MultiHeadDotProductAttention_0/"),
)
_RESNET = (
    *_unchanged("conv_root/kernel", *(f"{keys.UNIT}conv{each}/kernel" for each in (1, 2, 3, "_proj"))),
    *_unchanged(
        *_both("gn_root", *(f"{keys.UNIT}gn{each}" for each in (1, 2, 3, "_proj")), leaves=_SCALE_BIAS),
        transform=keys.CHANNELS,
    ),
)


def _layout(*rules: keys.Rule) -> Layout:
    """Standardized kernels are divided by their standard deviation; flax's GroupNorm has the epsilon 1e-6."""
    return Layout(
        (*_OUTSIDE_BLOCKS, *rules),
        group_norm_epsilon=1e-6,
        variance_epsilon=0.0,
        deviation_epsilon=1e-5,
        biases=(*HEAD_BIASES, QUERY_BIAS),
    )


_RELEASED = _layout(*_unchanged(keys.POSITIONS), *block_rules(keys.BLOCK, _BEFORE_LINEN), *_RESNET)
_LINEN = _layout(*_unchanged(keys.POSITIONS), *block_rules(keys.BLOCK, LINEN), *_RESNET)
# It prepends the class token after the position embeddings are added.
_BIG_VISION = dataclasses.replace(
    _layout(keys.Rule((keys.POSITIONS,), "pos_embedding"), *block_rules(keys.BLOCK, LINEN)),
    prefix_positions=False,
    default_positions="sincos-2d",
)
_BIT = Layout(
    (
        *_unchanged(keys.BIT_ROOT, f"{keys.BIT_UNIT}a/proj/standardized_conv2d/kernel"),
        *_unchanged(*(f"{keys.BIT_UNIT}{letter}/standardized_conv2d/kernel" for letter in "abc")),
        *_unchanged(*(f"{keys.BIT_UNIT}{letter}/group_norm/{leaf}" for letter in "abc" for leaf in ("gamma", "beta"))),
        *_unchanged("resnet/group_norm/gamma", "resnet/group_norm/beta", "resnet/head/conv2d/bias"),
        *_unchanged("resnet/head/conv2d/kernel", transform=keys.POINTWISE),
    ),
    variance_epsilon=1e-10,
)


def _is_vit(arrays: Mapping[str, LazyArray], *, released: bool) -> bool:
    is_released = any("/MultiHeadDotProductAttention_1/" in key for key in arrays)
    return "embedding/kernel" in arrays and is_released == released


def _expressible(model: Blueprint) -> dict[str, tuple | None] | None:
    if not isinstance(model.config, ViTConfig):
        return None
    heads = ("token", "gap", "map", "unpooled", "none")
    return {**DEFAULTS, "classifier": heads, "representation_size": None, "stem": (None, ResNetConfig)}


def _expressible_in_big_vision(model: Blueprint) -> dict[str, tuple | None] | None:
    fields = _expressible(model)
    return fields and {**fields, "stem": (None,), "position_embedding": ("learned", "sincos-2d")}


_NPZ = (".npz",)
VIT_JAX = Format(
    "npz",
    lambda arrays: _RELEASED if _is_vit(arrays, released=True) else None,
    suffixes=_NPZ,
    expressible=_expressible,
    layout_for=lambda model: _RELEASED,
)
BIG_TRANSFER = Format(
    "npz",
    lambda arrays: _BIT if keys.BIT_ROOT in arrays else None,
    suffixes=_NPZ,
    expressible=lambda model: {} if isinstance(model.config, ResNetConfig) and model.config.preactivation else None,
    layout_for=lambda model: _BIT,
)
VIT_JAX_LINEN = Format(
    "npz-linen",
    lambda arrays: _LINEN if keys.POSITIONS in arrays and _is_vit(arrays, released=False) else None,
    suffixes=_NPZ,
    expressible=_expressible,
    layout_for=lambda model: _LINEN,
)
BIG_VISION = Format(
    "big_vision",
    lambda arrays: _BIG_VISION if keys.POSITIONS not in arrays and _is_vit(arrays, released=False) else None,
    suffixes=_NPZ,
    expressible=_expressible_in_big_vision,
    layout_for=lambda model: _BIG_VISION,
)

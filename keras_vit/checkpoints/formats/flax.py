"""The keys that the JAX codes share: vit_jax before and after flax's Linen, and big_vision. Not a format of its own."""

from keras_vit.checkpoints.formats.layout import DEFAULTS, HEAD_BIASES, QUERY_BIAS, Layout, WrittenModel
from keras_vit.checkpoints.key_mapping import (
    ATTENTION,
    BLOCK,
    CHANNELS,
    FROM_HEADS,
    QKV,
    SAME,
    TO_HEADS,
    UNIT,
    Rule,
    Transform,
)
from keras_vit.models.config import PositionEmbeddingKind, ResNetConfig, ViTConfig

_SCALE_BIAS = ("scale", "bias")


def unchanged(*keys: str, transform: Transform = SAME) -> tuple[Rule, ...]:
    """Rules for keys that equal the names of the weights."""
    return tuple(Rule((key,), key, transform) for key in keys)


def _both(*layers: str, leaves: tuple[str, str] = ("kernel", "bias")) -> tuple[str, ...]:
    return tuple(f"{layer}/{leaf}" for layer in layers for leaf in leaves)


def _attention(name: str, key: str) -> tuple[Rule, ...]:
    return (
        *(Rule((f"{name}{leaf}",), f"{key}{leaf}", TO_HEADS) for leaf in _both(*QKV)),
        Rule((f"{name}out/kernel",), f"{key}out/kernel", FROM_HEADS),
        Rule((f"{name}out/bias",), f"{key}out/bias"),
    )


def block(attention: str, second_norm: str, mlp: str) -> tuple[Rule, ...]:
    """The rules of an encoder block whose modules have these names."""
    rules = []
    for name, key in (("LayerNorm_0", "LayerNorm_0"), ("LayerNorm_2", second_norm)):
        rules += [Rule((f"{BLOCK}{name}/{leaf}",), f"{BLOCK}{key}/{leaf}") for leaf in _SCALE_BIAS]
    for leaf in _both("Dense_0", "Dense_1"):
        rules.append(Rule((f"{BLOCK}MlpBlock_3/{leaf}",), f"{BLOCK}{mlp}/{leaf}"))
    return *rules, *_attention(ATTENTION, f"{BLOCK}{attention}/")


RELEASED_BLOCK = block("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3")
LINEN_BLOCK = block("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
OUTSIDE_BLOCKS = (
    *unchanged(
        "cls", *_both("embedding", "pre_logits", "head"), *_both("Transformer/encoder_norm", leaves=_SCALE_BIAS)
    ),
    *unchanged("MAPHead_0/probe", *_both("MAPHead_0/LayerNorm_0", leaves=_SCALE_BIAS)),
    *unchanged(*_both("MAPHead_0/MlpBlock_0/Dense_0", "MAPHead_0/MlpBlock_0/Dense_1")),
    *_attention("MAPHead_0/MultiHeadDotProductAttention_0/", "MAPHead_0/MultiHeadDotProductAttention_0/"),
)
RESNET = (
    *unchanged("conv_root/kernel", *(f"{UNIT}{conv}/kernel" for conv in ("conv1", "conv2", "conv3", "conv_proj"))),
    *unchanged(*_both("gn_root", leaves=_SCALE_BIAS), transform=CHANNELS),
    *unchanged(
        *_both(*(f"{UNIT}{gn}" for gn in ("gn1", "gn2", "gn3", "gn_proj")), leaves=_SCALE_BIAS), transform=CHANNELS
    ),
)


def layout(*rules: Rule, prefix_positions: bool = True, default_positions: PositionEmbeddingKind = "none") -> Layout:
    """Standardized kernels are divided by their standard deviation; flax's GroupNorm has the epsilon 1e-6."""
    return Layout(
        (*OUTSIDE_BLOCKS, *rules),
        group_norm_epsilon=1e-6,
        variance_epsilon=0.0,
        deviation_epsilon=1e-5,
        biases=(*HEAD_BIASES, QUERY_BIAS),
        prefix_positions=prefix_positions,
        default_positions=default_positions,
    )


def expressible(model: WrittenModel, stems: tuple = (None, ResNetConfig)) -> dict[str, tuple | None] | None:
    """The fields of Vision Transformers that these codes have; None for a ResNet."""
    if not isinstance(model.config, ViTConfig):
        return None
    heads = ("token", "gap", "map", "unpooled", "none")
    return {**DEFAULTS, "classifier": heads, "representation_size": None, "stem": stems}

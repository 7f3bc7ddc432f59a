"""The Vision Transformer, top to bottom: patches, class token, positions, encoder blocks, head.

Paper: "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 3.1, equations 1 to 4, and appendix B.1 for dropout.
Agrees with vit_jax `models_vit.py` to float rounding; attention pooling is that of big_vision `models/vit.py`.
Layers bear the names of the released checkpoints, with "." for "/", so that a layer's name is its weights' address.

Axes: B batch, h rows and w columns of patches, N tokens, D width, M width of the MLP.
"""

import dataclasses

import keras
import numpy as np

from keras_vit.config import ViTConfig
from keras_vit.layers import (
    ClassToken,
    DotProductAttention,
    ModelSpec,
    PoolTokens,
    PositionEmbedding,
    Probe,
    TokenDense,
)
from keras_vit.preprocess import Preprocessing


def vision_transformer(
    config: ViTConfig, preprocessing: Preprocessing, num_classes: int | None, name: str
) -> keras.Model:
    """The model as a functional keras.Model: images (B, height, width, channels) in [-1, 1] -> logits (B, classes).

    Without classes it ends with the features (B, D) or, unpooled, (B, N, D). Called by `keras_vit.build`.
    """
    grid = config.grid(preprocessing.image_size)
    images = keras.Input((*preprocessing.image_size, preprocessing.channels), name="image")
    spec = {"model": dataclasses.asdict(config), "preprocessing": dataclasses.asdict(preprocessing)}
    x = ModelSpec(**spec, name="spec")(images)

    x = keras.layers.Conv2D(
        config.hidden_size, config.patch, strides=config.patch, kernel_initializer="lecun_normal", name="embedding"
    )(x)  # (B, h, w, D)
    x = keras.layers.Reshape((grid[0] * grid[1], config.hidden_size), name="patches")(x)  # (B, h * w, D)
    if config.num_prefix_tokens:
        x = ClassToken(name="cls")(x)  # (B, 1 + h * w, D)
    x = PositionEmbedding(grid, config.num_prefix_tokens, name="Transformer.posembed_input")(x)
    x = dropout(x, config.dropout_rate, "Transformer.posembed_input.dropout")

    depth_rates = np.linspace(0.0, config.stochastic_depth_rate, config.num_layers)
    for layer in range(config.num_layers):
        x = encoder_block(
            x,
            num_heads=config.num_heads,
            mlp_dim=config.mlp_dim,
            gelu=config.gelu,
            epsilon=config.layer_norm_epsilon,
            dropout_rate=config.dropout_rate,
            attention_dropout_rate=config.attention_dropout_rate,
            stochastic_depth_rate=float(depth_rates[layer]),
            name=f"Transformer.encoderblock_{layer}",
        )
    x = layer_norm(x, config.layer_norm_epsilon, "Transformer.encoder_norm")
    if config.classifier == "none":
        return keras.Model(images, x, name=name)

    if config.classifier == "map":
        x = attention_pooling(
            x,
            num_heads=config.num_heads,
            mlp_dim=config.mlp_dim,
            gelu=config.gelu,
            epsilon=config.layer_norm_epsilon,
            name="MAPHead_0",
        )  # (B, 1, D)
    if config.classifier != "unpooled":
        x = PoolTokens("gap" if config.classifier == "gap" else "token", name="pool")(x)  # (B, D)
    if config.representation_size is not None:
        x = TokenDense(
            config.representation_size, activation="tanh", kernel_initializer="lecun_normal", name="pre_logits"
        )(x)
    if num_classes:
        x = TokenDense(num_classes, kernel_initializer="zeros", name="head")(x)  # (B, classes)
    return keras.Model(images, x, name=name)


def encoder_block(
    x,
    *,
    num_heads: int,
    mlp_dim: int,
    gelu: str,
    epsilon: float,
    dropout_rate: float,
    attention_dropout_rate: float,
    stochastic_depth_rate: float,
    name: str,
):
    """Equations 2 and 3: attention and MLP, each behind a LayerNorm and a residual. (B, N, D) -> (B, N, D)."""
    y = layer_norm(x, epsilon, f"{name}.LayerNorm_0")
    y = attention(y, y, num_heads, attention_dropout_rate, f"{name}.MultiHeadDotProductAttention_1")
    y = dropout(y, dropout_rate, f"{name}.dropout")
    y = stochastic_depth(y, stochastic_depth_rate, f"{name}.stochastic_depth_0")
    x = keras.layers.Add(name=f"{name}.residual")([x, y])

    y = layer_norm(x, epsilon, f"{name}.LayerNorm_2")
    y = mlp(y, mlp_dim, gelu, dropout_rate, f"{name}.MlpBlock_3")
    y = stochastic_depth(y, stochastic_depth_rate, f"{name}.stochastic_depth_1")
    return keras.layers.Add(name=name)([x, y])


def attention(query_tokens, tokens, num_heads: int, dropout_rate: float, name: str):
    """Multi-head attention of query_tokens (B, N, D) over tokens (B, M, D), all four projections with bias."""
    width = tokens.shape[-1]
    query = TokenDense(width, name=f"{name}.query")(query_tokens)
    key = TokenDense(width, name=f"{name}.key")(tokens)
    value = TokenDense(width, name=f"{name}.value")(tokens)
    y = DotProductAttention(num_heads, dropout_rate, name=name)(query, key, value)  # (B, N, D)
    return TokenDense(width, name=f"{name}.out")(y)


def mlp(x, mlp_dim: int, gelu: str, dropout_rate: float, name: str):
    """Two dense layers with GELU between them, dropout after each: (B, N, D) -> (B, N, M) -> (B, N, D)."""
    width = x.shape[-1]
    x = TokenDense(mlp_dim, activation=f"gelu_{gelu}", bias_stddev=1e-6, name=f"{name}.Dense_0")(x)  # (B, N, M)
    x = dropout(x, dropout_rate, f"{name}.dropout_0")
    x = TokenDense(width, bias_stddev=1e-6, name=f"{name}.Dense_1")(x)  # (B, N, D)
    return dropout(x, dropout_rate, f"{name}.dropout_1")


def attention_pooling(tokens, *, num_heads: int, mlp_dim: int, gelu: str, epsilon: float, name: str):
    """A learned probe attends to all tokens, then an MLP with residual: (B, N, D) -> (B, 1, D)."""
    probe = Probe(name=name)(tokens)  # (B, 1, D)
    x = attention(probe, tokens, num_heads, 0.0, f"{name}.MultiHeadDotProductAttention_0")
    y = layer_norm(x, epsilon, f"{name}.LayerNorm_0")
    y = mlp(y, mlp_dim, gelu, 0.0, f"{name}.MlpBlock_0")
    return keras.layers.Add(name=f"{name}.residual")([x, y])


def layer_norm(x, epsilon: float, name: str):
    """LayerNorm over the width. flax adds 1e-6 to the variance; Keras' default of 1e-3 moves logits visibly."""
    return keras.layers.LayerNormalization(epsilon=epsilon, name=name)(x)


def dropout(x, rate: float, name: str):
    """Dropout, or nothing at all at rate 0."""
    return keras.layers.Dropout(rate, name=name)(x) if rate else x


def stochastic_depth(x, rate: float, name: str):
    """Drops the whole residual branch of an example with probability `rate`, scaling the others by 1 / (1 - rate)."""
    return keras.layers.Dropout(rate, noise_shape=(None, 1, 1), name=name)(x) if rate else x

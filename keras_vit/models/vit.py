"""The Vision Transformer, top to bottom: patches, prefix tokens, positions, encoder blocks, head.

Paper: "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 3.1, equations 1 to 4, and appendix B.1 for dropout.
Agrees with vit_jax `models_vit.py` to float rounding; attention pooling is that of big_vision `models/vit.py`.
Layers bear the names of the released checkpoints, with "." for "/", so the name of a layer is the path of its weights.

Axes: B batch, h rows and w columns of patches, N tokens, D width, M width of the MLP.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models import layers
from keras_vit.models.attention import attention, axis_attention
from keras_vit.models.config import ConvStem, ShiftedPatches, TaskConfig, ViTConfig
from keras_vit.models.image_model import ImageModel
from keras_vit.models.positions import PositionEmbedding, PositionEmbedding2D, SinCosPositions
from keras_vit.models.resnet import resnet

_POSITIONS = {"learned": PositionEmbedding, "learned-2d": PositionEmbedding2D, "sincos-2d": SinCosPositions}


def vision_transformer(
    config: ViTConfig, preprocessing: Preprocessing, num_classes: int | None, name: str
) -> keras.Model:
    """The model as a functional keras.Model: images (B, height, width, channels) in [-1, 1] -> logits (B, classes).

    Without classes, the output is the features (B, D) or, unpooled, (B, N, D). Called by `keras_vit.build`.
    """
    images, x = image_and_patches(config, preprocessing)
    x = encoder(x, config, config.grid(preprocessing.image_size))  # (B, N, D)
    if config.norm_after_pooling:
        x = layers.PoolTokens("gap", config.num_prefix_tokens, name="pool")(x)  # (B, D)
    x = tokens = last_norm(x, config)
    if config.classifier == "none":
        return ImageModel(images, x, name=name)

    if config.classifier == "map":
        x = attention_pooling(x, config, "MAPHead_0")  # (B, 1, D)
    if config.classifier == "sequence":
        x = layers.WeightedMean(name="pool")(x, layers.TokenDense(1, name="SequencePool_0")(x))  # (B, D)
    elif config.classifier != "unpooled" and not config.norm_after_pooling:
        kind = "token" if config.classifier == "map" else config.classifier
        x = layers.PoolTokens(kind, config.num_prefix_tokens, name="pool")(x)  # (B, D), token+gap: (B, 2 D)
    if config.representation_size is not None:
        is_tanh = config.representation == "tanh"
        activation, width = "tanh" if is_tanh else None, config.representation_size
        x = layers.TokenDense(width, activation, "lecun_normal", use_bias=is_tanh, name="pre_logits")(x)
    if config.normalized:
        x = keras.layers.UnitNormalization(name="normalized")(x)
    x = head(x, config, num_classes, "head")  # (B, classes)
    if config.distillation == "head":
        second = layers.PoolTokens("second", name="pool_distillation")(tokens)
        second = head(second, config, num_classes, "head_distillation")
        x = keras.layers.Average(name="mean_of_heads")([x, second])
    return ImageModel(images, x, name=name)


def last_norm(x, config: ViTConfig):
    """The LayerNorm after the last block, in models that have one."""
    return layer_norm(x, config.layer_norm_epsilon, "Transformer.encoder_norm") if config.final_norm else x


def head(features, config: ViTConfig, num_classes: int | None, name: str):
    """Features (..., D) -> logits (..., classes); the features themselves without classes."""
    if not num_classes:
        return features
    return layers.TokenDense(num_classes, kernel_initializer="zeros", use_bias=config.head_bias, name=name)(features)


def image_and_patches(config: ViTConfig, preprocessing: Preprocessing, task: TaskConfig | None = None):
    """Return the input (B, height, width, channels) and its embedded patches (B, h * w, D)."""
    rows, columns = config.grid(preprocessing.image_size)
    images, x = layers.image_input(config, preprocessing, task)
    if isinstance(config.stem, ConvStem):
        x = conv_stem(x, config.stem)
    elif isinstance(config.stem, ShiftedPatches):
        x = ShiftAndCut(config.stem.patch_size, name="shifted")(x)
        x = layer_norm(x, config.layer_norm_epsilon, "shifted_norm")
    elif config.stem is not None:
        x = resnet(x, config.stem)  # (B, rows, columns, channels) of the feature map

    # Early convolutions end with a 1x1 convolution, initially normal (torchvision).
    kernel = keras.initializers.RandomNormal(stddev=(2.0 / config.hidden_size) ** 0.5)
    x = keras.layers.Conv2D(
        config.hidden_size,
        config.patch,
        strides=config.patch,
        data_format=layers.CHANNELS_LAST,
        use_bias=config.patch_bias,
        kernel_initializer=kernel if isinstance(config.stem, ConvStem) else "lecun_normal",
        name="embedding",
    )(x)  # (B, h, w, D)
    return images, keras.layers.Reshape((rows * columns, config.hidden_size), name="patches")(x)


def encoder(x, config: ViTConfig, grid: tuple[int, int]):
    """Prefix tokens, positions and all blocks, but not the last LayerNorm: (B, h * w, D) -> (B, N, D)."""
    add_positions = position_adder(config, grid)
    return encoder_blocks(embedded_tokens(x, config, add_positions), config, grid, add_positions)


def encoder_blocks(x, config: ViTConfig, grid: tuple[int, int], add_positions: Callable, attention_bias=None):
    """All blocks, but not the last LayerNorm: (B, N, D) -> (B, N, D). The bias is that of `encoder_block`."""
    for layer, depth_rate in enumerate(depth_rates(config)):
        block = f"Transformer.encoderblock_{layer}"
        if config.position_injection != "input":
            x = add_positions(x, f"{block}.posembed_input")
        if config.axial:
            x = encoder_block(x, config, depth_rate, f"{block}.row", axis="row", grid=grid)
            x = encoder_block(x, config, depth_rate, f"{block}.column", axis="column", grid=grid)
        else:
            x = encoder_block(x, config, depth_rate, block, grid=grid, attention_bias=attention_bias)
    return x


def depth_rates(config: ViTConfig) -> list[float]:
    """The rate of stochastic depth of each block."""
    return np.linspace(0.0, config.stochastic_depth_rate, config.num_layers).tolist()


def embedded_tokens(x, config: ViTConfig, add_positions: Callable):
    """The input of the first block, with prefix tokens and positions: (B, h * w, D) -> (B, N, D)."""
    at_input = config.position_injection == "input"
    if at_input and not config.prefix_positions:
        x = add_positions(x, "Transformer.posembed_input")
    if config.distillation != "none":
        x = layers.InsertTokens(1, 0, name="distillation")(x)
    if config.has_class_token:
        x = layers.ClassToken(name="cls")(x)  # (B, 1 + h * w, D), with a distillation token (B, 2 + h * w, D)
    if at_input and config.prefix_positions:
        x = add_positions(x, "Transformer.posembed_input")
    if config.num_registers:
        x = layers.InsertTokens(config.num_registers, config.num_class_tokens, name="registers")(x)  # (B, N, D)
    x = dropout(x, config.dropout_rate, "Transformer.posembed_input.dropout")
    if config.pre_norm:
        x = layer_norm(x, config.layer_norm_epsilon, "Transformer.pre_norm")
    return x


def position_adder(config: ViTConfig, grid: tuple[int, int]):
    """Return a function (tokens, name) -> tokens with position embeddings. Shared embeddings use one layer."""
    if config.position_embedding not in _POSITIONS:
        return lambda tokens, name: tokens
    layer_class = _POSITIONS[config.position_embedding]
    if config.position_injection != "shared":
        return lambda tokens, name: layer_class(grid, config.num_prefix_positions, name=name)(tokens)
    layer = layer_class(grid, config.num_prefix_positions, name="Transformer.posembed_input")
    return lambda tokens, name: layer(tokens)


def encoder_block(
    x,
    config: ViTConfig,
    stochastic_depth_rate: float,
    name: str,
    axis: str | None = None,
    *,
    grid: tuple[int, int],
    attention_bias=None,
):
    """Equations 2 and 3: attention and MLP, each with a LayerNorm and a residual connection. (B, N, D) -> (B, N, D).

    With an axis, attention is computed within each row or column of the grid. An attention bias, without axis, is added
    to the attention logits (B, H, N, N).
    """
    y = layer_norm(x, config.layer_norm_epsilon, f"{name}.LayerNorm_0")
    rotary = {
        "grid": grid,
        "reference": config.rotary_reference,
        "offset": config.rotary_offset,
        "columns_first": config.rotary_columns_first,
    }
    options: dict[str, Any] = {
        "num_heads": config.num_heads,
        "dropout_rate": config.attention_dropout_rate,
        "bias": config.qkv_bias,
        "key_bias": config.key_bias,
        "relative": config.position_embedding == "relative",
        "locality": config.locality_attention,
        "rotary": rotary if config.is_rotary else None,
        "norm_epsilon": config.layer_norm_epsilon if config.attention_norm else None,
        "name": f"{name}.MultiHeadDotProductAttention_1",
    }
    if axis is None:
        y = attention(y, y, attention_bias=attention_bias, **options)
    else:
        y = axis_attention(y, axis, grid, **options)
    y = layer_scale(y, config.layer_scale, f"{name}.LayerScale_0")
    y = dropout(y, config.dropout_rate, f"{name}.dropout")
    y = stochastic_depth(y, stochastic_depth_rate, f"{name}.stochastic_depth_0")
    x = keras.layers.Add(name=f"{name}.residual")([x, y])

    y = layer_norm(x, config.layer_norm_epsilon, f"{name}.LayerNorm_2")
    inner = config.layer_norm_epsilon if config.mlp_norm else None
    sizes = config.mlp_dim, config.gelu, config.dropout_rate
    y = mlp(y, *sizes, f"{name}.MlpBlock_3", gated=config.gated_mlp, norm_epsilon=inner)
    y = layer_scale(y, config.layer_scale, f"{name}.LayerScale_1")
    y = stochastic_depth(y, stochastic_depth_rate, f"{name}.stochastic_depth_1")
    return keras.layers.Add(name=name)([x, y])


def mlp(
    x,
    mlp_dim: int,
    gelu: str,
    dropout_rate: float,
    name: str,
    *,
    gated: bool = False,
    norm_epsilon: float | None = None,
):
    """Two dense layers with GELU between them, dropout after each: (B, N, D) -> (B, N, M) -> (B, N, D).

    With a gate, the hidden layer is GELU(gate) * value, of two dense layers. With an epsilon, a LayerNorm follows it.
    """
    width, activation = x.shape[-1], gelu if gelu == "silu" else f"gelu_{gelu}"
    value = layers.TokenDense(mlp_dim, None if gated else activation, bias_stddev=1e-6, name=f"{name}.Dense_0")(x)
    if gated:
        gate = layers.TokenDense(mlp_dim, activation, bias_stddev=1e-6, name=f"{name}.gate")(x)  # (B, N, M)
        value = keras.layers.Multiply(name=f"{name}.gated")([gate, value])
    x = dropout(value, dropout_rate, f"{name}.dropout_0")
    x = x if norm_epsilon is None else layer_norm(x, norm_epsilon, f"{name}.norm")
    x = layers.TokenDense(width, bias_stddev=1e-6, name=f"{name}.Dense_1")(x)  # (B, N, D)
    return dropout(x, dropout_rate, f"{name}.dropout_1")


def attention_pooling(tokens, config: ViTConfig, name: str):
    """A learned probe attends to all tokens, then an MLP with residual: (B, N, D) -> (B, 1, D)."""
    probe = layers.Probe(name=name)(tokens)  # (B, 1, D)
    heads = config.pool_heads or config.num_heads
    x = attention(probe, tokens, num_heads=heads, name=f"{name}.MultiHeadDotProductAttention_0")
    y = layer_norm(x, config.layer_norm_epsilon, f"{name}.LayerNorm_0")
    y = mlp(y, config.pool_mlp_dim or config.mlp_dim, config.gelu, 0.0, f"{name}.MlpBlock_0")
    return keras.layers.Add(name=f"{name}.residual")([x, y])


def layer_norm(x, epsilon: float, name: str):
    """LayerNorm over the width. flax adds 1e-6 to the variance; the Keras default of 1e-3 changes the logits."""
    return keras.layers.LayerNormalization(epsilon=epsilon, name=name)(x)


def layer_scale(x, initial: float | None, name: str):
    """A learned factor for each channel; no layer without an initial value."""
    return x if initial is None else layers.LayerScale(initial, name=name)(x)


def dropout(x, rate: float, name: str):
    """Dropout; no layer for rate 0."""
    return keras.layers.Dropout(rate, name=name)(x) if rate else x


def stochastic_depth(x, rate: float, name: str):
    """Drop the residual branch of an example with probability `rate` and scale the others by 1 / (1 - rate)."""
    return keras.layers.Dropout(rate, noise_shape=(None, 1, 1), name=name)(x) if rate else x


def conv_stem(x, stem: ConvStem):
    """Images (B, h, w, C) -> feature map (B, h / s, w / s, c): convolution, BatchNorm and ReLU for each layer."""
    # torch's default for a convolution: uniform within 1 / sqrt(fan_in).
    kernel = keras.initializers.VarianceScaling(1 / 3, mode="fan_in", distribution="uniform")
    for layer, (filters, size, strides) in enumerate(zip(stem.channels, stem.kernel_sizes, stem.strides, strict=True)):
        name = f"conv_stem.{layer}"
        x = keras.layers.ZeroPadding2D(size // 2, data_format=layers.CHANNELS_LAST, name=f"{name}.padding")(x)
        x = keras.layers.Conv2D(
            filters,
            size,
            strides=strides,
            data_format=layers.CHANNELS_LAST,
            use_bias=False,
            kernel_initializer=kernel,
            name=f"{name}.conv",
        )(x)
        x = keras.layers.BatchNormalization(momentum=0.9, epsilon=stem.batch_norm_epsilon, name=f"{name}.batch_norm")(x)
        x = keras.layers.ReLU(name=name)(x)
    return x


@keras.saving.register_keras_serializable(layers.PACKAGE)
class ShiftAndCut(keras.layers.Layer):
    """Shifted patches: (B, h, w, C) -> (B, h / P, w / P, P * P * 5 C), pixels row by row.

    The channels of a pixel are those of the image, then of its copies shifted by P // 2 pixels to the upper left, upper
    right, lower left and lower right; what enters at the border is 0. P, the patch size, divides h and w.
    """

    def __init__(self, patch_size: int, **kwargs):
        super().__init__(**kwargs)
        self.patch_size = patch_size

    def call(self, images):
        (height, width), size, half = images.shape[1:3], self.patch_size, self.patch_size // 2
        padded = ops.pad(images, ((0, 0), (half, half), (half, half), (0, 0)))
        corners = [(2 * half, 2 * half), (2 * half, 0), (0, 2 * half), (0, 0)]  # first row and column of a copy
        copies = [padded[:, row : row + height, column : column + width] for row, column in corners]
        x = ops.concatenate([images, *copies], axis=-1)  # (B, h, w, 5 C)
        rows, columns, channels = height // size, width // size, x.shape[-1]
        x = ops.reshape(x, (-1, size, columns, size * channels))  # at most four axes, for TFLite
        x = ops.transpose(x, (0, 2, 1, 3))  # (B * h / P, w / P, P, P * 5 C)
        return ops.reshape(x, (-1, rows, columns, size * size * channels))

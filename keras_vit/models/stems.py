"""Stems before the patches: a post-activation ResNet (hybrids, AxialResNet), convolutions, shifted patches.

ResNet: "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 4.1. Agrees with vit_jax `models_resnet.py`. It is
not the BiT network (`bit.py`): norms follow the convolutions, padding is TensorFlow's "same", asymmetric at stride 2,
and 1e-5 is added to the kernel's deviation, not to its variance.
Layers bear the names of the released checkpoints, with "." for "/".

Axes: B batch, h rows, w columns, C channels.
"""

import dataclasses

import keras
from keras import ops

from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.attention import axis_attention
from keras_vit.models.config import ConvStem, ResNetConfig, config_to_dict
from keras_vit.models.image_model import ImageModel
from keras_vit.models.layers import CHANNELS_LAST, PACKAGE, ModelSpec, TokenDense, group_norm, standardized_conv


def resnet_classifier(
    config: ResNetConfig, preprocessing: Preprocessing, num_classes: int | None, name: str
) -> keras.Model:
    """The network with a head of its own: images (B, height, width, channels) in [-1, 1] -> logits (B, classes).

    Without classes it ends with the mean of the feature map (B, C). Called by `keras_vit.build`.
    """
    images = keras.Input((*preprocessing.image_size, preprocessing.channels), name="image")
    spec = {"model": config_to_dict(config), "preprocessing": dataclasses.asdict(preprocessing)}
    x = resnet(ModelSpec(**spec, name="spec")(images), config)
    x = keras.layers.GlobalAveragePooling2D(data_format=CHANNELS_LAST, name="pool")(x)  # (B, C)
    if num_classes:
        x = TokenDense(num_classes, kernel_initializer="zeros", name="head")(x)  # (B, classes)
    return ImageModel(images, x, name=name)


def resnet(x, config: ResNetConfig):
    """Images (B, h, w, C) -> feature map (B, h / s, w / s, c) at the network's stride s."""
    x = standardized_conv(x, config, config.root_channels, 7, 2, "same", "conv_root")
    x = keras.layers.ReLU(name="relu_root")(group_norm(x, config, "gn_root"))
    x = keras.layers.MaxPooling2D(3, 2, padding="same", data_format=CHANNELS_LAST, name="resnet_root")(x)
    for stage, units in enumerate(config.block_units):
        for unit in range(units):
            strides = 2 if stage > 0 and unit == 0 else 1
            x = bottleneck(x, config, config.output_channels[stage], strides, f"block{stage + 1}.unit{unit + 1}")
    return x


def bottleneck(x, config: ResNetConfig, channels: int, strides: int, name: str):
    """One unit: 1x1, 3x3, 1x1, each followed by GroupNorm; ReLU between them and after the shortcut is added."""
    shortcut = x
    if x.shape[-1] != channels or strides > 1:
        shortcut = standardized_conv(x, config, channels, 1, strides, "same", f"{name}.conv_proj")
        shortcut = group_norm(shortcut, config, f"{name}.gn_proj")
    h = standardized_conv(x, config, channels // 4, 1, 1, "same", f"{name}.conv1")
    h = keras.layers.ReLU(name=f"{name}.relu1")(group_norm(h, config, f"{name}.gn1"))
    if config.axial_heads is None:
        h = standardized_conv(h, config, channels // 4, 3, strides, "same", f"{name}.conv2")
    else:
        h = axial_attention(h, config.axial_heads, strides, name)
    h = keras.layers.ReLU(name=f"{name}.relu2")(group_norm(h, config, f"{name}.gn2"))
    h = standardized_conv(h, config, channels, 1, 1, "same", f"{name}.conv3")
    h = group_norm(h, config, f"{name}.gn3", scale="zeros")  # at first the unit is the identity
    return keras.layers.ReLU(name=name)(keras.layers.Add(name=f"{name}.residual")([shortcut, h]))


def axial_attention(x, num_heads: int, strides: int, name: str):
    """Attention along the rows, then the columns, with relative positions, in the place of a 3x3 convolution.

    Appendix D.6 of the paper, which does not say where the stride goes: here a mean over windows follows (as in
    Axial-DeepLab, arXiv 2003.07853).
    """
    _, rows, columns, channels = x.shape
    tokens = keras.layers.Reshape((rows * columns, channels), name=f"{name}.tokens")(x)
    for axis in ("row", "column"):
        tokens = axis_attention(
            tokens, axis, (rows, columns), num_heads=num_heads, relative=True, name=f"{name}.{axis}_attention"
        )
    x = keras.layers.Reshape((rows, columns, channels), name=f"{name}.map")(tokens)
    if strides == 1:
        return x
    pooling = keras.layers.AveragePooling2D(strides, padding="same", data_format=CHANNELS_LAST, name=f"{name}.mean")
    return pooling(x)


def conv_stem(x, stem: ConvStem):
    """Images (B, h, w, C) -> feature map (B, h / s, w / s, c): convolution, BatchNorm and ReLU for each layer."""
    # torch's default for a convolution: uniform within 1 / sqrt(fan_in).
    kernel = keras.initializers.VarianceScaling(1 / 3, mode="fan_in", distribution="uniform")
    for layer, (filters, size, strides) in enumerate(zip(stem.channels, stem.kernel_sizes, stem.strides, strict=True)):
        name = f"conv_stem.{layer}"
        x = keras.layers.ZeroPadding2D(size // 2, data_format=CHANNELS_LAST, name=f"{name}.padding")(x)
        x = keras.layers.Conv2D(
            filters,
            size,
            strides=strides,
            data_format=CHANNELS_LAST,
            use_bias=False,
            kernel_initializer=kernel,
            name=f"{name}.conv",
        )(x)
        x = keras.layers.BatchNormalization(momentum=0.9, epsilon=stem.batch_norm_epsilon, name=f"{name}.batch_norm")(x)
        x = keras.layers.ReLU(name=name)(x)
    return x


@keras.saving.register_keras_serializable(PACKAGE)
class ShiftAndCut(keras.layers.Layer):
    """Shifted patches: (B, h, w, C) -> (B, h / P, w / P, P * P * 5 C), pixels row by row.

    The channels of a pixel are those of the image, then of its copies shifted by P // 2 pixels to the upper left, upper
    right, lower left and lower right; what enters at the border is 0.

    Args:
        patch_size: P, a divisor of h and w.
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

"""ResNets: BiT's, and the post-activation one of hybrids and AxialResNets.

Post-activation: "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 4.1; agrees with vit_jax
`models_resnet.py`. Norms follow the convolutions, padding is TensorFlow's "same", asymmetric at stride 2, and 1e-5 is
added to the kernel's deviation, not to its variance.
BiT ResNet-v2: "Big Transfer" (arXiv 1912.11370); pre-activation bottlenecks, GroupNorm, standardized convolutions.
Agrees with big_transfer `bit_pytorch/models.py` and `bit_jax/models.py`.
Layers bear the names of the released checkpoints, with "." for "/".

Axes: B batch, h rows, w columns, C channels.
"""

import keras

from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.attention import axis_attention
from keras_vit.models.config import ResNetConfig
from keras_vit.models.image_model import ImageModel
from keras_vit.models.layers import CHANNELS_LAST, TokenDense, group_norm, image_input, standardized_conv


def resnet_classifier(
    config: ResNetConfig, preprocessing: Preprocessing, num_classes: int | None, name: str
) -> keras.Model:
    """The network with a head of its own: images (B, height, width, channels) in [-1, 1] -> logits (B, classes).

    Without classes it ends with the mean of the feature map (B, C). Called by `keras_vit.build`.
    """
    images, x = image_input(config, preprocessing)
    x = resnet(x, config)
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


def big_transfer(config: ResNetConfig, preprocessing: Preprocessing, num_classes: int | None, name: str) -> keras.Model:
    """The model as a functional keras.Model: images (B, height, width, channels) in [-1, 1] -> logits (B, classes).

    Without classes, the output is the features (B, 2048 * width). Called by `keras_vit.build`.
    """
    images, x = image_input(config, preprocessing)
    x = keras.layers.ZeroPadding2D(3, data_format=CHANNELS_LAST, name="resnet.root_block.padding")(x)
    root = "resnet.root_block.standardized_conv2d"
    x = standardized_conv(x, config, config.root_channels, 7, 2, "valid", root)  # (B, h / 2, w / 2, 64 * width)
    # There is no ReLU before this pooling, so its padding must be zeros: padding with -inf gives other numbers.
    x = keras.layers.ZeroPadding2D(1, data_format=CHANNELS_LAST, name="resnet.root_block.pool_padding")(x)
    x = keras.layers.MaxPooling2D(3, 2, data_format=CHANNELS_LAST, name="resnet.root_block")(x)  # (B, h / 4, w / 4, …)

    for stage, units in enumerate(config.block_units):
        for unit in range(units):
            strides = 2 if stage > 0 and unit == 0 else 1
            x = pre_activation_bottleneck(
                x, config, config.output_channels[stage], strides, f"resnet.block{stage + 1}.unit{unit + 1:02d}"
            )

    x = keras.layers.ReLU(name="resnet.relu")(group_norm(x, config, "resnet.group_norm"))
    x = keras.layers.GlobalAveragePooling2D(data_format=CHANNELS_LAST, name="pool")(x)  # (B, 2048 * width)
    if num_classes:
        x = TokenDense(num_classes, kernel_initializer="zeros", name="resnet.head.conv2d")(x)  # (B, classes)
    return ImageModel(images, x, name=name)


def pre_activation_bottleneck(x, config: ResNetConfig, channels: int, strides: int, name: str):
    """One unit: 1x1, 3x3, 1x1, each behind GroupNorm and ReLU; the shortcut is x, or projects what the first sees."""
    h = keras.layers.ReLU(name=f"{name}.a.relu")(group_norm(x, config, f"{name}.a.group_norm"))
    shortcut = x
    if x.shape[-1] != channels or strides > 1:
        shortcut = standardized_conv(h, config, channels, 1, strides, "valid", f"{name}.a.proj.standardized_conv2d")
    h = standardized_conv(h, config, channels // 4, 1, 1, "valid", f"{name}.a.standardized_conv2d")

    h = keras.layers.ReLU(name=f"{name}.b.relu")(group_norm(h, config, f"{name}.b.group_norm"))
    h = keras.layers.ZeroPadding2D(1, data_format=CHANNELS_LAST, name=f"{name}.b.padding")(h)
    h = standardized_conv(h, config, channels // 4, 3, strides, "valid", f"{name}.b.standardized_conv2d")

    h = keras.layers.ReLU(name=f"{name}.c.relu")(group_norm(h, config, f"{name}.c.group_norm"))
    h = standardized_conv(h, config, channels, 1, 1, "valid", f"{name}.c.standardized_conv2d")
    return keras.layers.Add(name=name)([h, shortcut])

"""The inference model: the model for exports, with baked convolutions, one dtype, and no training-only parts."""

from collections.abc import Collection

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_vit.errors import UserError
from keras_vit.models.attention import DotProductAttention, split_heads
from keras_vit.models.build import calling_class_token_only, class_token_only
from keras_vit.models.layers import StandardizedConv2D, TokenDense, gelu_erf, no_init_weights


def in_dtype(model: keras.Model, dtype: str) -> keras.Model:
    """The model with all weights and arithmetic in "float32" or "bfloat16"; the model itself if it already is.

    A model trained in mixed precision has float32 weights, so float32 is exact. Softmax and the statistics of the norms
    are always float32.
    """
    if all(layer.dtype_policy.name == dtype for layer in model.layers):
        return model
    return _rebuilt(model, dtype)


def inference_model(
    model: keras.Model,
    dtype: str = "float32",
    *,
    for_onnx: bool = False,
    for_tensorflow: bool = False,
    all_tokens: bool = False,
) -> keras.Model:
    """The model in one dtype, with standardized convolutions as ordinary ones. The outputs are equal up to rounding.

    The layers that the head reads only at the class token compute only this token; see
    `keras_vit.models.build.class_token_only`.

    Args:
        model: from `keras_vit.build`.
        dtype: "float32" or "bfloat16".
        for_onnx: replace operations that ONNX or ONNX Runtime compute wrongly; see _ErfDense, _NearlyZeroPadding.
        for_tensorflow: replace norms and attention by forms that TensorFlow computes faster on a CPU; see
            _OnePassNorm, _GroupNormByProducts, _OneProductAttention.
        all_tokens: compute all tokens, for intermediate outputs.
    """
    class_token = frozenset() if all_tokens else class_token_only(model)
    rewritten = for_onnx and any(_is_exact_gelu(layer) or _is_pool_padding(layer) for layer in model.layers)
    rewritten = rewritten or any(isinstance(layer, StandardizedConv2D) for layer in model.layers)
    if rewritten or for_tensorflow or class_token:
        return _rebuilt(
            model, dtype, bake=True, for_onnx=for_onnx, for_tensorflow=for_tensorflow, class_token=class_token
        )
    return in_dtype(model, dtype)


class _ErfDense(TokenDense):
    """A dense layer with exact GELU as 0.5 x (1 + erf(x / sqrt 2)).

    The GELU of TensorFlow uses erfc. ONNX has no such operator, but tf2onnx writes one.
    """

    def call(self, tokens):
        x = super().call(tokens)
        return 0.5 * x * (1.0 + ops.erf(x * 0.5**0.5))


class _NearlyZeroPadding(keras.layers.ZeroPadding2D):
    """Padding before a max pooling with 1e-30 instead of zeros.

    ONNX Runtime (1.31) merges padding with exact zeros into the pooling, where padding is never the maximum.
    """

    def call(self, images):
        return ops.pad(images, ((0, 0), *self.padding, (0, 0)), constant_values=1e-30)


def _is_exact_gelu(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, TokenDense) and layer.activation is gelu_erf


def _is_pool_padding(layer: keras.layers.Layer) -> bool:
    return layer.name == "resnet.root_block.pool_padding"


class _OnePassNorm(keras.layers.LayerNormalization):
    """LayerNorm of tokens (B, N, D) in a form that TensorFlow with oneDNN computes in one pass instead of five.

    The graph optimizer matches a batch norm of one image with tokens as channels, constants after it, and one shared
    tensor "empty". It matches another form too, but replaces its epsilon by 1e-3. Without the optimizer, the statistics
    of bfloat16 tokens are float32 too.
    """

    def set_constants(self, gamma: np.ndarray, beta: np.ndarray) -> None:
        """Set the scale and the offset (D,)."""
        self._constants = gamma, beta

    def call(self, tokens):
        gamma, beta = (ops.convert_to_tensor(constant, self.compute_dtype) for constant in self._constants)
        shape = tf.shape(tokens)
        rows, empty = shape[0] * shape[1], tf.constant([], tf.float32)
        normalized = tf.raw_ops.FusedBatchNormV3(
            x=tf.reshape(tokens, (1, rows, shape[2], 1)),
            scale=tf.fill([rows], 1.0),
            offset=tf.fill([rows], 0.0),
            mean=empty,
            variance=empty,
            epsilon=self.epsilon,
            data_format="NCHW",
            is_training=True,
        )
        return tf.reshape(normalized.y, shape) * gamma + beta


class _GroupNormByProducts(keras.layers.GroupNormalization):
    """GroupNorm of feature maps (B, H, W, C) with means over the pixels as matrix products.

    TensorFlow is slow at sums over axes other than the first and the last ones. The statistics are always float32.
    """

    def call(self, images):
        pixels, channels = images.shape[1] * images.shape[2], images.shape[3]
        x = tf.cast(tf.reshape(images, (-1, pixels, channels)), tf.float32)  # (B, H * W, C)
        over_pixels = tf.fill((tf.shape(x)[0], 1, pixels), 1.0 / pixels)

        def group_means(means):
            """Replace means of channels (B, 1, C) by the means of their groups."""
            means = tf.reduce_mean(tf.reshape(means, (-1, self.groups, channels // self.groups)), 2, keepdims=True)
            return tf.reshape(tf.repeat(means, channels // self.groups, axis=2), (-1, 1, channels))

        mean = group_means(tf.matmul(over_pixels, x))
        variance = group_means(tf.matmul(over_pixels, tf.math.squared_difference(x, mean)))
        scale = tf.math.rsqrt(variance + self.epsilon) * tf.cast(self.gamma, tf.float32)
        x = x * scale + (tf.cast(self.beta, tf.float32) - scale * mean)
        return tf.cast(tf.reshape(x, tf.shape(images)), self.compute_dtype)


class _OneProductAttention(DotProductAttention):
    """Attention with queries scaled by the weights of the layer before, see _rebuilt.

    The product transposes the key, without a separate operation. The bfloat16 softmax of oneDNN computes in float32;
    that of TensorFlow without oneDNN is within 0.5 %.
    """

    scaled = True

    def key_heads(self, key):
        return split_heads(key, self.num_heads)

    def probabilities(self, query, key, offset_logits=None):
        return tf.nn.softmax(tf.matmul(query, key, transpose_b=True))


def _is_norm(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, keras.layers.LayerNormalization) and len(layer.input.shape) == 3


def _rebuilt(
    model: keras.Model,
    dtype: str,
    *,
    bake: bool = False,
    for_onnx: bool = False,
    for_tensorflow: bool = False,
    class_token: Collection[str] = (),
) -> keras.Model:
    """A copy with the same layer names, where the layers in `class_token` compute only the class token."""
    if any(layer.quantization_mode for layer in model.layers):
        raise UserError(
            f"The model {model.name!r} is quantized by Keras, which exports do not support; export the model from "
            "before `quantize`, and use a quantized format of the export."
        )
    names = {layer.name for layer in model.layers}

    def is_baked(layer: keras.layers.Layer) -> bool:
        return bake and isinstance(layer, StandardizedConv2D)

    def one_pass(layer: keras.layers.Layer) -> bool:
        return for_tensorflow and _is_norm(layer)

    def one_product(layer: keras.layers.Layer) -> bool:
        # Relative positions read the query too, and scale it themselves.
        return for_tensorflow and isinstance(layer, DotProductAttention) and f"{layer.name}.relative" not in names

    scaled = {f"{layer.name}.query": layer for layer in model.layers if one_product(layer)}

    def copied(layer: keras.layers.Layer) -> keras.layers.Layer:
        if is_baked(layer):
            return keras.layers.Conv2D(
                layer.filters,
                layer.kernel_size,
                layer.strides,
                layer.padding,
                data_format="channels_last",
                use_bias=False,
                kernel_initializer="zeros",
                dtype=dtype,
                name=layer.name,
            )
        config = {**layer.get_config(), "dtype": dtype}
        config.pop("lora_rank", None), config.pop("lora_alpha", None)
        if one_pass(layer):
            return _OnePassNorm(epsilon=layer.epsilon, scale=False, center=False, dtype=dtype, name=layer.name)
        if for_tensorflow and isinstance(layer, keras.layers.GroupNormalization):
            return _GroupNormByProducts.from_config(config)
        if one_product(layer):
            return _OneProductAttention.from_config(config)
        if for_onnx and _is_exact_gelu(layer):
            return _ErfDense.from_config({**config, "activation": None})
        if for_onnx and _is_pool_padding(layer):
            return _NearlyZeroPadding.from_config(config)
        return type(layer).from_config(config)

    with no_init_weights():
        copy = keras.models.clone_model(
            model, clone_function=copied, call_function=calling_class_token_only(class_token)
        )
    for layer in model.layers:
        weights = [np.asarray(weight.value) for weight in layer.weights]
        if isinstance(layer, TokenDense) and layer.lora_enabled:
            weights = [np.asarray(weight) for weight in (layer.kernel, layer.bias) if weight is not None]
        if is_baked(layer):
            weights = [standardized(layer, weights[0])]
        elif one_pass(layer):
            copy.get_layer(layer.name).set_constants(*weights)
            weights = []
        elif layer.name in scaled:
            factor = (layer.units // scaled[layer.name].num_heads) ** -0.5
            weights = [(weight.astype(np.float64) * factor).astype(np.float32) for weight in weights]
        copy.get_layer(layer.name).set_weights(weights)
    return copy


def standardized(layer: StandardizedConv2D, kernel: np.ndarray) -> np.ndarray:
    """The standardized kernel (h, w, in, out) float32 of a layer."""
    centered = kernel - kernel.mean(axis=(0, 1, 2), dtype=np.float64)
    deviation = np.sqrt(np.mean(np.square(centered), axis=(0, 1, 2)) + layer.variance_epsilon)
    return (centered / (deviation + layer.deviation_epsilon)).astype(np.float32)

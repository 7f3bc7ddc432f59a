"""The inference model: the model for exports, with baked convolutions, one dtype, and no training-only parts."""

import re
from collections.abc import Callable, Collection

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from export.token_merging import calling_with_merged_tokens
from keras_vit.checkpoints.load import check_not_quantized
from keras_vit.models.attention import DotProductAttention, split_heads
from keras_vit.models.build import calling_class_token_only, class_token_only
from keras_vit.models.layers import Activation, StandardizedConv2D, TokenDense, gelu_erf, no_init_weights


def in_dtype(model: keras.Model, dtype: str) -> keras.Model:
    """The model with all weights and arithmetic in "float32" or "bfloat16"; the model itself if it already is.

    A model trained in mixed precision has float32 weights, so float32 is exact. Softmax and the statistics of the norms
    are always float32.
    """
    if all(layer.dtype_policy.name == dtype for layer in model.layers):
        return model
    return rebuilt(model, _Layers(model, dtype))


def float32_copy(model: keras.Model) -> keras.Model:
    """A model of its own with the same layers in float32, adapters of LoRA merged into their kernels."""
    return rebuilt(model, _Layers(model, "float32"))


def inference_model(
    model: keras.Model,
    dtype: str = "float32",
    *,
    for_onnx: bool = False,
    for_tensorflow: bool = False,
    all_tokens: bool = False,
    merge_tokens: int = 0,
) -> keras.Model:
    """The model in one dtype, with standardized convolutions as ordinary ones. The outputs are equal up to rounding.

    The layers that the head reads only at the class token compute only this token; see
    `keras_vit.models.build.class_token_only`.

    Args:
        model: from `keras_vit.build`.
        dtype: "float32" or "bfloat16".
        for_onnx: replace operations that ONNX or ONNX Runtime compute wrongly or slowly; see _OnnxLayers.
        for_tensorflow: replace norms and attention by forms that TensorFlow computes faster on a CPU; see
            _TensorFlowLayers.
        all_tokens: compute all tokens, for intermediate outputs.
        merge_tokens: patch tokens to merge in each block, see `token_merging`; 0 for none.
    """
    factory = _OnnxLayers if for_onnx else _TensorFlowLayers if for_tensorflow else InferenceLayers
    class_token = frozenset() if all_tokens else class_token_only(model)
    return rebuilt(model, factory(model, dtype), class_token, merge_tokens)


def rebuilt(
    model: keras.Model,
    factory: "_Layers",
    class_token: Collection[str] = (),
    merge_tokens: int = 0,
    left_out: Collection[str] = (),
) -> keras.Model:
    """Connect the factory's layers as the model's are, those in `class_token` for the class token alone.

    Layers in `left_out` become the identity of their first input.
    """
    check_not_quantized(model)
    call = calling_class_token_only(class_token)
    if merge_tokens:
        call = calling_with_merged_tokens(model, merge_tokens, call)
    if left_out:
        call = _calling_without(left_out, call)
    with no_init_weights():
        copy = keras.models.clone_model(model, clone_function=factory.layer, call_function=call)
    names = {layer.name for layer in copy.layers}
    for layer in model.layers:
        if layer.name in names or not left_out:
            copy.get_layer(layer.name).set_weights(factory.weights(layer))
    return copy


def inner_blocks(model: keras.Model) -> frozenset[str]:
    """Names of the layers between the first and the last block of a Vision Transformer; empty for other models."""
    found = {layer.name: re.match(r"Transformer\.encoderblock_(\d+)(\.|$)", layer.name) for layer in model.layers}
    blocks = {name: int(match[1]) for name, match in found.items() if match}
    return frozenset(name for name, block in blocks.items() if 0 < block < max(blocks.values()))


def _calling_without(names: Collection[str], call: Callable) -> Callable:
    def call_or_skip(layer, *inputs, **options):
        return keras.tree.flatten(inputs)[0] if layer.name in names else call(layer, *inputs, **options)

    return call_or_skip


class _Layers:
    """Makes layers of the same names and weights, in one dtype. Adapters of LoRA are merged into their kernels."""

    def __init__(self, model: keras.Model, dtype: str):
        self._layers = {layer.name: layer for layer in model.layers}
        self._dtype = dtype

    def layer(self, layer: keras.layers.Layer) -> keras.layers.Layer:
        if not isinstance(layer, keras.layers.Layer):
            return layer  # an operation of keras.ops, which has neither weights nor a dtype
        if isinstance(layer, keras.layers.Lambda):
            return layer  # Keras makes no function from a config
        return type(layer).from_config(self.config(layer))

    def config(self, layer: keras.layers.Layer) -> dict:
        config = {**layer.get_config(), "dtype": self._dtype}
        return {key: value for key, value in config.items() if key not in ("lora_rank", "lora_alpha")}

    def weights(self, layer: keras.layers.Layer) -> list[np.ndarray]:
        weights = layer.weights
        if getattr(layer, "lora_enabled", False):
            weights = [weight for weight in (layer.kernel, layer.bias) if weight is not None]
        return [np.asarray(weight) for weight in weights]


class InferenceLayers(_Layers):
    """Makes ordinary convolutions of the standardized ones."""

    def layer(self, layer):
        if not isinstance(layer, StandardizedConv2D):
            return super().layer(layer)
        return keras.layers.Conv2D(
            layer.filters,
            layer.kernel_size,
            layer.strides,
            layer.padding,
            data_format="channels_last",
            use_bias=False,
            kernel_initializer="zeros",
            dtype=self._dtype,
            name=layer.name,
        )

    def weights(self, layer):
        weights = super().weights(layer)
        if isinstance(layer, StandardizedConv2D):
            return [standardized(layer, *weights)]
        attention = self._layers.get(layer.name.removesuffix(".query"))
        if attention is layer or not self.takes_scaled_query(attention):
            return weights
        factor = (layer.units // attention.num_heads) ** -0.5
        return [(weight.astype(np.float64) * factor).astype(np.float32) for weight in weights]

    def takes_scaled_query(self, layer: keras.layers.Layer | None) -> bool:
        """Whether the factor 1 / sqrt(d) of an attention layer moves into the weights of its query."""
        return False


class _OnnxLayers(InferenceLayers):
    """Replaces GELU and one padding by operations that ONNX and ONNX Runtime compute correctly, and LayerNorm by a form
    that ONNX Runtime computes in one operation.
    """

    def layer(self, layer):
        if _is_full_norm(layer):
            return _StepByStepNorm.from_config(self.config(layer))
        if isinstance(layer, TokenDense) and layer.activation is gelu_erf:
            return _ErfDense.from_config({**self.config(layer), "activation": None})
        if isinstance(layer, Activation) and layer.gelu == "erf":
            return _ErfActivation.from_config(self.config(layer))
        if layer.name == "resnet.root_block.pool_padding":
            return _NearlyZeroPadding.from_config(self.config(layer))
        return super().layer(layer)


class _TensorFlowLayers(InferenceLayers):
    """Replaces norms and attention by forms that TensorFlow computes faster on a CPU."""

    def layer(self, layer):
        if _is_full_norm(layer) and len(layer.input.shape) == 3:
            return _OnePassNorm(epsilon=layer.epsilon, scale=False, center=False, dtype=self._dtype, name=layer.name)
        if isinstance(layer, keras.layers.GroupNormalization) and _is_full_group_norm(layer):
            return _GroupNormByProducts.from_config(self.config(layer))
        if self.takes_scaled_query(layer):
            return _OneProductAttention.from_config(self.config(layer))
        return super().layer(layer)

    def takes_scaled_query(self, layer: keras.layers.Layer | None) -> bool:
        # Relative positions read the query too, and scale it themselves.
        if not isinstance(layer, DotProductAttention) or f"{layer.name}.relative" in self._layers:
            return False
        parts = (f"{layer.name}.{part}" for part in ("query", "scaled_query", "rotated_query"))
        query, *between = map(self._layers.get, parts)
        if query is None:
            return False
        linear = [query.output, *(each.output for each in between if each is not None and each.input is query.output)]
        return any(layer.input[0] is tensor for tensor in linear)


class _ErfDense(TokenDense):
    """A dense layer with exact GELU as 0.5 x (1 + erf(x / sqrt 2)).

    The GELU of TensorFlow uses erfc. ONNX has no such operator, but tf2onnx writes one.
    """

    def call(self, tokens):
        return _gelu_by_erf(super().call(tokens))


class _ErfActivation(Activation):
    """Exact GELU, likewise."""

    def call(self, x):
        return _gelu_by_erf(x)


def _gelu_by_erf(x):
    return 0.5 * x * (1.0 + ops.erf(x * 0.5**0.5))


class _NearlyZeroPadding(keras.layers.ZeroPadding2D):
    """Padding before a max pooling with 1e-30 instead of zeros.

    ONNX Runtime (1.31) merges padding with exact zeros into the pooling, where padding is never the maximum.
    """

    def call(self, images):
        return ops.pad(images, ((0, 0), *self.padding, (0, 0)), constant_values=1e-30)


class _StepByStepNorm(keras.layers.LayerNormalization):
    """LayerNorm in the steps that ONNX Runtime (1.31) and OpenVINO match and replace by one operation.

    ONNX Runtime does not match a product with the reciprocal of the deviation, a square as a product, or a mean that
    tf2onnx writes as GlobalAveragePool, as it does below version 18 of the operators. OpenVINO needs a list of axes.
    """

    def call(self, x):
        centered = x - tf.reduce_mean(x, axis=[-1], keepdims=True)
        variance = tf.reduce_mean(tf.pow(centered, 2.0), axis=[-1], keepdims=True)
        return centered / ops.sqrt(variance + self.epsilon) * self.gamma + self.beta


class _OnePassNorm(keras.layers.LayerNormalization):
    """LayerNorm of tokens (B, N, D) in a form that TensorFlow with oneDNN computes in one pass instead of five.

    The graph optimizer matches a batch norm of one image with tokens as channels, constants after it, and one shared
    tensor "empty". It matches another form too, but replaces its epsilon by 1e-3. Without the optimizer, the statistics
    of bfloat16 tokens are float32 too.
    """

    def set_weights(self, weights):
        """Set the scale and the offset (D,), as constants."""
        self._constants = weights

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
    """GroupNorm of feature maps (B, h, w, C) with means over the pixels as matrix products.

    TensorFlow is slow at sums over axes other than the first and the last ones. The statistics are always float32.
    """

    def call(self, images):
        pixels, channels = images.shape[1] * images.shape[2], images.shape[3]
        x = tf.cast(tf.reshape(images, (-1, pixels, channels)), tf.float32)  # (B, h * w, C)
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
    """Attention with queries scaled by the weights of the layer before, see _TensorFlowLayers.

    The product transposes the key, without a separate operation. The bfloat16 softmax of oneDNN computes in float32;
    that of TensorFlow without oneDNN is within 0.5%.
    """

    scaled = True

    def key_heads(self, key):
        return split_heads(key, self.num_heads)

    def probabilities(self, query, key, attention_bias=None):
        logits = tf.matmul(query, key, transpose_b=True)
        return tf.nn.softmax(logits if attention_bias is None else logits + attention_bias)


def _is_full_norm(layer: keras.layers.Layer) -> bool:
    """Whether a layer is a LayerNorm of the channels with scale and offset, as those of `keras_vit.build`."""
    if not isinstance(layer, keras.layers.LayerNormalization):
        return False
    config = layer.get_config()
    return config["axis"] in (-1, [-1]) and config["scale"] and config["center"] and not config.get("rms_scaling")


def _is_full_group_norm(layer: keras.layers.GroupNormalization) -> bool:
    return layer.axis == -1 and layer.scale and layer.center and len(layer.input.shape) == 4


def standardized(layer: StandardizedConv2D, kernel: np.ndarray) -> np.ndarray:
    """The standardized kernel (h, w, in, out) float32 of a layer."""
    centered = kernel - kernel.mean(axis=(0, 1, 2), dtype=np.float64)
    deviation = np.sqrt(np.mean(np.square(centered), axis=(0, 1, 2)) + layer.variance_epsilon)
    return (centered / (deviation + layer.deviation_epsilon)).astype(np.float32)

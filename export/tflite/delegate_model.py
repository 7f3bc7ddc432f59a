"""The model in the operators that GPU and NPU delegates of phones compute correctly: every tensor has four axes.

Tokens are (1, 1, N, D). Products with weights are 1x1 convolutions, and attention is (1, H, N, d). Delegates refuse
products of two axes, and compute attention of three axes wrongly (github.com/google-ai-edge/LiteRT issues 8593, 8619).
GPUs compute in float16, whose largest number is 65,504. So LayerNorm multiplies the deviations from the mean by a power
of two before it squares them, which is exact in float32.
"""

import math
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf
from ai_edge_litert import schema_py_generated as schema

from export.inference_model import InferenceLayers, rebuilt
from export.tflite.flatbuffer import pack, unpack
from keras_vit import UserError
from keras_vit.models.attention import DotProductAttention
from keras_vit.models.build import class_token_only
from keras_vit.models.layers import (
    ClassToken,
    InsertTokens,
    LayerScale,
    ModelSpec,
    PoolTokens,
    Probe,
    StandardizedConv2D,
    TokenDense,
)
from keras_vit.models.positions import (
    PositionEmbedding,
    PositionEmbedding2D,
    RotaryPositions,
    SinCosPositions,
    rotary_angles,
)

# The largest scaled deviation: the squares of 4,096 of them have a sum of at most 65,536.
_LARGEST_DEVIATION = 4.0
# Layers with the same result for four axes; all others are replaced below.
_SAME_LAYERS = (
    ModelSpec, LayerScale, StandardizedConv2D, keras.layers.Activation, keras.layers.Add, keras.layers.Average,
    keras.layers.BatchNormalization, keras.layers.Conv2D, keras.layers.Dropout, keras.layers.InputLayer,
    keras.layers.MaxPooling2D, keras.layers.Multiply, keras.layers.ReLU, keras.layers.UnitNormalization,
    keras.layers.ZeroPadding2D,
)  # fmt: skip


def delegate_model(model: keras.Model, images: np.ndarray, *, all_tokens: bool = False) -> keras.Model:
    """The `inference_model` in float32 with four axes in every tensor: images -> logits (B, 1, 1, classes).

    Args:
        model: from `keras_vit.build`.
        images: some inputs (n, h, w, C) of the model, which decide the powers of two of its LayerNorms.
        all_tokens: compute all tokens of the last block.

    Raises UserError for relative positions, axial attention, and layers that are not those of `keras_vit.build`.
    """
    layers = _DelegateLayers(model, norm_scales(model, images))
    return rebuilt(model, layers, frozenset() if all_tokens else class_token_only(model))


def norm_scales(model: keras.Model, images: np.ndarray) -> dict[str, float]:
    """For each LayerNorm the power of two that brings the largest deviation from the mean to between 2 and 4."""
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.LayerNormalization)]
    if not norms:
        return {}
    inputs = keras.Model(model.input, [layer.input for layer in norms])(images)
    scales = {}
    for layer, tokens in zip(norms, inputs, strict=True):
        tokens = np.asarray(tokens, np.float32)
        largest = float(np.abs(tokens - tokens.mean(-1, keepdims=True)).max())
        scales[layer.name] = 2.0 ** math.floor(math.log2(_LARGEST_DEVIATION / max(largest, 1e-6)))
    return scales


def with_four_axes(content: bytes) -> bytes:
    """The file without the RESHAPEs to one axis that the converter puts before additions to one token."""
    model = unpack(content)
    subgraph = model.subgraphs[0]
    reshapes = {}
    for operator in subgraph.operators:
        code = model.operatorCodes[operator.opcodeIndex]
        source, target = (subgraph.tensors[index] for index in (operator.inputs[0], operator.outputs[0]))
        to_one_axis = list(source.shape[:-1]) == [1, 1, 1] and len(target.shape) == 1
        if code.builtinCode == schema.BuiltinOperator.RESHAPE and to_one_axis:
            reshapes[operator.outputs[0]] = operator
    subgraph.operators = [operator for operator in subgraph.operators if operator not in reshapes.values()]
    for operator in subgraph.operators:
        operator.inputs = [reshapes[i].inputs[0] if i in reshapes else i for i in operator.inputs]
    return pack(model)


class _DelegateLayers(InferenceLayers):
    """Makes the layers of this module. The factor 1 / sqrt(d) of attention moves into the weights of the query."""

    def __init__(self, model: keras.Model, scales: Mapping[str, float]):
        super().__init__(model, "float32")
        self._scales = scales

    def layer(self, layer):
        if isinstance(layer, keras.layers.LayerNormalization):
            replaced = _ScaledNorm.from_config(self.config(layer))
            replaced.deviation_scale = self._scales[layer.name]
            return replaced
        if layer.name == "patches":
            return keras.layers.Reshape((1, *layer.target_shape), name=layer.name)
        for kind, replacement in _REPLACED_LAYERS.items():
            if type(layer) is kind:
                return replacement.from_config(self.config(layer))
        if type(layer) in _SAME_LAYERS:
            return super().layer(layer)
        raise UserError(
            f"The layer {layer.name!r} ({type(layer).__name__}) has no form for GPUs and NPUs; take --target cpu."
        )

    def weights(self, layer):
        weights = super().weights(layer)
        attention = self._layers.get(layer.name.removesuffix(".query"))
        if attention is layer or not isinstance(attention, DotProductAttention):
            return weights
        factor = (layer.units // attention.num_heads) ** -0.5
        return [(weight.astype(np.float64) * factor).astype(np.float32) for weight in weights]


class _ScaledNorm(keras.layers.LayerNormalization):
    """LayerNorm whose deviations are multiplied by `deviation_scale` before they are squared."""

    deviation_scale = 1.0

    def call(self, tokens):
        deviation = (tokens - tf.reduce_mean(tokens, -1, keepdims=True)) * self.deviation_scale
        variance = tf.reduce_mean(deviation * deviation, -1, keepdims=True)
        normalized = deviation * tf.math.rsqrt(variance + self.epsilon * self.deviation_scale**2)
        return normalized * tf.convert_to_tensor(self.gamma) + tf.convert_to_tensor(self.beta)


class _PointwiseDense(TokenDense):
    """A product with weights as a 1x1 convolution: (B, 1, N, D) -> (B, 1, N, units)."""

    def call(self, tokens):
        x = tf.nn.conv2d(tokens, tf.convert_to_tensor(self.kernel)[None, None], 1, "VALID")
        x = x if self.bias is None else tf.nn.bias_add(x, self.bias)
        return x if self.activation is None else self.activation(x)


class _FourAxesAttention(DotProductAttention):
    """Attention with scaled queries: three times (B, 1, N, D) -> (B, 1, N, D)."""

    def call(self, query, key, value):
        heads = self.num_heads, query.shape[-1] // self.num_heads
        query, key, value = (tf.reshape(x, (-1, x.shape[2], *heads)) for x in (query, key, value))
        query, value = (tf.transpose(x, (0, 2, 1, 3)) for x in (query, value))  # (B, H, N, d)
        probabilities = tf.nn.softmax(tf.matmul(query, tf.transpose(key, (0, 2, 3, 1))))  # (B, H, N, M)
        mixed = tf.transpose(tf.matmul(probabilities, value), (0, 2, 1, 3))  # (B, N, H, d)
        return tf.reshape(mixed, (-1, 1, mixed.shape[1], heads[0] * heads[1]))

    def compute_output_shape(self, query_shape, key_shape, value_shape):
        return query_shape


class _FourAxesRotation(RotaryPositions):
    """(B, 1, N, D) -> (B, 1, N, D)."""

    def call(self, tokens):
        _, _, num_tokens, width = tokens.shape
        angles = rotary_angles(self.grid, width // self.num_heads)
        angles = np.pad(angles, ((num_tokens - len(angles), 0), (0, 0)))[None, :, None]  # (1, N, 1, d)
        heads = tf.reshape(tokens, (-1, num_tokens, self.num_heads, width // self.num_heads))
        first, second = tf.split(heads, 2, axis=-1)
        sign = np.repeat(np.float32([-1.0, 1.0]), width // self.num_heads // 2)  # NPUs have no operator NEG
        rotated = heads * np.cos(angles) + tf.concat([second, first], -1) * (sign * np.sin(angles))
        return tf.reshape(rotated, (-1, 1, num_tokens, width))


class _AddTable:
    """Add the positions of a layer for (B, N, D) to (B, 1, N, D), as one constant."""

    def build(self, input_shape):
        super().build((input_shape[0], *input_shape[2:]))

    def call(self, tokens):
        return tokens + super().call(tf.zeros((1, *tokens.shape[2:])))[None]


class _Positions(_AddTable, PositionEmbedding):
    pass


class _Positions2D(_AddTable, PositionEmbedding2D):
    pass


class _SinCosPositions(_AddTable, SinCosPositions):
    pass


class _Inserted(InsertTokens):
    """(B, 1, N, D) -> (B, 1, N + num_tokens, D)."""

    def call(self, tokens):
        inserted = _for_each_image(tf.convert_to_tensor(self.tokens)[None], tokens)
        parts = [tokens[:, :, : self.index], inserted, tokens[:, :, self.index :]]
        return tf.concat(parts if self.index else parts[1:], axis=2)

    def compute_output_shape(self, input_shape):
        return *input_shape[:2], input_shape[2] + self.num_tokens, input_shape[3]


class _WithClassToken(ClassToken):
    """(B, 1, N, D) -> (B, 1, 1 + N, D)."""

    def call(self, patches):
        return tf.concat([_for_each_image(tf.convert_to_tensor(self.cls)[None], patches), patches], axis=2)

    def compute_output_shape(self, input_shape):
        return *input_shape[:2], input_shape[2] + 1, input_shape[3]


class _Query(Probe):
    """(B, 1, N, D) -> (B, 1, 1, D)."""

    def call(self, tokens):
        return _for_each_image(tf.convert_to_tensor(self.probe)[None], tokens)

    def compute_output_shape(self, input_shape):
        return *input_shape[:2], 1, input_shape[3]


class _Pooled(PoolTokens):
    """(B, 1, N, D) -> (B, 1, 1, D)."""

    def call(self, tokens):
        index = int(self.kind == "second")
        token = tokens[:, :, index : index + 1]
        if self.kind in ("token", "second"):
            return token
        mean = tf.reduce_mean(tokens[:, :, self.num_prefix_tokens :], axis=2, keepdims=True)
        return mean if self.kind == "gap" else tf.concat([token, mean], -1)

    def compute_output_shape(self, input_shape):
        return *input_shape[:2], 1, input_shape[3] * (2 if self.kind == "token+gap" else 1)


class _PooledMap(keras.layers.GlobalAveragePooling2D):
    """(B, h, w, C) -> (B, 1, 1, C)."""

    def call(self, inputs):
        return tf.reduce_mean(inputs, (1, 2), keepdims=True)

    def compute_output_shape(self, input_shape):
        return input_shape[0], 1, 1, input_shape[3]


class _FourAxesGroupNorm(keras.layers.GroupNormalization):
    """GroupNorm of (B, h, w, C): the means of the groups are a product of those of the channels."""

    def call(self, images):
        channels = images.shape[-1]
        group = np.arange(channels) // (channels // self.groups)
        means = (group[:, None] == group).astype(np.float32) * (self.groups / channels)  # (C, C)

        def group_means(x):
            return tf.nn.conv2d(tf.reduce_mean(x, (1, 2), keepdims=True), means[None, None], 1, "VALID")

        deviation = images - group_means(images)
        scale = tf.math.rsqrt(group_means(deviation * deviation) + self.epsilon)
        return deviation * scale * tf.convert_to_tensor(self.gamma) + tf.convert_to_tensor(self.beta)


def _for_each_image(token, tokens):
    """A weight (1, 1, n, D) for every image of a batch; unchanged for the batch of 1 of a file."""
    return tf.broadcast_to(token, (tf.shape(tokens)[0], *token.shape[1:])) if tokens.shape[0] != 1 else token


_REPLACED_LAYERS: Mapping[type, type] = {
    TokenDense: _PointwiseDense,
    DotProductAttention: _FourAxesAttention,
    RotaryPositions: _FourAxesRotation,
    InsertTokens: _Inserted,
    ClassToken: _WithClassToken,
    Probe: _Query,
    PoolTokens: _Pooled,
    PositionEmbedding: _Positions,
    PositionEmbedding2D: _Positions2D,
    SinCosPositions: _SinCosPositions,
    keras.layers.GlobalAveragePooling2D: _PooledMap,
    keras.layers.GroupNormalization: _FourAxesGroupNorm,
}

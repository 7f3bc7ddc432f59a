"""The model in the operators that GPU and NPU delegates of phones compute correctly: every tensor has four axes.

Tokens are (1, 1, N, D). Products with weights are 1x1 convolutions, and attention is (1, H, N, d). Delegates refuse
products of two axes, and compute attention of three axes wrongly (github.com/google-ai-edge/LiteRT issues 8593, 8619).
GPUs compute in float16, whose largest number is 65,504. So LayerNorm multiplies the deviations from the mean by a power
of two before it squares them, which is exact in float32; so do divisions by a length.

Label maps, masks and segments are float32 numbers in place of integers and Booleans. GPUs have no argmax, and ours has
no TOP_K, which the WebGPU accelerator computes wrongly. So places of largest numbers come from arithmetic, which is
exact below 2,048 in float16 too.

Axes: B batch, N tokens, D width, Q queries, K classes, H and W rows and columns of the model's input.
"""

import math
from collections.abc import Collection, Mapping

import keras
import numpy as np
import tensorflow as tf
from ai_edge_litert import schema_py_generated as schema

from export.inference_model import InferenceLayers, rebuilt
from export.tasks import SegmentOutputs
from export.tflite.flatbuffer import pack, unpack
from keras_vit import UserError
from keras_vit.models.attention import DotProductAttention
from keras_vit.models.config import LinearSegmentationConfig
from keras_vit.models.detection import (
    BoxesOnGrid,
    ClassEmbeddings,
    ClassLogits,
    KnownClasses,
    TimesClassToken,
    box_bias,
    unit_length,
)
from keras_vit.models.layers import (
    Activation,
    ClassToken,
    InsertTokens,
    LayerScale,
    ModelSpec,
    PoolTokens,
    Probe,
    StandardizedConv2D,
    TokenDense,
)
from keras_vit.models.positions import PositionEmbedding, PositionEmbedding2D, RotaryPositions, SinCosPositions
from keras_vit.models.segmentation import LEAST_VISIBLE, MaskProduct, SplitQueries

_LARGEST = 4.0  # the largest scaled number: the squares of 4,096 of them have a sum of at most 65,536
_SMALLEST_SQUARE = 1e-12  # keeps the square of a vector of zeros from a division by zero
_STEEP = 2.0**15  # its square is above one over the smallest difference of numbers near 1, also in float16
# Layers with the same result for four axes; all others are replaced below.
_SAME_LAYERS = (
    ModelSpec, LayerScale, StandardizedConv2D, Activation, KnownClasses, keras.layers.Activation, keras.layers.Add,
    keras.layers.Average, keras.layers.BatchNormalization, keras.layers.Concatenate, keras.layers.Conv2D,
    keras.layers.Conv2DTranspose, keras.layers.DepthwiseConv2D, keras.layers.Dropout, keras.layers.InputLayer,
    keras.layers.MaxPooling2D, keras.layers.Multiply, keras.layers.ReLU, keras.layers.ZeroPadding2D,
)  # fmt: skip


def delegate_model(
    model: keras.Model, images: np.ndarray, class_token: Collection[str] = (), left_out: Collection[str] = ()
) -> keras.Model:
    """The `inference_model` in float32 with four axes in every tensor: images -> logits (B, 1, 1, classes).

    Args:
        model: from `keras_vit.build`, or with what a `Task` puts behind it; then the outputs are a dict.
        images: some inputs (n, h, w, C) of the model, which decide the powers of two of its norms.
        class_token: names of layers to compute for the class token alone.
        left_out: names of layers to leave out, see `rebuilt`.

    Raises UserError for relative positions, axial attention, and layers that are not those of `keras_vit.build`.
    """
    network = rebuilt(model, _DelegateLayers(model, "float32"), class_token, left_out=left_out)
    scaled = [layer for layer in network.layers if isinstance(layer, _Scaled)]
    if scaled:
        network(images)
    for layer in scaled:
        layer.factor = 2.0 ** math.floor(math.log2(_LARGEST / max(layer.largest, 1e-6)))
    return network


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
    def layer(self, layer):
        if isinstance(layer, SegmentOutputs):
            return DelegateSegments(layer.task, layer.preprocessing, name=layer.name)
        if layer.name.endswith("pool_padding"):
            return _ConcatenatedZeros.from_config(self.config(layer))
        if layer.name == "patches":
            return keras.layers.Reshape((1, *layer.target_shape), name=layer.name)
        if isinstance(layer, keras.layers.GlobalAveragePooling2D):
            return type(layer).from_config({**self.config(layer), "keepdims": True})
        for kind, replacement in _REPLACED_LAYERS.items():
            if type(layer) is kind:
                return replacement.from_config(self.config(layer))
        if type(layer) in _SAME_LAYERS:
            return super().layer(layer)
        raise UserError(
            f"The layer {layer.name!r} ({type(layer).__name__}) has no form for GPUs and NPUs; take --target cpu."
        )

    def takes_scaled_query(self, layer):
        return isinstance(layer, DotProductAttention)


class _Scaled:
    """Multiplies numbers by a power of two before they are squared, for float16."""

    factor = 1.0
    largest = 0.0
    """The largest of the numbers in all calls so far with images."""

    def scaled(self, numbers):
        """The numbers (B, 1, N, D) times the factor."""
        if tf.executing_eagerly():
            self.largest = max(self.largest, float(tf.reduce_max(tf.abs(numbers))))
        return numbers * self.factor

    def unit_length(self, vectors):
        """Vectors (B, 1, N, D) divided by their lengths."""
        vectors = self.scaled(vectors)
        square = tf.reduce_mean(vectors * vectors, -1, keepdims=True)
        return vectors * (tf.math.rsqrt(square + _SMALLEST_SQUARE) * vectors.shape[-1] ** -0.5)


class _ScaledNorm(_Scaled, keras.layers.LayerNormalization):
    """LayerNorm whose deviations from the mean are scaled."""

    def call(self, tokens):
        deviation = self.scaled(tokens - tf.reduce_mean(tokens, -1, keepdims=True))
        variance = tf.reduce_mean(deviation * deviation, -1, keepdims=True)
        normalized = deviation * tf.math.rsqrt(variance + self.epsilon * self.factor**2)
        return normalized * tf.convert_to_tensor(self.gamma) + tf.convert_to_tensor(self.beta)


class _UnitLength(_Scaled, keras.layers.UnitNormalization):
    def call(self, vectors):
        return self.unit_length(vectors)


class _PointwiseDense(TokenDense):
    """A product with weights as a 1x1 convolution: (B, 1, N, D) -> (B, 1, N, units)."""

    def call(self, tokens):
        x = _pointwise(tokens, self.kernel)
        x = x if self.bias is None else tf.nn.bias_add(x, self.bias)
        return x if self.activation is None else self.activation(x)


class _FourAxesAttention(DotProductAttention):
    """Attention with scaled queries: three times (B, 1, N, D) -> (B, 1, N, D)."""

    def call(self, query, key, value):
        heads = self.num_heads, query.shape[-1] // self.num_heads
        query, key, value = (tf.reshape(x, (-1, x.shape[2], *heads)) for x in (query, key, value))
        value = tf.transpose(value, (0, 2, 1, 3))  # (B, H, M, d)
        if query.shape[1] == 1:  # it may be a constant, which GPUs take as the second factor only
            products = tf.matmul(tf.transpose(key, (0, 2, 1, 3)), tf.transpose(query, (0, 2, 3, 1)))  # (B, H, M, 1)
            products = tf.transpose(products, (0, 1, 3, 2))
        else:
            products = tf.matmul(tf.transpose(query, (0, 2, 1, 3)), tf.transpose(key, (0, 2, 3, 1)))
        probabilities = tf.nn.softmax(products)  # (B, H, N, M)
        mixed = tf.transpose(tf.matmul(probabilities, value), (0, 2, 1, 3))  # (B, N, H, d)
        return tf.reshape(mixed, (-1, 1, mixed.shape[1], heads[0] * heads[1]))

    def compute_output_shape(self, query_shape, key_shape, value_shape):
        return query_shape


class _FourAxesRotation(RotaryPositions):
    """(B, 1, N, D) -> (B, 1, N, D)."""

    def call(self, tokens):
        _, _, num_tokens, width = tokens.shape
        angles = self.angles(width // self.num_heads)
        angles = np.pad(angles, ((num_tokens - len(angles), 0), (0, 0)))[None, :, None]  # (1, N, 1, d)
        half = width // self.num_heads // 2
        heads = tf.reshape(tokens, (-1, num_tokens, self.num_heads, 2 * half))
        # No SPLIT: GPUs take the concatenation of all its parts for its input, in whatever order they are.
        swapped = tf.concat([heads[..., half:], heads[..., :half]], -1)
        sign = np.repeat(np.float32([-1.0, 1.0]), half)  # NPUs have no operator NEG
        rotated = heads * np.cos(angles) + swapped * (sign * np.sin(angles))
        return tf.reshape(rotated, (-1, 1, num_tokens, width))


class _AddTable:
    """Add the positions of a layer for (B, N, D) to (B, 1, N, D), as one constant."""

    def build(self, input_shape):
        super().build((input_shape[0], *input_shape[2:]))

    def call(self, tokens):
        return tokens + super().call(tf.zeros((1, *tokens.shape[2:])))[None]


class _Inserted(InsertTokens):
    """(B, 1, N, D) -> (B, 1, N + num_tokens, D)."""

    def call(self, tokens):
        inserted = _for_each_image(tf.convert_to_tensor(self.tokens)[None], tokens)
        parts = [tokens[:, :, : self.index], inserted, tokens[:, :, self.index :]]
        return tf.concat(parts if self.index else parts[1:], axis=2)


class _WithClassToken(ClassToken):
    """(B, 1, N, D) -> (B, 1, 1 + N, D)."""

    def call(self, patches):
        return tf.concat([_for_each_image(tf.convert_to_tensor(self.cls)[None], patches), patches], axis=2)

    def compute_output_shape(self, input_shape):
        return *input_shape[:2], 1 + input_shape[2], input_shape[3]


class _Query(Probe):
    """(B, 1, N, D) -> (B, 1, 1, D)."""

    def call(self, tokens):
        return _for_each_image(tf.convert_to_tensor(self.probe)[None], tokens)


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


class _ConcatenatedZeros(keras.layers.ZeroPadding2D):
    """Zeros around (B, h, w, C). GPUs merge an operator PAD into the pooling behind it, which ignores padding."""

    def call(self, images):
        for axis, sides in enumerate(self.padding, 1):
            shape = [1, *images.shape[1:]]
            parts = [_for_each_image(tf.zeros([*shape[:axis], side, *shape[axis + 1 :]]), images) for side in sides]
            images = tf.concat([parts[0], images, parts[1]], axis)
        return images


class _FourAxesGroupNorm(keras.layers.GroupNormalization):
    """GroupNorm of (B, h, w, C): the means of the groups are a product of those of the channels."""

    def call(self, images):
        channels = images.shape[-1]
        group = np.arange(channels) // (channels // self.groups)
        means = (group[:, None] == group).astype(np.float32) * (self.groups / channels)  # (C, C)

        def group_means(x):
            return _pointwise(tf.reduce_mean(x, (1, 2), keepdims=True), means)

        deviation = images - group_means(images)
        scale = tf.math.rsqrt(group_means(deviation * deviation) + self.epsilon)
        return deviation * scale * tf.convert_to_tensor(self.gamma) + tf.convert_to_tensor(self.beta)


class _SplitTokens(SplitQueries):
    """(B, 1, Q + prefix + patches, D) -> (B, 1, Q, D), (B, rows, columns, D)."""

    def call(self, tokens):
        patches = tokens[:, :, self.num_queries + self.num_prefix_tokens :]
        return tokens[:, :, : self.num_queries], tf.reshape(patches, (-1, *self.grid, tokens.shape[-1]))


class _Masks(MaskProduct):
    """(B, h, w, D) and (B, 1, Q, D) -> (B, h, w, Q)."""

    def call(self, pixels, queries):
        _, rows, columns, width = pixels.shape
        flat = tf.reshape(pixels, (-1, 1, rows * columns, width))
        return tf.reshape(tf.matmul(flat, tf.transpose(queries, (0, 1, 3, 2))), (-1, rows, columns, queries.shape[2]))


class _PatchesTimesClassToken(TimesClassToken):
    """(B, 1, prefix + N, D) -> (B, 1, N, D)."""

    def call(self, tokens):
        return tokens[:, :, self.prefix :] * tokens[:, :, :1]


class _CroppedTokens(keras.layers.Cropping1D):
    """(B, 1, N, D) -> (B, 1, n, D)."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.input_spec = None

    def call(self, tokens):
        first, last = self.cropping
        return tokens[:, :, first : tokens.shape[2] - last]

    def compute_output_shape(self, input_shape):
        return *input_shape[:2], input_shape[2] - sum(self.cropping), input_shape[3]


class _Boxes(BoxesOnGrid):
    """(B, 1, N, 4) -> (B, 1, N, 4)."""

    def call(self, predictions):
        return tf.sigmoid(predictions + box_bias(self.grid)[None, None])


class _ClassEmbeddings(_Scaled, ClassEmbeddings):
    """(B, 1, N, D), (B, 1, N, E) -> (B, 1, N, E), (B, 1, N, 1), (B, 1, N, 1)."""

    def call(self, features, embeddings):
        shift = _pointwise(features, self.shift_kernel) + tf.convert_to_tensor(self.shift_bias)
        scale = tf.nn.elu(_pointwise(features, self.scale_kernel) + tf.convert_to_tensor(self.scale_bias)) + 1.0
        return self.unit_length(embeddings), shift, scale


class _ClassLogits(ClassLogits):
    """(B, 1, N, E), (B, 1, N, 1), (B, 1, N, 1) and the embeddings of the classes (K, E) -> (B, 1, N, K)."""

    def call(self, embeddings, shift, scale, queries):
        return (_pointwise(embeddings, tf.transpose(unit_length(queries))) + shift) * scale


def _pointwise(tokens, kernel):
    """The product of (B, h, w, D) and weights (D, units)."""
    return tf.nn.conv2d(tokens, tf.convert_to_tensor(kernel)[None, None], 1, "VALID")


def _for_each_image(token, tokens):
    """A weight (1, 1, n, D) for every image of a batch; unchanged for the batch of 1 of a file."""
    return tf.broadcast_to(token, (tf.shape(tokens)[0], *token.shape[1:])) if tokens.shape[0] != 1 else token


class DelegateSegments(SegmentOutputs):
    """The outputs of `SegmentOutputs` from those of a model in four axes, with four axes: maps (B, H, W, 1), masks
    (B, Q, H, W), classes and scores (B, 1, Q, 1).
    """

    def call(self, outputs):
        if isinstance(self.task, LinearSegmentationConfig):
            return {"label_map": _largest(self._at_input(outputs["pixel_logits"]))[0]}
        probabilities = tf.nn.softmax(outputs["class_logits"])  # (B, 1, Q, K + 1)
        masks = self._at_input(outputs["mask_logits"])  # (B, H, W, Q)
        if self.task.task == "semantic":
            return {"label_map": _largest(_product(tf.sigmoid(masks), probabilities[..., :-1]))[0]}
        if self.task.task == "instance":
            return _instances(masks, probabilities[..., :-1])
        return _panoptic(masks, probabilities, self.task.stuff)

    def _at_input(self, maps):
        height, width = self.preprocessing.image_size
        return maps if maps.shape[1:3] == (height, width) else tf.image.resize(maps, (height, width))


def _product(pixels, classes):
    """(B, H, W, Q) and (B, 1, Q, K) -> (B, H, W, K)."""
    _, height, width, queries = pixels.shape
    flat = tf.matmul(tf.reshape(pixels, (-1, 1, height * width, queries)), classes)
    return tf.reshape(flat, (-1, height, width, classes.shape[-1]))


def _is_positive(x):
    """1 where x is above 0, else 0."""
    for _ in range(2):
        x = 1.0 - tf.nn.relu(1.0 - tf.nn.relu(x) * _STEEP)
    return x


def _largest(scores):
    """The first place of the largest of (..., K) as (..., 1), and 1 at this place of (..., K), else 0."""
    size = scores.shape[-1]
    among_largest = 1.0 - _is_positive(tf.reduce_max(scores, -1, keepdims=True) - scores)
    ranks = among_largest * np.arange(size, 0, -1, dtype=np.float32)  # the first has the largest
    highest = tf.reduce_max(ranks, -1, keepdims=True)
    return float(size) - highest, 1.0 - _is_positive(highest - ranks)


def _area(masks):
    """The share of the pixels in masks (B, H, W, Q): (B, 1, 1, Q)."""
    return tf.reduce_mean(masks, (1, 2), keepdims=True)


def _transposed(numbers):
    """(B, 1, Q, 1) -> (B, 1, 1, Q), and the inverse."""
    return tf.transpose(numbers, (0, 1, 3, 2))


def _instances(masks, probabilities):
    inside = _is_positive(masks)
    pixels = masks.shape[1] * masks.shape[2]
    certainty = _area(inside * tf.sigmoid(masks)) / (_area(inside) + np.full((1, 1, 1, 1), 1e-6 / pixels, np.float32))
    scores = tf.reduce_max(probabilities, -1, keepdims=True) * _transposed(certainty)
    classes, _ = _largest(probabilities)
    return {"masks": tf.transpose(inside, (0, 3, 1, 2)), "classes": classes, "scores": scores}


def _panoptic(masks, probabilities, stuff):
    """As `keras_vit.models.segmentation` has it."""
    num_queries, nothing = probabilities.shape[2], probabilities.shape[-1] - 1
    labels, is_label = _largest(probabilities)  # (B, 1, Q, 1), (B, 1, Q, K + 1)
    scores = tf.reduce_max(probabilities, -1, keepdims=True)
    kept = _transposed(_is_positive(float(nothing) - labels))  # (B, 1, 1, Q)
    weighted = tf.sigmoid(masks) * (_transposed(scores) * kept) + (kept - 1.0)
    own = _largest(weighted)[1] * kept
    whole = (1.0 - _is_positive(-masks)) * kept
    visible = own * whole
    valid = _is_positive(_area(visible)) * _is_positive(_area(own) - LEAST_VISIBLE * _area(whole))
    # All masks of a class of stuff have the number of its first.
    same = tf.matmul(is_label, _transposed(is_label * _transposed(valid)))  # (B, 1, Q, Q)
    first, _ = _largest(same)
    of_stuff = np.isin(np.arange(nothing + 1), stuff).astype(np.float32)
    is_stuff = tf.reduce_max(is_label * of_stuff, -1, keepdims=True)
    queries = np.arange(num_queries, dtype=np.float32).reshape(1, 1, -1, 1)
    numbers = _transposed(queries + (first - queries) * is_stuff)
    segments = tf.reduce_max(visible * valid * (numbers + 1.0), -1, keepdims=True) - 1.0
    return {"segment_map": segments, "classes": labels, "scores": scores * _transposed(valid)}


_REPLACED_LAYERS: Mapping[type, type] = {
    TokenDense: _PointwiseDense,
    DotProductAttention: _FourAxesAttention,
    RotaryPositions: _FourAxesRotation,
    InsertTokens: _Inserted,
    ClassToken: _WithClassToken,
    Probe: _Query,
    PoolTokens: _Pooled,
    **{
        kind: type(kind.__name__, (_AddTable, kind), {})
        for kind in (PositionEmbedding, PositionEmbedding2D, SinCosPositions)
    },
    SplitQueries: _SplitTokens,
    MaskProduct: _Masks,
    TimesClassToken: _PatchesTimesClassToken,
    BoxesOnGrid: _Boxes,
    ClassEmbeddings: _ClassEmbeddings,
    ClassLogits: _ClassLogits,
    keras.layers.Cropping1D: _CroppedTokens,
    keras.layers.LayerNormalization: _ScaledNorm,
    keras.layers.UnitNormalization: _UnitLength,
    keras.layers.GroupNormalization: _FourAxesGroupNorm,
}

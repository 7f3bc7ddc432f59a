"""A simulation of a GPU in float16: every tensor of a TFLite file is rounded to float16 and back.

GPUs of phones store tensors in float16. Sums inside an operator are computed in float32 here; some GPUs sum in float16,
which no simulation of a file can know.
"""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from export import parity
from export.tflite.flatbuffer import Graph, Operator, Tensor

_ACTIVATIONS = {0: lambda x: x, 1: tf.nn.relu, 3: tf.nn.relu6, 4: tf.tanh}
_PADDINGS = {0: "SAME", 1: "VALID"}
_DTYPES = {"FLOAT32": np.float32, "FLOAT16": np.float16, "INT32": np.int32}


def run_in_half(content: bytes, expected: parity.Reference) -> np.ndarray:
    """Logits (n, K) of the sample images, from a float32 or float16 file with batch 1.

    Raises KeyError for operators that no delegate model has.
    """
    graph = Graph(content)
    compute = tf.function(
        lambda image: _run(graph, image), input_signature=[tf.TensorSpec(graph.inputs[0].shape)], autograph=False
    )
    return np.concatenate(
        [compute(image[None]).numpy() for _, images in expected.batches() for image in images], axis=0
    )


def _run(graph: Graph, image: tf.Tensor) -> tf.Tensor:
    values = {graph.inputs[0].index: to_float16(image)}

    def value(tensor: Tensor):
        if tensor.index not in values:
            values[tensor.index] = _constant(graph.source(tensor))
        return values[tensor.index]

    for operator in graph.operators:
        results = _OPERATORS[operator.name](operator, *(value(tensor) for tensor in operator.inputs))
        results = results if isinstance(results, list) else [results]
        for tensor, result in zip(operator.outputs, results, strict=True):
            values[tensor.index] = to_float16(result)
    return values[graph.outputs[0].index]


def to_float16(x: tf.Tensor) -> tf.Tensor:
    """The nearest numbers that float16 has, in float32; infinite above 65,504."""
    return tf.cast(tf.cast(x, tf.float16), tf.float32)


def _constant(tensor: Tensor):
    assert tensor.constant is not None
    values = np.frombuffer(tensor.constant.tobytes(), _DTYPES[tensor.dtype]).reshape(tensor.shape)
    return values if tensor.dtype == "INT32" else to_float16(tf.constant(values, tf.float32))


def _activated(operator: Operator, x):
    return _ACTIVATIONS[operator.options.fusedActivationFunction](x)


def _conv(operator: Operator, x, kernel, bias=0.0):
    options = operator.options
    return _activated(
        operator,
        tf.nn.conv2d(
            x,
            tf.transpose(kernel, (1, 2, 3, 0)),
            (options.strideH, options.strideW),
            _PADDINGS[options.padding],
            dilations=(options.dilationHFactor, options.dilationWFactor),
        )
        + bias,
    )


def _max_pool(operator: Operator, x):
    options = operator.options
    size, strides = (options.filterHeight, options.filterWidth), (options.strideH, options.strideW)
    return _activated(operator, tf.nn.max_pool2d(x, size, strides, _PADDINGS[options.padding]))


def _slice(operator: Operator, x, begin, end, strides):
    options = operator.options
    masks = {"begin_mask": options.beginMask, "end_mask": options.endMask, "shrink_axis_mask": options.shrinkAxisMask}
    return tf.strided_slice(x, begin, end, strides, **masks)


_OPERATORS: Mapping[str, Callable] = {
    "ADD": lambda o, a, b: _activated(o, a + b),
    "SUB": lambda o, a, b: _activated(o, a - b),
    "MUL": lambda o, a, b: _activated(o, a * b),
    "SQUARED_DIFFERENCE": lambda o, a, b: tf.math.squared_difference(a, b),
    "MEAN": lambda o, x, axes: tf.reduce_mean(x, np.ravel(axes), keepdims=o.options.keepDims),
    "RSQRT": lambda o, x: tf.math.rsqrt(x),
    "SOFTMAX": lambda o, x: tf.nn.softmax(x),
    "GELU": lambda o, x: tf.nn.gelu(x, o.options.approximate),
    "LOGISTIC": lambda o, x: tf.sigmoid(x),
    "TANH": lambda o, x: tf.tanh(x),
    "RELU": lambda o, x: tf.nn.relu(x),
    "BATCH_MATMUL": lambda o, a, b: tf.matmul(a, b, transpose_a=o.options.adjX, transpose_b=o.options.adjY),
    "CONV_2D": _conv,
    "MAX_POOL_2D": _max_pool,
    "PAD": lambda o, x, paddings: tf.pad(x, paddings),
    "RESHAPE": lambda o, x, *_: tf.reshape(x, o.outputs[0].shape),
    "TRANSPOSE": lambda o, x, axes: tf.transpose(x, axes),
    "CONCATENATION": lambda o, *parts: tf.concat(parts, o.options.axis),
    "SPLIT": lambda o, axis, x: tf.split(x, o.options.numSplits, int(np.ravel(axis)[0])),
    "STRIDED_SLICE": _slice,
}

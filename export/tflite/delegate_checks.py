"""Checks of a TFLite file for delegates of phones: rules that it must keep, and a simulation of a GPU in float16.

The rules come from what delegates document, from errors that were reported for them, and from graphs that were run in
LiteRT's WebGPU accelerator (ai-edge-litert 2.3.0). Most of the errors give wrong numbers without a message.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import tensorflow as tf

from export import parity
from export.options import Target
from export.tflite.flatbuffer import Graph, Operator, Tensor
from keras_vit.errors import ParityError

_AXES = 4
_FLOATS = ("FLOAT32", "FLOAT16")
_POOLING = ("MAX_POOL_2D", "AVERAGE_POOL_2D")
_CONVOLUTIONS = ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV")
_LARGEST_FILE = 2**31 - 1  # offsets of a flatbuffer have 31 bits
Rule = Callable[[Graph, Operator], object]
# The operators of github.com/tensorflow/tensorflow, tensorflow/lite/tools/versioning/gpu_compatibility.cc, without
# ONE_HOT and SELECT_V2, which the WebGPU accelerator refuses. The Analyzer of TensorFlow 2.21 should check them, but
# finds every file compatible.
_GPU = frozenset((
    "ABS", "ADD", "ADD_N", "ATAN2", "AVERAGE_POOL_2D", "BATCH_MATMUL", "CAST", "CEIL", "CONCATENATION", "CONV_2D",
    "COS", "CUMSUM", "DENSIFY", "DEPTHWISE_CONV_2D", "DEPTH_TO_SPACE", "DEQUANTIZE", "DIV", "DYNAMIC_UPDATE_SLICE",
    "ELU", "EMBEDDING_LOOKUP", "EQUAL", "EXP", "FLOOR", "FLOOR_DIV", "FLOOR_MOD", "FULLY_CONNECTED", "GATHER",
    "GELU", "GREATER", "GREATER_EQUAL", "HARD_SWISH", "LEAKY_RELU", "LESS", "LESS_EQUAL", "LOG", "LOGICAL_AND",
    "LOGISTIC", "LSTM", "MAXIMUM", "MAX_POOL_2D", "MEAN", "MINIMUM", "MIRROR_PAD", "MUL", "NEG", "NOT_EQUAL",
    "PACK", "PAD", "PADV2", "POW", "PRELU", "QUANTIZE", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD",
    "RELU", "RELU6", "RELU_N1_TO_1", "RESHAPE", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "RSQRT", "SELECT",
    "SIGN", "SIN", "SLICE", "SOFTMAX", "SPACE_TO_DEPTH", "SPLIT", "SPLIT_V", "SQRT", "SQUARE",
    "SQUARED_DIFFERENCE", "STRIDED_SLICE", "SUB", "SUM", "TANH", "TILE", "TRANSPOSE", "TRANSPOSE_CONV",
))  # fmt: skip
# github.com/google-ai-edge/LiteRT, litert/vendors/mediatek/compiler/MediaTek_Neuro_Compiler.md
_MEDIATEK = frozenset((
    "ABS", "ADD", "AVERAGE_POOL_2D", "BATCH_MATMUL", "CAST", "CONCATENATION", "CONV_2D", "DEPTHWISE_CONV_2D",
    "DEQUANTIZE", "DIV", "FULLY_CONNECTED", "GELU", "GREATER", "HARD_SWISH", "L2_NORMALIZATION", "LEAKY_RELU",
    "LESS", "LOGISTIC", "MAXIMUM", "MAX_POOL_2D", "MEAN", "MINIMUM", "MUL", "PAD", "PADV2", "PRELU", "QUANTIZE",
    "REDUCE_MAX", "RELU", "RESHAPE", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "RSQRT", "SLICE", "SOFTMAX",
    "SPLIT", "SQRT", "SQUARED_DIFFERENCE", "STRIDED_SLICE", "SUB", "SUM", "TANH", "TILE", "TRANSPOSE",
    "TRANSPOSE_CONV", "UNPACK",
))  # fmt: skip


def _indices(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.index for tensor in tensors}


def _has_other_axes(graph: Graph, operator: Operator) -> bool:
    ends = _indices(graph.outputs)
    return any(
        len(tensor.shape) != _AXES and not (tensor.index in ends and len(tensor.shape) < _AXES)
        for tensor in operator.outputs
    )


def _reads_an_end(graph: Graph, operator: Operator) -> bool:
    ends = _indices(graph.outputs)
    return not ends.isdisjoint(_indices(operator.inputs)) or not ends.isdisjoint(_indices(graph.inputs))


def _makers(graph: Graph, operator: Operator) -> set[str]:
    """Return the names of the operators that make the inputs of one."""
    inputs = _indices(operator.inputs)
    return {each.name for each in graph.operators if not inputs.isdisjoint(_indices(each.outputs))}


def _adds_to_product(graph: Graph, operator: Operator) -> bool:
    is_broadcast = operator.name == "ADD" and len({tensor.shape for tensor in operator.inputs}) > 1
    return is_broadcast and "BATCH_MATMUL" in _makers(graph, operator)


def _reads_padding(graph: Graph, operator: Operator) -> bool:
    merged = {"PAD", "PADV2"} if operator.name in _POOLING else {"PADV2"} if operator.name in _CONVOLUTIONS else set()
    return bool(merged) and not merged.isdisjoint(_makers(graph, operator))


def _joins_a_split(graph: Graph, operator: Operator) -> bool:
    splits = [each.outputs for each in graph.operators if each.name in ("SPLIT", "SPLIT_V")]
    return operator.name == "CONCATENATION" and _indices(operator.inputs) in map(_indices, splits)


def _is_not_of_the_gpu(_: Graph, operator: Operator) -> bool:
    if operator.name == "STRIDED_SLICE":
        return any(getattr(operator.options, mask) for mask in ("ellipsisMask", "newAxisMask", "shrinkAxisMask"))
    if operator.name in ("ADD", "MUL", "SUB"):
        first, second = operator.inputs
        sides = list(zip(first.shape[::-1], second.shape[::-1], strict=False))
        return any(a < b for a, b in sides) and any(a > b for a, b in sides)  # both are repeated
    return operator.name not in _GPU


# By its name, whether an operator breaks a rule. The comments are its source.
_BOTH: dict[str, Rule] = {
    # LiteRT issues 8593, 8619 and 9272
    "four axes": _has_other_axes,
    # LiteRT issue 8619
    "leading dimension 1": lambda _, o: any(tensor.shape[:1] not in ((1,), (-1,)) for tensor in o.outputs),
    # The GPU delegate's documentation
    "static shapes": lambda _, o: any(-1 in tensor.shape for tensor in o.outputs),
    # LiteRT issue 8619
    "no broadcast addition to a batched product": _adds_to_product,
    # LiteRT issue 8599
    "no output that is read again": _reads_an_end,
    # The others: LiteRT's WebGPU accelerator
    "no padding before pooling": _reads_padding,
    "no reordered split": _joins_a_split,
    "no constant as the first factor": lambda graph, o: (
        o.name == "BATCH_MATMUL" and graph.source(o.inputs[0]).constant is not None
    ),
    "two different factors": lambda _, o: o.name == "BATCH_MATMUL" and len(_indices(o.inputs)) == 1,
    "factors with equal batches": lambda _, o: (
        o.name == "BATCH_MATMUL" and len({tensor.shape[:-2] for tensor in o.inputs}) > 1
    ),
}
RULES: dict[Target, dict[str, Rule]] = {
    "gpu": {
        **_BOTH,
        # LiteRT's WebGPU accelerator
        "no constant without axes": lambda _, o: (
            o.name in ("MAXIMUM", "DIV", "SQUARED_DIFFERENCE") and not all(tensor.shape for tensor in o.inputs)
        ),
        # LiteRT issue 9249
        "no SUM, which overflows in float16": lambda _, o: o.name == "SUM",
        # gpu_compatibility.cc of TensorFlow
        "operators of the GPU delegate": _is_not_of_the_gpu,
        # The GPU delegate's documentation
        "floating point": lambda _, o: any(tensor.dtype not in _FLOATS for tensor in o.outputs),
    },
    # LiteRT's documentation for MediaTek's compiler
    "npu": {**_BOTH, "operators of an NPU": lambda _, o: o.name not in _MEDIATEK},
}


def broken_rules(content: bytes, target: Target) -> dict[str, list[str]]:
    """Return the rules of a target that a file breaks, each with the operators that do."""
    graph = Graph(content)
    broken = {
        name: [_described(operator) for operator in graph.operators if is_broken(graph, operator)]
        for name, is_broken in RULES.get(target, {}).items()
    }
    if len(content) > _LARGEST_FILE:
        broken["less than 2 GiB"] = [f"the file of {len(content):,} bytes"]
    return {name: operators for name, operators in broken.items() if operators}


def _described(operator: Operator) -> str:
    reads, writes = (" and ".join(str(tensor.shape) for tensor in ends) for ends in (operator.inputs, operator.outputs))
    return f"{operator}, from {reads} to {writes}"


def require_rules(name: str, content: bytes, target: Target) -> None:
    """Raise ParityError, with the first operator of each broken rule, unless a file keeps the rules of a target."""
    if broken := broken_rules(content, target):
        listed = "; ".join(f"{rule}: {operators[0]}" for rule, operators in broken.items())
        raise ParityError(f"The {name} breaks rules for --target {target} ({listed}), so it was not kept.")


# A GPU in float16: every tensor of a file is rounded to float16 and back. GPUs of phones store tensors in float16. Sums
# inside an operator are computed in float32 here; some GPUs sum in float16, which no simulation of a file can know.

_ACTIVATIONS = {0: lambda x: x, 1: tf.nn.relu, 3: tf.nn.relu6, 4: tf.tanh}
_PADDINGS = {0: "SAME", 1: "VALID"}
_DTYPES = {"FLOAT32": np.float32, "FLOAT16": np.float16, "INT32": np.int32}


def run_in_half(content: bytes, expected: parity.Reference) -> np.ndarray:
    """Logits (n, K) of the sample images, from a float32 or float16 file with batch 1.

    Raises KeyError for operators that no delegate model has.
    """
    graph = Graph(content)
    image = tf.TensorSpec(graph.inputs[0].shape)
    compute = tf.function(lambda image: _run(graph, image), input_signature=[image], autograph=False)
    return np.concatenate([compute(image[None]).numpy() for _, images in expected.batches() for image in images])


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

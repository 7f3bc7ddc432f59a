"""Rules that a TFLite file must keep so that delegates of phones compute it completely and correctly.

They come from what delegates document, from errors that were reported for them, and from graphs that were run in
LiteRT's WebGPU accelerator (ai-edge-litert 2.3.0). Most of the errors give wrong numbers without a message.
"""

import dataclasses
from collections.abc import Callable, Iterable

from export.options import Target
from export.tflite.flatbuffer import Graph, Tensor
from keras_vit.errors import ParityError

_AXES = 4
_FLOATS = ("FLOAT32", "FLOAT16")
_POOLING = ("MAX_POOL_2D", "AVERAGE_POOL_2D")
_CONVOLUTIONS = ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV")
_LARGEST_FILE = 2**31 - 1  # offsets of a flatbuffer have 31 bits
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


@dataclasses.dataclass(frozen=True)
class OperatorRule:
    """A rule and the operators that break it."""

    name: str
    source: str
    """Where it comes from."""
    targets: tuple[Target, ...]
    broken_by: Callable[[Graph, bytes], Iterable[str]]
    """The operators, or other parts of the file, that break the rule."""


def _other_axes(graph: Graph, _) -> Iterable[str]:
    ends = {tensor.index for tensor in graph.outputs}
    for operator in graph.operators:
        for tensor in operator.outputs:
            fewer_at_an_end = tensor.index in ends and len(tensor.shape) < _AXES
            if len(tensor.shape) != _AXES and not fewer_at_an_end:
                yield f"{operator} writes a tensor of shape {tensor.shape}"


def _other_leading_dimension(graph: Graph, _) -> Iterable[str]:
    for operator in graph.operators:
        if any(tensor.shape[:1] not in ((1,), (-1,)) for tensor in operator.outputs):
            yield f"{operator} writes a tensor of shape {operator.outputs[0].shape}"


def _dynamic(graph: Graph, _) -> Iterable[str]:
    for operator in graph.operators:
        if any(-1 in tensor.shape for tensor in operator.outputs):
            yield f"{operator} writes a tensor of dynamic shape {operator.outputs[0].shape}"


def _broadcast_after_product(graph: Graph, _) -> Iterable[str]:
    products = {o.outputs[0].index for o in graph.operators if o.name == "BATCH_MATMUL"}
    for operator in graph.operators:
        adds_to_product = operator.name == "ADD" and products & {tensor.index for tensor in operator.inputs}
        if adds_to_product and len({tensor.shape for tensor in operator.inputs}) > 1:
            yield f"{operator} adds tensors of shapes {' and '.join(str(t.shape) for t in operator.inputs)}"


def _reads_an_end(graph: Graph, _) -> Iterable[str]:
    ends = {tensor.index for tensor in graph.outputs}
    for operator in graph.operators:
        if ends & {tensor.index for tensor in operator.inputs}:
            yield f"{operator} reads an output of the file"
    if ends & {tensor.index for tensor in graph.inputs}:
        yield "an input of the file is its output"


def _padded_pooling(graph: Graph, _) -> Iterable[str]:
    makers = {tensor.index: operator for operator in graph.operators for tensor in operator.outputs}
    for operator in graph.operators:
        before = makers.get(operator.inputs[0].index)
        padding = before.name if before is not None else ""
        merged = ("PAD", "PADV2") if operator.name in _POOLING else ("PADV2",) if operator.name in _CONVOLUTIONS else ()
        if padding in merged:
            yield f"{operator} reads {before}"


def _reordered_split(graph: Graph, _) -> Iterable[str]:
    splits = [{tensor.index for tensor in o.outputs} for o in graph.operators if o.name in ("SPLIT", "SPLIT_V")]
    for operator in graph.operators:
        if operator.name == "CONCATENATION" and {tensor.index for tensor in operator.inputs} in splits:
            yield f"{operator} joins all parts of a SPLIT"


def _constant_first_factor(graph: Graph, _) -> Iterable[str]:
    for operator in graph.operators:
        if operator.name == "BATCH_MATMUL" and graph.source(operator.inputs[0]).constant is not None:
            yield str(operator)


def _equal_factors(graph: Graph, _) -> Iterable[str]:
    for operator in graph.operators:
        if operator.name == "BATCH_MATMUL" and len({tensor.index for tensor in operator.inputs}) == 1:
            yield f"{operator} multiplies a tensor by itself"


def _unequal_batches(graph: Graph, _) -> Iterable[str]:
    for operator in graph.operators:
        if operator.name == "BATCH_MATMUL" and len({tensor.shape[:-2] for tensor in operator.inputs}) > 1:
            yield f"{operator} multiplies {' and '.join(str(tensor.shape) for tensor in operator.inputs)}"


def _scalars(graph: Graph, _) -> Iterable[str]:
    for operator in graph.operators:
        if operator.name in ("MAXIMUM", "DIV", "SQUARED_DIFFERENCE"):
            yield from (f"{operator} reads a constant without axes" for tensor in operator.inputs if not tensor.shape)


def _sums(graph: Graph, _) -> Iterable[str]:
    yield from (str(operator) for operator in graph.operators if operator.name == "SUM")


def _not_by_mediatek(graph: Graph, _) -> Iterable[str]:
    yield from (str(operator) for operator in graph.operators if operator.name not in _MEDIATEK)


def _not_by_the_gpu(graph: Graph, _) -> Iterable[str]:
    for operator in graph.operators:
        if operator.name not in _GPU:
            yield str(operator)
        elif operator.name == "STRIDED_SLICE" and any(
            getattr(operator.options, mask) for mask in ("ellipsisMask", "newAxisMask", "shrinkAxisMask")
        ):
            yield f"{operator} removes or adds axes"
        elif operator.name in ("ADD", "MUL", "SUB") and _both_broadcast(*operator.inputs):
            yield f"{operator} repeats both of its inputs"


def _both_broadcast(first: Tensor, second: Tensor) -> bool:
    sides = list(zip(first.shape[::-1], second.shape[::-1], strict=False))
    return any(a < b for a, b in sides) and any(a > b for a, b in sides)


def _not_float(graph: Graph, _) -> Iterable[str]:
    for operator in graph.operators:
        if any(tensor.dtype not in _FLOATS for tensor in operator.outputs):
            yield f"{operator} writes {operator.outputs[0].dtype}"


def _too_large(_, content: bytes) -> Iterable[str]:
    if len(content) > _LARGEST_FILE:
        yield f"the file of {len(content):,} bytes"


_ACCELERATOR = "LiteRT's WebGPU accelerator"
RULES = (
    OperatorRule("four axes", "LiteRT issues 8593, 8619 and 9272", ("gpu", "npu"), _other_axes),
    OperatorRule("leading dimension 1", "LiteRT issue 8619", ("gpu", "npu"), _other_leading_dimension),
    OperatorRule("static shapes", "the GPU delegate's documentation", ("gpu", "npu"), _dynamic),
    OperatorRule(
        "no broadcast addition to a batched product", "LiteRT issue 8619", ("gpu", "npu"), _broadcast_after_product
    ),
    OperatorRule("no output that is read again", "LiteRT issue 8599", ("gpu", "npu"), _reads_an_end),
    OperatorRule("no padding before pooling", _ACCELERATOR, ("gpu", "npu"), _padded_pooling),
    OperatorRule("no reordered split", _ACCELERATOR, ("gpu", "npu"), _reordered_split),
    OperatorRule("no constant as the first factor", _ACCELERATOR, ("gpu", "npu"), _constant_first_factor),
    OperatorRule("two different factors", _ACCELERATOR, ("gpu", "npu"), _equal_factors),
    OperatorRule("factors with equal batches", _ACCELERATOR, ("gpu", "npu"), _unequal_batches),
    OperatorRule("no constant without axes", _ACCELERATOR, ("gpu",), _scalars),
    OperatorRule("no SUM, which overflows in float16", "LiteRT issue 9249", ("gpu",), _sums),
    OperatorRule("operators of the GPU delegate", "gpu_compatibility.cc of TensorFlow", ("gpu",), _not_by_the_gpu),
    OperatorRule("floating point", "the GPU delegate's documentation", ("gpu",), _not_float),
    OperatorRule("operators of an NPU", "LiteRT's documentation for MediaTek's compiler", ("npu",), _not_by_mediatek),
    OperatorRule("less than 2 GiB", "the flatbuffer format", ("gpu", "npu"), _too_large),
)


def broken_rules(content: bytes, target: Target) -> dict[str, list[str]]:
    """The rules of a target that a file breaks, each with the operators that do."""
    graph = Graph(content)
    found = {rule.name: list(rule.broken_by(graph, content)) for rule in RULES if target in rule.targets}
    return {name: operators for name, operators in found.items() if operators}


def require_rules(name: str, content: bytes, target: Target) -> None:
    """Raise ParityError, with the first operator of each broken rule, unless a file keeps the rules of a target."""
    if broken := broken_rules(content, target):
        found = "; ".join(f"{rule}: {operators[0]}" for rule, operators in broken.items())
        raise ParityError(f"The {name} breaks rules for --target {target} ({found}), so it was not kept.")

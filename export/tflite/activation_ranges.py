"""What calibration images tell of a float32 TFLite file: ranges of its activations, and corrections of its biases.

A range by search has the least squared error of rounding and clipping, see "Post-training 4-bit quantization of
convolution networks" (arXiv 1810.05723), here measured on histograms. Corrected biases cancel the mean error of rounded
weights: "Data-Free Quantization" (arXiv 1906.04721) section 4.2, with measured means of the inputs.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from export.tflite.flatbuffer import pack, unpack
from keras_vit.cli.progress import tracked
from keras_vit.unknown_score import UNKNOWN_SCORE

_PRODUCTS = (schema.BuiltinOperator.FULLY_CONNECTED, schema.BuiltinOperator.CONV_2D)
# Bins of a histogram, and the shares of the extremes that are tried.
_BINS = 2048
_SHARES = np.linspace(0.3, 1.0, 71)
# Noise of a product by its ranges, relative to the variance of its outputs, from which it is called noisy.
_NOISY = 1e-3


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of activations with weights in a float32 file."""

    inputs: str
    """Name of the tensor that it reads."""
    outputs: str
    """Name of the tensor that it makes."""
    weights: np.ndarray
    """(units, D), or (units, height, width, D) of a convolution."""
    bias: int | None
    """Number of its buffer."""


def products(content: bytes) -> list[Product]:
    """Return the products with weights, in order, without those of the score of unknown images."""
    model = unpack(content)
    [subgraph] = model.subgraphs
    found = []
    for operator in subgraph.operators:
        if model.operatorCodes[operator.opcodeIndex].builtinCode not in _PRODUCTS:
            continue
        taken, weights = (subgraph.tensors[index] for index in operator.inputs[:2])
        bias = [subgraph.tensors[index].buffer for index in operator.inputs[2:] if index >= 0]
        data = model.buffers[weights.buffer].data
        made = subgraph.tensors[operator.outputs[0]].name.decode()
        if data is not None and not made.startswith(f"{UNKNOWN_SCORE}/"):
            values = np.frombuffer(np.asarray(data, np.uint8).tobytes(), np.float32).reshape(weights.shape)
            found.append(Product(taken.name.decode(), made, values, bias[0] if bias else None))
    return found


def with_weights(content: bytes, weights: Mapping[str, np.ndarray]) -> bytes:
    """Return the file with other weights of some products, by the name of the tensor that a product makes."""
    model = unpack(content)
    [subgraph] = model.subgraphs
    for operator in subgraph.operators:
        new = weights.get(subgraph.tensors[operator.outputs[0]].name.decode())
        if new is not None:
            buffer = model.buffers[subgraph.tensors[operator.inputs[1]].buffer]
            buffer.data = np.frombuffer(new.astype(np.float32).tobytes(), np.uint8)
    return pack(model)


def searched_ranges(
    content: bytes, extremes: Mapping[str, Mapping[str, np.ndarray]], images: Sequence[np.ndarray], bits: int
) -> dict[str, dict[str, np.ndarray]]:
    """Return for each tensor the range with the least squared error among those that shrink its extremes evenly.

    Args:
        content: the float32 file.
        extremes: "min" and "max" of each tensor over all calibration images, by tensor name.
        images: some inputs of the file.
        bits: of the activations.
    """
    ends = {name: (float(np.min(found["min"])), float(np.max(found["max"]))) for name, found in extremes.items()}
    histograms: dict[str, np.ndarray] = {}
    for tensors in activations(content, images, ends):
        for name, tensor in tensors.items():
            counts, _ = np.histogram(tensor, _BINS, ends[name])
            histograms[name] = histograms.get(name, 0) + counts
    shares = {name: _best_share(counts, *ends[name], bits) for name, counts in histograms.items()}
    return {
        name: {end: np.asarray(value * shares.get(name, 1.0), value.dtype) for end, value in found.items()}
        for name, found in extremes.items()
    }


def _best_share(counts: np.ndarray, low: float, high: float, bits: int) -> float:
    edges = np.linspace(low, high, len(counts) + 1)
    values = (edges[1:] + edges[:-1]) / 2.0
    low, high = min(low, 0.0), max(high, 0.0)  # a quantized range includes 0
    errors = []
    for share in _SHARES:
        clipped = np.clip(values, share * low, share * high)
        step = share * (high - low) / (2**bits - 1)
        errors.append(np.sum(counts * ((values - clipped) ** 2 + step**2 / 12.0)))
    return float(_SHARES[int(np.argmin(errors))])


def noisy_products(
    content: bytes, ranges: Mapping[str, Mapping[str, np.ndarray]], images: Sequence[np.ndarray], bits: int
) -> list[str]:
    """Return the outputs of the products whose inputs and outputs lose most in their ranges, by tensor name.

    Args:
        content: the float32 file.
        ranges: "min" and "max" of each tensor, by tensor name.
        images: some inputs of the file.
        bits: of the activations.
    """
    found = {product.outputs: product for product in products(content)}
    names = {name for product in found.values() for name in (product.inputs, product.outputs)}
    noise = dict.fromkeys(found, 0.0)
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in found}  # mean and mean square of each unit
    for tensors in activations(content, images, names):
        errors = {name: _error(tensor, ranges[name], bits) for name, tensor in tensors.items() if name in ranges}
        for name, product in found.items():
            if product.inputs in errors and name in errors:
                units = len(product.weights)
                # The errors of the inputs are independent, so their power is multiplied by that of the weights.
                noise[name] += np.mean(np.square(errors[product.inputs])) * np.sum(np.square(product.weights))
                noise[name] += np.mean(np.square(errors[name])) * units
                rows = tensors[name].reshape(-1, units).astype(np.float64)
                outputs[name].append(np.stack([rows.mean(axis=0), np.square(rows).mean(axis=0)]))
    noisy = []
    for name, moments in outputs.items():
        if moments:
            mean, square = np.mean(moments, axis=0)
            if noise[name] > _NOISY * len(moments) * np.sum(square - np.square(mean)):
                noisy.append(name)
    return noisy


def _error(tensor: np.ndarray, ends: Mapping[str, np.ndarray], bits: int) -> np.ndarray:
    """What rounding and clipping to a range takes from a tensor."""
    low, high = min(float(np.min(ends["min"])), 0.0), max(float(np.max(ends["max"])), 0.0)
    step = max(high - low, 1e-30) / (2**bits - 1)
    return tensor - np.clip(np.round(tensor / step) * step, low, high)


def with_corrected_biases(content: bytes, images: Sequence[np.ndarray]) -> bytes:
    """Return the file with biases less the mean error of products with weights in 8 bits, over some of its inputs.

    A bias whose numbers another operator reads too, as the converter stores equal ones once, stays as it is.
    """
    uses = _uses(content)
    dense = [found for found in products(content) if uses[found.bias] == 1 and found.weights.ndim == 2]
    sums: dict[str, np.ndarray] = {}
    for tensors in activations(content, images, {found.inputs for found in dense}):
        for name, tensor in tensors.items():
            sums[name] = sums.get(name, 0.0) + tensor.reshape(-1, tensor.shape[-1]).mean(axis=0, dtype=np.float64)
    model = unpack(content)
    for found in dense:
        steps = np.maximum(np.abs(found.weights).max(axis=1, keepdims=True), 1e-30) / 127.0
        error = (np.round(found.weights / steps) * steps - found.weights) @ (sums[found.inputs] / len(images))
        buffer = model.buffers[found.bias]
        bias = np.frombuffer(np.asarray(buffer.data, np.uint8).tobytes(), np.float32)
        buffer.data = np.frombuffer((bias - error).astype(np.float32).tobytes(), np.uint8)
    return pack(model)


def _uses(content: bytes) -> collections.Counter:
    """How many inputs of operators read each buffer."""
    model = unpack(content)
    [subgraph] = model.subgraphs
    read = (index for operator in subgraph.operators for index in operator.inputs if index >= 0)
    return collections.Counter(subgraph.tensors[index].buffer for index in read)


def activations(
    content: bytes, images: Sequence[np.ndarray], names: Collection[str]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the tensors of these names for each image; constants are left out."""
    interpreter = Interpreter(
        model_content=content,
        num_threads=2,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=True,  # otherwise tensors share memory
    )
    constants = {tensor.name.decode() for tensor in _constants(content)}
    interpreter.allocate_tensors()
    [taken] = interpreter.get_input_details()
    details = interpreter.get_tensor_details()
    numbers = {found["name"]: found["index"] for found in details if found["name"] in {*names} - constants}
    for image in tracked(images, "measuring activations"):
        interpreter.set_tensor(taken["index"], image)
        interpreter.invoke()
        yield {name: interpreter.get_tensor(number) for name, number in numbers.items()}


def _constants(content: bytes) -> list[schema.TensorT]:
    model = unpack(content)
    [subgraph] = model.subgraphs
    return [tensor for tensor in subgraph.tensors if model.buffers[tensor.buffer].data is not None]

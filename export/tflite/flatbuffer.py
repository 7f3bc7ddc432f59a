"""The graph of a TFLite file: its operators and tensors, and its products with weights, as Python objects."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from keras_vit.cli.progress import tracked
from keras_vit.scores import UNKNOWN_SCORE

_NAMES = {number: name for name, number in vars(schema.BuiltinOperator).items() if isinstance(number, int)}

_PRODUCTS = ("FULLY_CONNECTED", "CONV_2D")
# Noise of a product by its ranges, relative to the variance of its outputs, from which it is called noisy.
_NOISY = 1e-3


class _AlignedBuilder(flatbuffers.Builder):
    """Aligns byte vectors to 16 bytes, as kernels need. The Python library does not support `force_align`."""

    def StartVector(self, elemSize, numElems, alignment):  # noqa: N802, N803  (flatbuffers' names)
        return super().StartVector(elemSize, numElems, 16 if elemSize == 1 else alignment)


def unpack(content: bytes) -> schema.ModelT:
    """The file as objects, with all weights in their buffers."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    for buffer in model.buffers:
        if buffer.offset > 1:  # the quantizer may write weights after the flatbuffer
            buffer.data = np.frombuffer(content, np.uint8, buffer.size, buffer.offset)
            buffer.offset = buffer.size = 0
    return model


def pack(model: schema.ModelT) -> bytes:
    """The inverse of `unpack`."""
    builder = _AlignedBuilder(sum(0 if buffer.data is None else len(buffer.data) for buffer in model.buffers) + 2**20)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the graph."""

    index: int
    name: str
    shape: tuple[int, ...]
    """With -1 where it is dynamic."""
    dtype: str
    """Such as "FLOAT32"."""
    constant: np.ndarray | None
    """Its bytes, if it is a constant."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator of the graph, in the order of execution."""

    number: int
    name: str
    """Such as "CONV_2D"."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    options: Any

    def __str__(self) -> str:
        return f"{self.name} (number {self.number})"


class Graph:
    """The first subgraph of a file, which has one for inference."""

    def __init__(self, content: bytes):
        self._model = unpack(content)
        self._subgraph = self._model.subgraphs[0]
        self.inputs = tuple(self.tensor(index) for index in self._subgraph.inputs)
        self.outputs = tuple(self.tensor(index) for index in self._subgraph.outputs)
        operators = [self._operator(*numbered) for numbered in enumerate(self._subgraph.operators)]
        # Weights in half precision have a DEQUANTIZE before them, which is computed once.
        self.operators = tuple(o for o in operators if any(tensor.constant is None for tensor in o.inputs))
        self._constants = {o.outputs[0].index: o.inputs[0] for o in operators if o not in self.operators}

    def source(self, tensor: Tensor) -> Tensor:
        """The constant behind a tensor: itself, or the input of the DEQUANTIZE that computes it."""
        return self._constants.get(tensor.index, tensor)

    def _operator(self, number: int, operator: schema.OperatorT) -> Operator:
        code = self._model.operatorCodes[operator.opcodeIndex]
        name = _NAMES[max(code.builtinCode, code.deprecatedBuiltinCode)]
        inputs, outputs = (
            tuple(self.tensor(index) for index in part if index >= 0) for part in (operator.inputs, operator.outputs)
        )
        return Operator(number, name, inputs, outputs, operator.builtinOptions)

    @functools.cache  # noqa: B019  (a graph lives as long as its file is checked)
    def tensor(self, index: int) -> Tensor:
        """A tensor by its index."""
        found = self._subgraph.tensors[index]
        shape = found.shapeSignature if found.shapeSignature is not None else found.shape
        data = self._model.buffers[found.buffer].data
        return Tensor(
            index=int(index),
            name=(found.name or b"").decode(),
            shape=() if shape is None else tuple(int(side) for side in shape),
            dtype=next(name for name, number in vars(schema.TensorType).items() if number == found.type),
            constant=None if data is None else np.asarray(data),
        )


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of activations with weights in a float32 file."""

    inputs: str
    """Name of the tensor that it reads."""
    outputs: str
    """Name of the tensor that it makes."""
    weights: np.ndarray
    """(units, D), or (units, height, width, D) of a convolution."""


def products(content: bytes) -> list[Product]:
    """Return the products with weights, in order, without those of the score of unknown images."""
    found = []
    for operator in Graph(content).operators:
        if operator.name in _PRODUCTS and not operator.outputs[0].name.startswith(f"{UNKNOWN_SCORE}/"):
            taken, weights = operator.inputs[:2]
            if weights.constant is not None:
                values = np.frombuffer(weights.constant.tobytes(), np.float32).reshape(weights.shape)
                found.append(Product(taken.name, operator.outputs[0].name, values))
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


def noisy_products(
    content: bytes, ranges: Mapping[str, Mapping[str, np.ndarray]], images: Sequence[np.ndarray]
) -> list[str]:
    """Return the outputs of the products whose inputs and outputs lose most in their ranges in 8 bits, by tensor name.

    ranges: "min" and "max" of each tensor of the float32 file, by tensor name. images: some inputs of it.
    """
    found = {product.outputs: product for product in products(content)}
    names = {name for product in found.values() for name in (product.inputs, product.outputs)}
    noise = dict.fromkeys(found, 0.0)
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in found}  # mean and mean square of each unit
    for tensors in activations(content, images, names):
        errors = {name: _error(tensor, ranges[name]) for name, tensor in tensors.items() if name in ranges}
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


def _error(tensor: np.ndarray, ends: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the loss of a tensor by rounding and clipping to a range."""
    low, high = min(float(np.min(ends["min"])), 0.0), max(float(np.max(ends["max"])), 0.0)
    step = max(high - low, 1e-30) / 255.0
    return tensor - np.clip(np.round(tensor / step) * step, low, high)


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
    model = unpack(content)
    [subgraph] = model.subgraphs
    constants = {each.name.decode() for each in subgraph.tensors if model.buffers[each.buffer].data is not None}
    interpreter.allocate_tensors()
    [taken] = interpreter.get_input_details()
    details = interpreter.get_tensor_details()
    numbers = {found["name"]: found["index"] for found in details if found["name"] in {*names} - constants}
    for image in tracked(images, "measuring activations"):
        interpreter.set_tensor(taken["index"], image)
        interpreter.invoke()
        yield {name: interpreter.get_tensor(number) for name, number in numbers.items()}

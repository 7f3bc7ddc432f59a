"""The graph of a TFLite file: its operators and tensors, as Python objects."""

import dataclasses
import functools
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

_NAMES = {number: name for name, number in vars(schema.BuiltinOperator).items() if isinstance(number, int)}


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
    """Its options, as in the schema of TFLite."""

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
            shape=() if shape is None else tuple(int(side) for side in shape),
            dtype=next(name for name, number in vars(schema.TensorType).items() if number == found.type),
            constant=None if data is None else np.asarray(data),
        )

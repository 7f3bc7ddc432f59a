"""The messages of the gRPC API of TF Serving that the client and the warm-up requests use.

Field names and numbers are those of tensorflow_serving/apis/*.proto and tensorflow/core/{framework,example}/*.proto, so
the messages are compatible. The official package `tensorflow-serving-api` depends on the `tensorflow` wheel, which
conflicts with tensorflow-cpu, and a client should not need TensorFlow at all. The classes are in a separate descriptor
pool, so that a process can import the official ones too.
"""

import math
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

from .answers import LARGEST_MESSAGE

_PACKAGE = "tensorflow.serving"
_INT64_VALUE = ".google.protobuf.Int64Value"
# message: {field: (number, type)}. "*" is a repeated field, {…} a map from strings, and a capitalized type a message.
_MESSAGES = {
    "ModelSpec": {"name": (1, "string"), "version": (2, _INT64_VALUE), "signature_name": (3, "string"),
                  "version_label": (4, "string")},
    "Dim": {"size": (1, "int64")},
    "TensorShape": {"dim": (2, "*Dim")},
    "Tensor": {"dtype": (1, "int32"), "tensor_shape": (2, "TensorShape"), "tensor_content": (4, "bytes"),
               "float_val": (5, "*float"), "double_val": (6, "*double"), "int_val": (7, "*int32"),
               "string_val": (8, "*bytes"), "int64_val": (10, "*int64"), "bool_val": (11, "*bool")},
    "PredictRequest": {"model_spec": (1, "ModelSpec"), "inputs": (2, "{Tensor}"), "output_filter": (3, "*string")},
    "PredictResponse": {"outputs": (1, "{Tensor}"), "model_spec": (2, "ModelSpec")},
    "BytesList": {"value": (1, "*bytes")},
    "Feature": {"bytes_list": (1, "BytesList")},
    "Features": {"feature": (1, "{Feature}")},
    "Example": {"features": (1, "Features")},
    "ExampleList": {"examples": (1, "*Example")},
    "Input": {"example_list": (1, "ExampleList")},
    "ClassificationRequest": {"model_spec": (1, "ModelSpec"), "input": (2, "Input")},
    "Class": {"label": (1, "string"), "score": (2, "float")},
    "Classifications": {"classes": (1, "*Class")},
    "ClassificationResult": {"classifications": (1, "*Classifications")},
    "ClassificationResponse": {"result": (1, "ClassificationResult"), "model_spec": (2, "ModelSpec")},
    "ClassifyLog": {"request": (1, "ClassificationRequest"), "response": (2, "ClassificationResponse")},
    "PredictLog": {"request": (1, "PredictRequest"), "response": (2, "PredictResponse")},
    "PredictionLog": {"classify_log": (2, "ClassifyLog"), "predict_log": (6, "PredictLog")},
}  # fmt: skip


def _classes() -> dict[str, Any]:
    """Message classes by name; type checkers do not know their fields."""
    file = descriptor_pb2.FileDescriptorProto(name="serving_client.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(wrappers_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            added = message.field.add(name=field, number=number)
            repeated = kind[0] in "*{"
            added.label = added.LABEL_REPEATED if repeated else added.LABEL_OPTIONAL
            if kind[0] == "{":
                kind = _add_map_entry(message, field, kind.strip("{}"))
            _set_type(added, kind.removeprefix("*"))
    pool = descriptor_pool.DescriptorPool()
    wrappers = descriptor_pb2.FileDescriptorProto()
    wrappers_pb2.DESCRIPTOR.CopyToProto(wrappers)
    pool.Add(wrappers)
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES)
    return {descriptor.name: message_factory.GetMessageClass(descriptor) for descriptor in found}


def _add_map_entry(message: descriptor_pb2.DescriptorProto, field: str, value: str) -> str:
    """Add the key-value message of a map field, and return its name."""
    name = f"{field.title().replace('_', '')}Entry"
    entry = message.nested_type.add(name=name, options=descriptor_pb2.MessageOptions(map_entry=True))
    for number, (part, kind) in enumerate((("key", "string"), ("value", value)), 1):
        _set_type(entry.field.add(name=part, number=number, label=1), kind)
    return f"{message.name}.{name}"


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind[0].islower():
        field.type = getattr(field, f"TYPE_{kind.upper()}")
    else:
        field.type = field.TYPE_MESSAGE
        field.type_name = kind if kind[0] == "." else f".{_PACKAGE}.{kind}"


# The message classes by name.
CLASSES = _classes()
PredictRequest, PredictResponse = CLASSES["PredictRequest"], CLASSES["PredictResponse"]
PredictionLog = CLASSES["PredictionLog"]
ClassificationRequest, ClassificationResponse = CLASSES["ClassificationRequest"], CLASSES["ClassificationResponse"]

# NumPy dtype -> number in tensorflow/core/framework/types.proto, and the field of its values.
_DTYPES: dict[np.dtype, tuple[int, str]] = {
    np.dtype(np.float32): (1, "float_val"),
    np.dtype(np.float64): (2, "double_val"),
    np.dtype(np.int32): (3, "int_val"),
    np.dtype(np.uint8): (4, "int_val"),
    np.dtype(np.int64): (9, "int64_val"),
    np.dtype(np.bool_): (10, "bool_val"),
}
_STRING = 7


def put_tensor(target, value) -> None:
    """Fill a Tensor message with an array of numbers or a list of bytes."""
    if not isinstance(value, np.ndarray):
        target.dtype = _STRING
        target.tensor_shape.dim.add(size=len(value))
        target.string_val.extend(value)
        return
    if value.dtype not in _DTYPES:
        raise TypeError(f"A tensor is an array of numbers or a list of bytes, but is {value.dtype}.")
    target.dtype = _DTYPES[value.dtype][0]
    for size in value.shape:
        target.tensor_shape.dim.add(size=size)
    target.tensor_content = np.ascontiguousarray(value).tobytes()


def to_array(tensor) -> np.ndarray:
    """Convert a Tensor message to an array. Strings become an object array of bytes.

    Raises ValueError if type, shape and values of the message do not match.
    """
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    dtype, field = _type_of(tensor.dtype)
    size = math.prod(shape)
    if min(shape, default=0) < 0 or size * dtype.itemsize > LARGEST_MESSAGE:
        raise ValueError(f"A tensor of shape {shape} cannot be read; sizes are at least 0 and the whole is in memory.")
    if tensor.tensor_content:
        return np.frombuffer(tensor.tensor_content, dtype).reshape(shape)
    values = np.empty(len(getattr(tensor, field)), dtype)
    values[:] = list(getattr(tensor, field))
    # A single value fills the tensor, as TensorFlow writes constants.
    return np.broadcast_to(values, shape) if values.size == 1 and field != "string_val" else values.reshape(shape)


def _type_of(number: int) -> tuple[np.dtype, str]:
    """NumPy dtype of a number of types.proto, and the field of its values."""
    if number == _STRING:
        return np.dtype(object), "string_val"
    for dtype, (candidate, field) in _DTYPES.items():
        if candidate == number:
            return dtype, field
    raise ValueError(f"A tensor has the type {number}, which is none of {[code for code, _ in _DTYPES.values()]}.")

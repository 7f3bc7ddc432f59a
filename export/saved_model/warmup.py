"""Warm-up requests of a SavedModel, which TF Serving runs before a new version takes traffic.

TensorFlow creates kernels and allocates memory in the first call of each signature. Without warm-up requests the first
users of a version have to wait. Format: TFRecord of tensorflow.serving.PredictionLog in assets.extra. The messages have
few fields, so they are written here: the package tensorflow-serving-api conflicts with tensorflow-cpu.
"""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from export.saved_model.signatures import ENCODED
from keras_vit.errors import ParityError

FILE = pathlib.Path("assets.extra") / "tf_serving_warmup_requests"


def write_requests(
    directory: pathlib.Path, signatures: Mapping, image_file: bytes, image_shape: Sequence[int]
) -> list[str]:
    """Write one request per signature, call the signature with it, and return the names of the signatures.

    Raises ParityError unless each call returns one row per output.

    Args:
        directory: of the SavedModel.
        signatures: concrete functions of the loaded SavedModel by name.
        image_file: input of signatures that take image files.
        image_shape: (h, w, C) of the black image for the other signatures.
    """
    path = directory / FILE
    path.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for name, function in sorted(signatures.items()):
            (argument,) = function.structured_input_signature[1].values()
            if argument.name == "inputs":
                feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[image_file]))
                example = tf.train.Example(features=tf.train.Features(feature={ENCODED: feature})).SerializeToString()
                value = tf.constant([example])
                writer.write(_classify_log(name, example))
            else:
                black = tf.zeros((1, *image_shape), argument.dtype) if argument.dtype != tf.string else None
                value = tf.constant([image_file]) if black is None else black
                writer.write(_predict_log(name, argument.name, value.numpy()))
            outputs = function(**{argument.name: value})
            if not all(len(tensor) == 1 for tensor in outputs.values()):
                raise ParityError(f"The warm-up request of {name} did not return one result; nothing was exported.")
    return sorted(signatures)


def _classify_log(signature: str, example: bytes) -> bytes:
    """Return PredictionLog.classify_log.request with its input.example_list.examples and model_spec."""
    request = _field(1, _model_spec(signature)) + _field(2, _field(1, _field(1, example)))
    return _field(2, _field(1, request))


def _predict_log(signature: str, argument: str, value: np.ndarray) -> bytes:
    """Return PredictionLog.predict_log.request with one entry of its map of inputs, and model_spec."""
    tensor = tf.make_tensor_proto(value).SerializeToString()
    entry = _field(1, argument.encode()) + _field(2, tensor)
    return _field(6, _field(1, _field(1, _model_spec(signature)) + _field(2, entry)))


def _model_spec(signature: str) -> bytes:
    return _field(3, signature.encode())


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message: its number with the wire type of bytes, the length, and the content."""
    length, encoded = len(content), bytearray([number << 3 | 2])
    while length > 127:
        encoded.append(length & 127 | 128)
        length >>= 7
    return bytes([*encoded, length]) + content

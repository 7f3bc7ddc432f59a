"""Warm-up requests of a SavedModel, which TF Serving runs before a new version takes traffic.

TensorFlow creates kernels and allocates memory in the first call of each signature. Without warm-up requests the first
users of a version have to wait. Format: TFRecord of tensorflow.serving.PredictionLog in assets.extra.
"""

import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from export.saved_model.signatures import ENCODED
from export.serving.client.messages import PredictionLog, put_tensor, to_array
from keras_vit.errors import ParityError

FILE = pathlib.Path("assets.extra") / "tf_serving_warmup_requests"


def write_requests(directory: pathlib.Path, signatures: Mapping, image_file: bytes, image_shape: Sequence[int]) -> None:
    """Write one request per signature.

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
            writer.write(_request(name, function, image_file, image_shape).SerializeToString())


def _request(name: str, function, image_file: bytes, image_shape: Sequence[int]):
    log = PredictionLog()
    (argument,) = function.structured_input_signature[1].values()
    if argument.name == "inputs":
        request = log.classify_log.request
        feature = request.input.example_list.examples.add().features.feature[ENCODED]
        feature.bytes_list.value.append(image_file)
    else:
        request = log.predict_log.request
        black = np.zeros((1, *image_shape), argument.dtype.as_numpy_dtype)
        put_tensor(request.inputs[argument.name], [image_file] if argument.dtype == tf.string else black)
    request.model_spec.signature_name = name
    return log


def replay(directory: pathlib.Path, signatures: Mapping) -> list[str]:
    """Read the requests and call their signatures. Returns the names of the signatures.

    Raises ParityError unless there is one request per signature and each call succeeds.
    """
    names = []
    for name, argument, value in _read(directory):
        outputs = signatures[name](**{argument: tf.constant(value)})
        if not all(len(tensor) == 1 for tensor in outputs.values()):
            raise ParityError(f"The warm-up request of {name} did not return one result, so the export was discarded.")
        names.append(name)
    if sorted(names) != sorted(signatures):
        raise ParityError(
            f"The warm-up requests are for {names}, not for {sorted(signatures)}, so the export was discarded."
        )
    return names


def _read(directory: pathlib.Path) -> Iterator[tuple[str, str, np.ndarray | list[bytes]]]:
    """Signature, argument name and value of each request."""
    for record in tf.data.TFRecordDataset(str(directory / FILE)).as_numpy_iterator():
        log = PredictionLog.FromString(record)
        if log.HasField("classify_log"):
            request = log.classify_log.request
            examples = [example.SerializeToString() for example in request.input.example_list.examples]
            yield request.model_spec.signature_name, "inputs", examples
        else:
            request = log.predict_log.request
            ((argument, tensor),) = request.inputs.items()
            yield request.model_spec.signature_name, argument, to_array(tensor)

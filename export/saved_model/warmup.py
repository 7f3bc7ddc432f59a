"""The requests that TF Serving plays through a new version before it takes traffic: assets.extra of a SavedModel.

TensorFlow builds its kernels and reserves memory at the first call of each signature, so without them the first users
of every version wait. Format: TFRecord of tensorflow.serving.PredictionLog.
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
    """Write one request for each of the signatures, those of a loaded SavedModel: the image file, or a black image.

    Args:
        directory: of the SavedModel.
        signatures: concrete functions by name.
        image_file: for signatures that take files.
        image_shape: (H, W, C) for the others.
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
    """Read the file back and call what it asks for. Returns the signatures in their order.

    Raises ParityError unless every one of the signatures is there and answers.
    """
    names = []
    for name, argument, value in _read(directory):
        answer = signatures[name](**{argument: tf.constant(value)})
        if not all(len(tensor) == 1 for tensor in answer.values()):
            raise ParityError(f"The warm-up request of {name} was not answered for one image, so it was not kept.")
        names.append(name)
    if sorted(names) != sorted(signatures):
        raise ParityError(f"The warm-up requests are of {names}, not of {sorted(signatures)}, so they were not kept.")
    return names


def _read(directory: pathlib.Path) -> Iterator[tuple[str, str, np.ndarray | list[bytes]]]:
    """Signature, argument and value of each request."""
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

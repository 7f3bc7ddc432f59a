"""Writes ONNX and OpenVINO files with the exporters of Keras; their packages are imported inside functions."""

import contextlib
import dataclasses
import json
import logging
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence

import keras

from export.onnx.runtimes import FILES, import_openvino
from export.options import OnnxFormat
from keras_vit import UserError, preprocessing_of
from keras_vit.errors import ParityError, explained

# From this version of the operators on ONNX Runtime sees the norms of the model, see `export.inference_model`.
_OPSET: dict[OnnxFormat, dict[str, int]] = {"onnx": {"opset_version": 18}, "openvino": {}}
# An ONNX file is one protobuf message of less than 2 GiB, which holds the weights and the graph.
_MOST_WEIGHT_BYTES = 2**31 - 2**24


def check_size(kind: OnnxFormat, model: keras.Model) -> None:
    """Raise UserError if the model is too large for the format."""
    weight_bytes = 4 * model.count_params()
    if kind == "onnx" and weight_bytes > _MOST_WEIGHT_BYTES:
        raise UserError(
            f"The weights take {weight_bytes:,} bytes, but an ONNX file holds at most {_MOST_WEIGHT_BYTES:,}; export "
            "a SavedModel with `keras-vit saved-model`."
        )


def write_onnx(
    model: keras.Model,
    kind: OnnxFormat,
    directory: pathlib.Path,
    labels: Sequence[str],
    about: Mapping[str, str],
    output: str = "logits",
) -> None:
    """Write the files of a format for any batch size.

    Args:
        model: in float32, from `inference_model` with `for_onnx`.
        kind: the format.
        directory: for the files.
        labels: class names. The ONNX file stores them and the preprocessing as metadata.
        about: further texts for the metadata of the ONNX file.
        output: name of the output, of which there is one unless the model has a dict.
    """
    named = model if isinstance(model.output, dict) else keras.Model(model.input, {output: model.output})
    image = keras.InputSpec(shape=model.input_shape, dtype="float32", name="image")
    path = directory / FILES[kind][0]
    with _silenced():
        if kind == "openvino":
            import_openvino()
        named.export(str(path), format=kind, verbose=False, input_signature=[image], **_OPSET[kind])
    if kind == "onnx":
        _finish(path, model, labels, about)


def _finish(path: pathlib.Path, model: keras.Model, labels: Sequence[str], about: Mapping[str, str]) -> None:
    """Add the metadata and the name of the batch axis to an ONNX file. Raises ParityError unless the file is valid.

    tf2onnx writes an unsupported operator under its TensorFlow name, and only logs a message.
    """
    import onnx

    written = onnx.load(path)
    unsupported = sorted({node.op_type for node in written.graph.node if not onnx.defs.has(node.op_type, node.domain)})
    if unsupported:
        raise ParityError(
            f"The ONNX file has operators that ONNX does not support ({', '.join(unsupported)}), so it was not kept."
        )
    for end in (*written.graph.input, *written.graph.output):
        end.type.tensor_type.shape.dim[0].dim_param = "batch"
    preprocessing = dataclasses.asdict(preprocessing_of(model))
    onnx.helper.set_model_props(
        written, {"labels": json.dumps(list(labels)), "preprocessing": json.dumps(preprocessing), **about}
    )
    with explained(
        lambda reason: f"The ONNX file is not valid ({reason}), so it was not kept.",
        *(onnx.checker.ValidationError, onnx.shape_inference.InferenceError),
        kind=ParityError,
    ):
        onnx.checker.check_model(written, full_check=True)
    onnx.save(written, path)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Hide NumPy deprecation warnings of the Keras exporter, and log messages of tf2onnx, which `_finish` checks."""
    logger = logging.getLogger("tf2onnx")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)

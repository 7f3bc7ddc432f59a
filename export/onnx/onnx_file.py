"""ONNX files: written with the exporter of Keras, and opened in ONNX Runtime.

The packages of requirements-onnx.txt are imported inside functions, so that the command can report missing packages.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np

from export import report
from keras_vit import UserError, preprocessing_of
from keras_vit.errors import ParityError, explained

# Takes images (B, h, w, C) float32 and returns the outputs by name, such as logits (B, K).
Runner = Callable[[np.ndarray], dict[str, np.ndarray]]

FILE = "model.onnx"
PACKAGES = ("onnx", "onnxruntime", "tf2onnx")
REQUIREMENTS = "export/requirements-onnx.txt"
# From this version of the operators on ONNX Runtime sees the norms of the model, see `export.inference_model`.
_OPSET = 18
# An ONNX file is one protobuf message of less than 2 GiB, which holds the weights and the graph.
_MOST_WEIGHT_BYTES = 2**31 - 2**24


def require_packages(packages: Sequence[str] = PACKAGES) -> None:
    """Raise UserError if a package is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"This needs {', '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed; "
            f'run `pip install ".[onnx]"` in a checkout, or without one `pip install {" ".join(missing)}`.'
        )


def check_size(model: keras.Model) -> None:
    """Raise UserError if the model is too large for a file."""
    weight_bytes = 4 * model.count_params()
    if weight_bytes > _MOST_WEIGHT_BYTES:
        raise UserError(
            f"The weights take {weight_bytes:,} bytes, but an ONNX file holds at most {_MOST_WEIGHT_BYTES:,}; export "
            "a SavedModel with `keras-vit saved-model`."
        )


def write(model: keras.Model, path: pathlib.Path, labels: Sequence[str], about: Mapping[str, str]) -> None:
    """Write a file for any batch size.

    Args:
        model: in float32, from `inference_model` with `for_onnx`; one output is named logits.
        path: of the file.
        labels: class names, which it stores with the preprocessing as metadata.
        about: further texts for the metadata.

    Raises ParityError unless the file is valid.
    """
    named = model if isinstance(model.output, dict) else keras.Model(model.input, {"logits": model.output})
    image = keras.InputSpec(shape=model.input_shape, dtype="float32", name="image")
    with _silenced():
        named.export(str(path), format="onnx", verbose=False, input_signature=[image], opset_version=_OPSET)
    _finish(path, model, labels, about)


def _finish(path: pathlib.Path, model: keras.Model, labels: Sequence[str], about: Mapping[str, str]) -> None:
    """Add the metadata and the name of the batch axis.

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


def open_file(file: pathlib.Path, threads: int = 0) -> Runner:
    """Load a file as a function from images to outputs. With 0 threads ONNX Runtime chooses the number."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [end.name for end in session.get_outputs()]
    return lambda images: dict(zip(names, session.run(names, {"image": images}), strict=True))


def operators(file: pathlib.Path) -> dict[str, int]:
    """Return the number of operators by name, the most frequent first, without constants."""
    import onnx

    return report.operator_table(node.op_type for node in onnx.load(file).graph.node)


def versions() -> dict[str, str]:
    """Return the versions of the packages that write and run a file."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


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

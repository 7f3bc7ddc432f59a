"""Writes ONNX and OpenVINO files with the exporters of Keras, and runs them in their runtimes.

The packages of requirements-onnx.txt are imported inside functions, so that the command can report missing packages.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np

from export import report
from export.options import OnnxFormat
from keras_vit import UserError, preprocessing_of
from keras_vit.errors import ParityError, explained

# Takes images (B, h, w, C) float32 and returns logits (B, K).
Runner = Callable[[np.ndarray], np.ndarray]

# Files of each format; a runtime loads the first one.
FILES: dict[OnnxFormat, tuple[str, ...]] = {"onnx": ("model.onnx",), "openvino": ("model.xml", "model.bin")}
_PACKAGES: dict[OnnxFormat, tuple[str, ...]] = {"onnx": ("onnx", "onnxruntime", "tf2onnx"), "openvino": ("openvino",)}
REQUIREMENTS = "export/requirements-onnx.txt"
# From this version of the operators on ONNX Runtime sees the norms of the model, see `export.inference_model`.
_OPERATORS: dict[OnnxFormat, dict[str, int]] = {"onnx": {"opset_version": 18}, "openvino": {}}
# An ONNX file is one protobuf message of less than 2 GiB, which holds the weights and the graph.
_MOST_WEIGHT_BYTES = 2**31 - 2**24


def require_packages(formats: Sequence[OnnxFormat]) -> None:
    """Raise UserError if a package that writes or runs the formats is not installed."""
    needed = [package for kind in formats for package in _PACKAGES[kind]]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"An export as {' and '.join(formats)} needs {', '.join(missing)}, which "
            f"{'are' if len(missing) > 1 else 'is'} not installed; run "
            f'`pip install ".[onnx]"` in a checkout, or without one `pip install {" ".join(missing)}`.'
        )


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
            _openvino()
        named.export(str(path), format=kind, verbose=False, input_signature=[image], **_OPERATORS[kind])
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


def open_file(file: pathlib.Path, kind: OnnxFormat, threads: int = 0, output: str = "logits") -> Runner:
    """Load a file as a function from images to logits, or another output.

    With 0 threads the runtime chooses the number.

    OpenVINO is set to float32. By default it uses bfloat16 if the processor supports it.
    """
    if kind == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return lambda images: session.run([output], {"image": images})[0]
    settings = {"INFERENCE_PRECISION_HINT": "f32", **({"INFERENCE_NUM_THREADS": threads} if threads else {})}
    compiled = _openvino().compile_model(str(file), "CPU", settings)
    return lambda images: compiled({"image": images})[output]


def default_precision(file: pathlib.Path) -> tuple[str, Runner]:
    """Default precision of OpenVINO on this processor ("f32", "bf16", "f16"), and the file loaded with it."""
    compiled = _openvino().compile_model(str(file), "CPU")
    name = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    return name, lambda images: compiled({"image": images})["logits"]


def _openvino():
    """Import OpenVINO without its telemetry, which reports imports and conversions to Google Analytics and writes an
    identifier to the home directory.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # blocks the import
    import openvino

    return openvino


def operators(file: pathlib.Path, kind: OnnxFormat) -> dict[str, int]:
    """Number of operators by name, the most frequent first, without constants."""
    if kind == "onnx":
        import onnx

        return report.operator_table(node.op_type for node in onnx.load(file).graph.node)
    found = (node.get_type_name() for node in _openvino().Core().read_model(file).get_ops())
    return report.operator_table(name for name in found if name not in ("Constant", "Parameter", "Result"))


def versions(kind: OnnxFormat) -> dict[str, str]:
    """Versions of the packages that write and run a format."""
    return {package: importlib.metadata.version(package) for package in _PACKAGES[kind]}


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

"""ONNX and OpenVINO files: written by Keras' exporters, finished, and run by the runtimes that will run them.

The packages are those of requirements-onnx.txt. They are imported where they are used, so that the command can say what
is missing.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np

from export import report
from export.options import OnnxFormat
from keras_vit import UserError, preprocessing_of
from keras_vit.errors import ParityError

# Answers (B, H, W, C) float32 with logits (B, K).
Runner = Callable[[np.ndarray], np.ndarray]

# The file that a runtime is given, and all files of the format.
FILES: dict[OnnxFormat, tuple[str, ...]] = {"onnx": ("model.onnx",), "openvino": ("model.xml", "model.bin")}
_PACKAGES: dict[OnnxFormat, tuple[str, ...]] = {"onnx": ("onnx", "onnxruntime", "tf2onnx"), "openvino": ("openvino",)}
REQUIREMENTS = "export/requirements-onnx.txt"
# An ONNX file is one protobuf message, of less than 2 GiB; its graph takes some of them.
_MOST_WEIGHT_BYTES = 2**31 - 2**24
# Calls of which the time is taken after as many to warm up, and seconds that they may take in all.
_REPEATS, _LONGEST = 50, 5.0


def require_packages(formats: Sequence[OnnxFormat]) -> None:
    """Raise UserError where what writes and runs the formats is not installed."""
    needed = [package for kind in formats for package in _PACKAGES[kind]]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"An export as {' and '.join(formats)} needs {', '.join(missing)}, not installed here; run "
            f"`pip install -r {REQUIREMENTS}`."
        )


def require_room(kind: OnnxFormat, model: keras.Model) -> None:
    """Raise UserError for a model that the format cannot hold."""
    weight_bytes = 4 * model.count_params()
    if kind == "onnx" and weight_bytes > _MOST_WEIGHT_BYTES:
        raise UserError(
            f"The weights take {weight_bytes:,} bytes, but an ONNX file holds at most {_MOST_WEIGHT_BYTES:,}; export "
            "a SavedModel with `python -m export.saved_model`."
        )


def write(model: keras.Model, kind: OnnxFormat, directory: pathlib.Path, labels: Sequence[str]) -> None:
    """Write the files of a format for any batch.

    Args:
        model: in float32, from `inference_model` with `for_onnx`.
        kind: the format.
        directory: where.
        labels: of the classes; the ONNX file holds them, and the preprocessing, as metadata.
    """
    named = keras.Model(model.input, {"logits": model.output})
    image = keras.InputSpec(shape=model.input_shape, dtype="float32", name="image")
    path = directory / FILES[kind][0]
    with _silenced():
        if kind == "openvino":
            _openvino()
        named.export(str(path), format=kind, verbose=False, input_signature=[image])
    if kind == "onnx":
        _finish(path, model, labels)


def _finish(path: pathlib.Path, model: keras.Model, labels: Sequence[str]) -> None:
    """Give an ONNX file its metadata, and its batch a name. Raises ParityError unless it is valid.

    tf2onnx writes an operator that it does not know under TensorFlow's name, and only logs it.
    """
    import onnx

    written = onnx.load(path)
    unknown = sorted({node.op_type for node in written.graph.node if not onnx.defs.has(node.op_type, node.domain)})
    if unknown:
        raise ParityError(
            f"The ONNX file has operators that ONNX does not know ({', '.join(unknown)}), so it was not kept."
        )
    for end in (*written.graph.input, *written.graph.output):
        end.type.tensor_type.shape.dim[0].dim_param = "batch"
    preprocessing = dataclasses.asdict(preprocessing_of(model))
    onnx.helper.set_model_props(
        written, {"labels": json.dumps(list(labels)), "preprocessing": json.dumps(preprocessing)}
    )
    try:
        onnx.checker.check_model(written, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ParityError(f"The ONNX file is not valid ({reason}), so it was not kept.") from error
    onnx.save(written, path)


def open_file(file: pathlib.Path, kind: OnnxFormat, threads: int = 0) -> Runner:
    """A file, loaded afresh, as a function; 0 threads are as many as the runtime likes.

    OpenVINO computes in float32 here; left to itself it takes bfloat16 where the processor has it.
    """
    if kind == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return lambda images: session.run(["logits"], {"image": images})[0]
    settings = {"INFERENCE_PRECISION_HINT": "f32", **({"INFERENCE_NUM_THREADS": threads} if threads else {})}
    compiled = _openvino().compile_model(str(file), "CPU", settings)
    return lambda images: compiled({"image": images})["logits"]


def own_precision(file: pathlib.Path) -> tuple[str, Runner]:
    """The arithmetic that OpenVINO takes by itself on this processor ("f32", "bf16", "f16"), and the file run in it."""
    compiled = _openvino().compile_model(str(file), "CPU")
    name = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    return name, lambda images: compiled({"image": images})["logits"]


def _openvino():
    """OpenVINO without its telemetry, which tells Google Analytics of every import and conversion and keeps a number of
    its own for it in the home directory.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # as if it were not installed
    import openvino

    return openvino


def latency(runner: Runner, image: np.ndarray) -> float:
    """Milliseconds of one image (1, H, W, C), as `report.typical` has it."""
    seconds, end = [], time.perf_counter() + _LONGEST
    for repeat in range(2 * _REPEATS):
        start = time.perf_counter()
        runner(image)
        seconds.append(time.perf_counter() - start)
        if time.perf_counter() > end and repeat >= 2:
            break
    return report.typical(seconds[len(seconds) // 2 :])


def operators(file: pathlib.Path, kind: OnnxFormat) -> dict[str, int]:
    """How often each operator is in the file, the most frequent first; constants are not counted."""
    if kind == "onnx":
        import onnx

        return report.operator_table(node.op_type for node in onnx.load(file).graph.node)
    found = (node.get_type_name() for node in _openvino().Core().read_model(file).get_ops())
    return report.operator_table(name for name in found if name not in ("Constant", "Parameter", "Result"))


def versions(kind: OnnxFormat) -> dict[str, str]:
    """The packages that wrote and ran a format."""
    return {package: importlib.metadata.version(package) for package in _PACKAGES[kind]}


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keras' exporter looks for what NumPy no longer has, and tf2onnx logs what `_finish` finds."""
    logger = logging.getLogger("tf2onnx")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)

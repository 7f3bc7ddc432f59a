"""Runs ONNX and OpenVINO files in their runtimes.

The packages of requirements-onnx.txt are imported inside functions, so that the command can report missing packages.
"""

import importlib.metadata
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Sequence

import numpy as np

from export import report
from export.options import OnnxFormat
from keras_vit import UserError

# Takes images (B, h, w, C) float32 and returns logits (B, K).
Runner = Callable[[np.ndarray], np.ndarray]

# Files of each format; a runtime loads the first one.
FILES: dict[OnnxFormat, tuple[str, ...]] = {"onnx": ("model.onnx",), "openvino": ("model.xml", "model.bin")}
PACKAGES: dict[OnnxFormat, tuple[str, ...]] = {"onnx": ("onnx", "onnxruntime", "tf2onnx"), "openvino": ("openvino",)}
REQUIREMENTS = "export/requirements-onnx.txt"


def require_packages(formats: Sequence[OnnxFormat]) -> None:
    """Raise UserError if a package that writes or runs the formats is not installed."""
    needed = [package for kind in formats for package in PACKAGES[kind]]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"An export as {' and '.join(formats)} needs {', '.join(missing)}, which "
            f"{'are' if len(missing) > 1 else 'is'} not installed; run "
            f'`pip install ".[onnx]"` in a checkout, or without one `pip install {" ".join(missing)}`.'
        )


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
    compiled = import_openvino().compile_model(str(file), "CPU", settings)
    return lambda images: compiled({"image": images})[output]


def default_precision(file: pathlib.Path) -> tuple[str, Runner]:
    """Default precision of OpenVINO on this processor ("f32", "bf16", "f16"), and the file loaded with it."""
    compiled = import_openvino().compile_model(str(file), "CPU")
    name = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    return name, lambda images: compiled({"image": images})["logits"]


def import_openvino():
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
    found = (node.get_type_name() for node in import_openvino().Core().read_model(file).get_ops())
    return report.operator_table(name for name in found if name not in ("Constant", "Parameter", "Result"))


def versions(kind: OnnxFormat) -> dict[str, str]:
    """Versions of the packages that write and run a format."""
    return {package: importlib.metadata.version(package) for package in PACKAGES[kind]}

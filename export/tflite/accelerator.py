"""Runs TFLite files for GPUs in LiteRT's WebGPU accelerator, which needs a Vulkan driver but no GPU.

The driver is that of VK_DRIVER_FILES, the system's, or SwiftShader, which Chromium brings and which computes on the
CPU, in float32. Files are checked in it before they are kept, and have numbers with which an app repeats the check on a
phone.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from export.options import TFLiteFormat
from export.tflite import accelerator_process, tflite_file
from export.tflite.flatbuffer import Graph, Operator, pack, unpack
from export.tflite.quantize import quantize
from export.tflite.tflite_file import run_interpreter
from keras_vit.errors import ParityError, UserError

LONGEST = 600.0  # seconds that a run may take
TOLERANCE = 1e-4  # largest difference from the interpreter, relative to the largest output
NUM_IMAGES = 2  # images of the check
PAGE = "check.html"  # the page that compares in a browser
DRIVER_PACKAGE = "chromium"
# Folders in which packages of Chromium put SwiftShader.
_CHROMIUM = ("/usr/lib/chromium", "/usr/lib64/chromium-browser", "/usr/lib/chromium-browser", "/opt/google/chrome")
_NO_DRIVER = "No adapters found"
_NOT_SHOWN = (
    "It computes in float32 and, without a GPU, on the CPU: it shows neither the rounding of float16, nor the kernels "
    "of Mali and Adreno, nor NPUs, nor speed."
)
_REFUSED = re.compile(r"not supported by GPU delegate:\n(.*?)\n\d+ operations will run", re.DOTALL)

Outputs = Mapping[str, np.ndarray]  # outputs of several images (n, ...), by name


class NotRunError(Exception):
    """The accelerator did not run the file: there is no driver, or it took too long. The message says why."""


class RefusedError(Exception):
    """The accelerator does not run the file. The message has its words."""


def run(content: bytes, images: np.ndarray, seconds: float = LONGEST) -> Outputs:
    """The outputs of a file of batch 1 on images (n, h, w, C) in the accelerator.

    Raises NotRunError, or RefusedError if the accelerator does not compile all of the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        model, inputs, outputs = (pathlib.Path(folder) / name for name in ("model.tflite", "in.npy", "out.npz"))
        model.write_bytes(content)
        np.save(inputs, images)
        command = [sys.executable, accelerator_process.__file__, *map(str, (model, inputs, outputs))]
        for environment in _drivers():
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds
                )
            except subprocess.TimeoutExpired:
                raise NotRunError(f"it took more than {seconds:.0f} seconds") from None
            if _NO_DRIVER in done.stderr:
                continue
            if done.returncode:
                raise RefusedError(_reason(done))
            with np.load(outputs) as found:
                return {name: found[name] for name in found.files}
    raise NotRunError(f"no Vulkan driver is here; the package {DRIVER_PACKAGE} brings one")


def _drivers() -> Iterator[dict[str, str]]:
    environment = dict(os.environ)
    yield environment  # VK_DRIVER_FILES, or the system's driver
    for folder in _CHROMIUM:
        manifest = os.path.join(folder, "vk_swiftshader_icd.json")
        if os.path.exists(manifest):
            libraries = os.pathsep.join([folder, *filter(None, [environment.get("LD_LIBRARY_PATH")])])
            yield environment | {"LD_LIBRARY_PATH": libraries, "VK_DRIVER_FILES": manifest}


def _reason(done: subprocess.CompletedProcess) -> str:
    if refused := _REFUSED.search(done.stderr):
        return refused[1].replace("\n", "; ")
    if done.returncode < 0:
        return f"its process was ended by signal {-done.returncode}"
    return (done.stderr.strip() or f"its process ended with {done.returncode}").splitlines()[-1]


def largest_error(found: Outputs, expected: Outputs) -> float:
    """The largest difference of an output, relative to the largest number of it."""
    return max(
        float(np.abs(found[name] - values).max() / max(np.abs(values).max(), 1e-30))
        for name, values in expected.items()
    )


def is_right(found: Outputs, expected: Outputs) -> bool:
    """Whether outputs differ by rounding alone."""
    return largest_error(found, expected) <= TOLERANCE  # false for NaN


def check(
    name: str, content: bytes, images: np.ndarray, accept: Callable[[Outputs, Outputs], bool] = is_right
) -> float:
    """Return the `largest_error` of the accelerator on images (n, h, w, C), beside the interpreter.

    Raises ParityError if the accelerator refuses the file of this name, or gives outputs that `accept` denies to be
    those of the interpreter, and NotRunError.
    """
    try:
        found = run(content, images)
    except RefusedError as reason:
        raise ParityError(f"LiteRT's GPU accelerator does not run the {name} ({reason}), so it was not kept.") from None
    expected = run_interpreter(content, images)
    error = largest_error(found, expected)
    if not accept(found, expected):
        raise ParityError(
            f"LiteRT's GPU accelerator computes the {name} wrongly, by {error:.2g} of the largest output, from the "
            f"operator {first_wrong(content, images[:1])} on, so it was not kept."
        )
    return error


def first_wrong(content: bytes, images: np.ndarray) -> Operator:
    """The first operator after which the accelerator has a wrong tensor, by bisection."""
    operators = Graph(content).operators
    first, last = 0, len(operators) - 1
    while first < last:
        middle = (first + last) // 2
        part = _first_operators(content, operators[: middle + 1])
        try:
            right = is_right(run(part, images), run_interpreter(part, images))
        except RefusedError:
            right = False
        first, last = (middle + 1, last) if right else (first, middle)
    return operators[first]


def _first_operators(content: bytes, operators: Sequence[Operator]) -> bytes:
    """The file of the first operators alone. Its outputs are what none of them reads."""
    model = unpack(content)
    [subgraph], [signature] = model.subgraphs, model.signatureDefs
    read = {tensor.index for operator in operators for tensor in operator.inputs}
    made = {tensor.index for operator in operators for tensor in operator.outputs}
    subgraph.operators = subgraph.operators[: operators[-1].number + 1]
    subgraph.outputs = sorted(made - read)
    signature.outputs = []
    for index in subgraph.outputs:
        end = schema.TensorMapT()
        end.name, end.tensorIndex = str(index), index
        signature.outputs.append(end)
    return pack(model)


@dataclasses.dataclass(frozen=True)
class GpuCheck:
    """Runs the files of an export in LiteRT's accelerator, or copies of them with two blocks, which take seconds."""

    is_required: bool
    """Whether a file that cannot be run is an error."""
    images: np.ndarray
    """Inputs (2, h, w, C) of the model."""
    copy: bytes | None
    """The float32 file with the first and the last block alone; None to check the files themselves."""
    accept: Callable[[Outputs, Outputs], bool] = is_right

    def facts(self, kind: TFLiteFormat, content: bytes) -> dict[str, Any]:
        """Check a file. Returns the fields for report.json.

        Raises ParityError if the accelerator refuses the file or computes it wrongly, and UserError if it has to be run
        and cannot.
        """
        whole = self.copy is None
        of = "the file" if whole else "a copy with its first and last block"
        name = f"{kind} TFLite file" if whole else f"{kind} TFLite file, in a copy with its first and last block,"
        try:
            error = check(name, content if whole else self._copied(kind), self.images, self.accept)
        except NotRunError as reason:
            if self.is_required:
                raise UserError(
                    f"The {kind} TFLite file was not run in LiteRT's GPU accelerator: {reason}. Without "
                    "--require-gpu-check it is written all the same."
                ) from None
            return {"gpu_check": f"not run: {reason}"}
        return {"gpu_check": of, "gpu_check_error": error}

    def _copied(self, kind: TFLiteFormat) -> bytes:
        assert self.copy is not None
        if kind == "float32":
            return self.copy
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "float32.tflite"
            file.write_bytes(self.copy)
            return quantize(file, kind)


def sentences(rows: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """Return what was checked in LiteRT's accelerator, for the report and the terminal; empty if nothing was to be.

    rows: measurements by format, with the fields of `GpuCheck.facts`.
    """
    right, rest = list[str](), list[str]()
    for kind, row in rows.items():
        if "gpu_check_error" in row:
            right.append(f"{kind}: {row['gpu_check']}, within {row['gpu_check_error']:.1g} of the largest output")
        elif "gpu_check" in row:
            rest.append(f"{kind}: {row['gpu_check']}")
    lines = []
    if right:
        lines.append(f"Right in LiteRT's GPU accelerator on {NUM_IMAGES} images ({'; '.join(right)}). {_NOT_SHOWN}")
    return [*lines, *([f"LiteRT's GPU accelerator: {'; '.join(rest)}."] if rest else [])]


def write_with_golden_numbers(file: pathlib.Path, content: bytes, images: np.ndarray) -> None:
    """Write a file with metadata, and the golden numbers of its first images into it and beside it."""
    golden = golden_numbers(content, images[:NUM_IMAGES])
    file.write_bytes(tflite_file.with_golden_numbers(content, golden))
    file.with_suffix(f".{tflite_file.GOLDEN}").write_bytes(golden)


def write_page(directory: pathlib.Path, files: Sequence[str]) -> None:
    """Write check.html, which runs these files in a browser and compares with the golden numbers beside them."""
    page = pathlib.Path(__file__).with_name(PAGE).read_text(encoding="utf-8")
    page = page.replace("const FILES = [];", f"const FILES = {json.dumps(list(files))};")
    (directory / PAGE).write_text(page, encoding="utf-8")


def golden_numbers(content: bytes, images: np.ndarray) -> bytes:
    """Little-endian float32: of each image (h, w, C) its numbers, then those of each output, by the names' order."""
    outputs = run_interpreter(content, images)
    rows = zip(images, *(outputs[name] for name in sorted(outputs)), strict=True)
    return b"".join(np.asarray(part, "<f4").tobytes() for row in rows for part in row)

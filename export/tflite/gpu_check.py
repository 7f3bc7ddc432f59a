"""The check of files for GPUs before they are kept, and the numbers with which an app repeats it on a phone."""

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from export.inference_model import inner_blocks
from export.options import TFLiteFormat, TFLiteOptions
from export.tflite import accelerator, tflite_file
from export.tflite.convert import to_delegate_tflite
from export.tflite.quantize import quantize
from keras_vit import UserError

# Images of the check.
NUM_IMAGES = 2
# The page that compares in a browser.
PAGE = "check.html"
_NOT_SHOWN = (
    "It computes in float32 and, without a GPU, on the CPU: it shows neither the rounding of float16, nor the kernels "
    "of Mali and Adreno, nor NPUs, nor speed."
)


@dataclasses.dataclass(frozen=True)
class GpuCheck:
    """Runs the files of an export in LiteRT's accelerator, or copies of them with two blocks, which take seconds."""

    options: TFLiteOptions
    images: np.ndarray
    """Inputs (2, h, w, C) of the model."""
    copy: bytes | None
    """The float32 file with the first and the last block alone; None to check the files themselves."""
    accept: Callable[[accelerator.Outputs, accelerator.Outputs], bool] = accelerator.is_right
    """Whether outputs of the accelerator are those of the interpreter."""

    @classmethod
    def of(
        cls,
        options: TFLiteOptions,
        model: keras.Model,
        images: np.ndarray,
        accept: Callable[[accelerator.Outputs, accelerator.Outputs], bool] = accelerator.is_right,
        **form: Any,
    ) -> "GpuCheck":
        """The check of the files of a model; `form` is that of `to_delegate_tflite`, images are (n, h, w, C)."""
        copy = None
        if options.check == "two-blocks" and inner_blocks(model):
            copy = to_delegate_tflite(model, images, first_and_last_block=True, **form)
        return cls(options, images[:NUM_IMAGES], copy, accept)

    def facts(self, kind: TFLiteFormat, content: bytes) -> dict[str, Any]:
        """Check a file. Returns the fields for report.json.

        Raises ParityError if the accelerator refuses the file or computes it wrongly, and UserError if it has to be run
        and cannot.
        """
        whole = self.copy is None
        of = "the file" if whole else "a copy with its first and last block"
        name = f"{kind} TFLite file" if whole else f"{kind} TFLite file, in a copy with its first and last block,"
        try:
            error = accelerator.check(name, content if whole else self._copied(kind), self.images, self.accept)
        except accelerator.NotRunError as reason:
            if self.options.require_gpu_check:
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
    """What was checked in LiteRT's accelerator, for the report and the terminal; empty if nothing was to be.

    rows: measurements by format, with the fields of `GpuCheck.facts`.
    """
    found = {kind: row for kind, row in rows.items() if "gpu_check" in row}
    right = [
        f"{kind}: {row['gpu_check']}, within {row['gpu_check_error']:.1g} of the largest output"
        for kind, row in found.items()
        if "gpu_check_error" in row
    ]
    rest = [f"{kind}: {row['gpu_check']}" for kind, row in found.items() if "gpu_check_error" not in row]
    return [
        *(
            [f"Right in LiteRT's GPU accelerator on {NUM_IMAGES} images ({'; '.join(right)}). {_NOT_SHOWN}"]
            if right
            else []
        ),
        *([f"LiteRT's GPU accelerator: {'; '.join(rest)}."] if rest else []),
    ]


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
    outputs = accelerator.run_interpreter(content, images)
    parts = [
        part for row, image in enumerate(images) for part in (image, *(outputs[name][row] for name in sorted(outputs)))
    ]
    return b"".join(np.asarray(part, "<f4").tobytes() for part in parts)

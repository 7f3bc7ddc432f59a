"""Writes a model in all forms that this machine can run, and measures them side by side."""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from export import parity, report
from export.fastest import runtime_process
from export.onnx.export import export_onnx, require_packages
from export.options import (
    Dtype,
    FastestForm,
    FastestOptions,
    OnnxOptions,
    SavedModelOptions,
    TFLiteFormat,
    TFLiteOptions,
)
from export.saved_model.export import export_saved_model
from export.source import ExportedModel
from export.tasks import Classification
from export.texts import render
from export.tflite.export import export_tflite
from keras_vit import UserError
from keras_vit.cli.progress import Progress, tracked
from keras_vit.errors import ParityError, is_or_are
from keras_vit.files.remote import to_path
from keras_vit.files.tables import markdown_table, short_name

_ROUND_SECONDS, _WARM_UP = 0.3, 3  # seconds of calls of one form in a round, and calls before the first round
# Forms that compute in float32.
_EXACT: tuple[FastestForm, ...] = ("saved-model", "saved-model-xla", "tflite", "onnx", "openvino")
_LEAST_AGREEMENT = 0.99  # smallest share of images with the same class of a form that is recommended


@dataclasses.dataclass(frozen=True)
class Measured:
    """A form of the model on this machine."""

    name: str
    path: str
    parity: parity.Parity
    milliseconds: tuple[float, float, float]
    """The time of a batch: lower quartile, median and upper quartile over the rounds."""
    memory: int
    peak_memory: int
    """Bytes of the process at most, which is while it loads the model."""

    @property
    def exact(self) -> bool:
        """Whether the logits differ from the model's by no more than rounding."""
        return self.parity.max_abs_diff <= self.parity.tolerance


def compare_forms(exported: ExportedModel, options: FastestOptions) -> tuple[list[Measured], dict[str, str]]:
    """Write the forms into folders of `options.output`, and measure them. `options.source` is not used.

    Returns the forms, the fastest first, and of those that are not measured the reason: a package that is not
    installed, or outputs that differ from the model's. Writes report.json and report.md.
    """
    task = Classification(exported).prepared()
    exported, expected = task.exported, task.reference()
    paths: dict[FastestForm, pathlib.Path] = {}
    left_out: dict[str, str] = {}
    with Progress("Exporting") as progress:
        for number, form in enumerate(dict.fromkeys(options.formats), 1):
            progress.doing = f"Exporting {form} ({number} of {len(options.formats)})"
            try:
                paths[form] = _write(task, form, options, paths)
            except (UserError, ParityError) as error:
                left_out[form] = str(error)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = options.threads or available
    measured, failed = _measure(paths, expected, options, threads)
    left_out |= failed
    if not measured:
        raise UserError(f"None of the forms can be used here: {' '.join(left_out.values())}")
    measured.sort(key=lambda form: form.milliseconds[1])
    _report(exported, options, threads, measured, left_out)
    return measured, left_out


def _write(
    task: Classification, form: FastestForm, options: FastestOptions, written: Mapping[FastestForm, pathlib.Path]
) -> pathlib.Path:
    """Write one form. Returns the path that its runtime loads. Raises ParityError if it differs from the model."""
    source, output = options.source, os.path.join(options.output, form)
    if form in ("saved-model", "saved-model-xla", "saved-model-bfloat16"):
        dtype: Dtype = "bfloat16" if form == "saved-model-bfloat16" else "float32"
        chosen = SavedModelOptions(source, output, dtype=dtype, xla=form == "saved-model-xla")
        return export_saved_model(task, chosen)[0]
    if form in ("tflite", "tflite-int8-dynamic"):
        name: TFLiteFormat = "float32" if form == "tflite" else "int8-dynamic"
        files = TFLiteOptions(source, output, (name,), dynamic_batch=options.batch_size > 1)
        return export_tflite(task, files)[name][0]
    if form == "openvino":  # it reads the ONNX file
        require_packages(("openvino",))
    file = written.get("openvino" if form == "onnx" else "onnx")
    return file or export_onnx(task, OnnxOptions(source, os.path.join(options.output, "onnx")))[0]


def _measure(
    paths: Mapping[FastestForm, pathlib.Path], expected: parity.Reference, options: FastestOptions, threads: int
) -> tuple[list[Measured], dict[str, str]]:
    """Run all forms in turn, each in its process. Returns their measurements, and why others have none."""
    measured, failed = list[Measured](), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        images = pathlib.Path(folder) / "images.npy"
        np.save(images, np.concatenate([batch for _, batch in expected.batches()]))
        found: dict[FastestForm, parity.Parity] = {}
        processes: dict[FastestForm, _RuntimeProcess] = {}
        for form, path in tracked(paths.items(), "Loading", len(paths), "forms"):
            logits = pathlib.Path(folder) / f"{form}.npy"
            runtime = next(name for name in runtime_process.RUNTIMES if form.startswith(name))
            numbers = (str(threads), str(options.batch_size))
            arguments = (runtime, str(path), *numbers, str(images), str(logits))
            process = stack.enter_context(_RuntimeProcess(arguments, logits.with_suffix(".txt")))
            try:
                process.answer()
                values = np.load(logits)
                parity.require_variation(form, expected.logits, values)
                found[form] = parity.compare(expected, values)
                if form in _EXACT:
                    parity.require_equal(form, found[form])
                else:
                    parity.require_agreement(form, found[form])
            except ParityError as error:
                failed[form] = str(error)
            else:
                processes[form] = process
        once = {form: float(np.median(process.run(_WARM_UP)["seconds"])) for form, process in processes.items()}
        counts = {form: max(1, round(_ROUND_SECONDS / seconds)) for form, seconds in once.items()}
        medians: dict[FastestForm, list[float]] = {form: [] for form in processes}
        last: dict[FastestForm, Mapping[str, Any]] = {}
        # In turn, so that whatever else the machine does slows all of them alike.
        for _ in tracked(range(options.rounds), "Measuring", options.rounds, "rounds"):
            for form, process in processes.items():
                last[form] = process.run(counts[form])
                medians[form].append(1e3 * float(np.median(last[form]["seconds"])))
        for form in processes:
            low, median, high = (float(value) for value in np.quantile(medians[form], (0.25, 0.5, 0.75)))
            memory = last[form]["memory"], last[form]["peak_memory"]
            measured.append(Measured(form, str(paths[form]), found[form], (low, median, high), *memory))
    return measured, failed


class _RuntimeProcess:
    def __init__(self, arguments: Sequence[str], errors: pathlib.Path):
        self._errors = errors
        with errors.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, runtime_process.__file__, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            )

    def __enter__(self) -> "_RuntimeProcess":
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()

    def answer(self) -> Any:
        """Return its next answer. Raises ParityError if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            reason = (self._errors.read_text(errors="replace").splitlines() or ["the process was killed"])[-1]
            raise ParityError(f"The file cannot be run here ({reason[:200]}).")
        return json.loads(line)

    def run(self, calls: int) -> Mapping[str, Any]:
        """The seconds of as many calls, and the memory of the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()
        return self.answer()


def recommendation(measured: Sequence[Measured]) -> str:
    """A sentence on the form to take: the fastest with nearly all classes of the model.

    Of forms whose quartiles overlap with those of the fastest, which is the first, exact ones come first, then those
    with less memory.
    """
    good = [form for form in measured if form.exact or form.parity.agreement >= _LEAST_AGREEMENT]
    if not good:
        return "None of the forms has the classes of the model for nearly all images; take saved-model."
    alike = [form for form in good if form.milliseconds[0] <= good[0].milliseconds[2]]
    best = min(alike, key=lambda form: (not form.exact, form.memory))
    outputs = "the outputs of the model" if best.exact else f"{best.parity.agreement:.1%} of its classes"
    sentence = f"Take {best.name}: {best.milliseconds[1]:.3g} ms for a batch, {best.memory / 1e6:,.0f} MB, {outputs}"
    if others := [form.name for form in alike if form is not best]:
        sentence += f"; no slower within the spread {is_or_are(len(others))} {', '.join(others)}"
    exact = [form for form in good if form.exact]
    if not best.exact and exact:
        sentence += f"; the fastest with the outputs of the model is {exact[0].name}, {exact[0].milliseconds[1]:.3g} ms"
    return sentence + "."


def table(measured: Sequence[Measured]) -> str:
    """The measurements as a table of Markdown."""
    header = ("form", "ms", "quartiles", "memory, MB", "at most, MB", "max |logit diff|", "same classes", "file")
    rows = [
        (
            form.name,
            f"{form.milliseconds[1]:.3g}",
            f"{form.milliseconds[0]:.3g} to {form.milliseconds[2]:.3g}",
            f"{form.memory / 1e6:,.0f}",
            f"{form.peak_memory / 1e6:,.0f}",
            f"{form.parity.max_abs_diff:.2g}",
            f"{form.parity.agreement:.1%}",
            form.path,
        )
        for form in measured
    ]
    return markdown_table(header, rows, num_text_columns=1)


def _report(
    exported: ExportedModel,
    options: FastestOptions,
    threads: int,
    measured: Sequence[Measured],
    left_out: Mapping[str, str],
) -> None:
    output = to_path(options.output)
    facts = {
        **exported.origin.as_json(),
        "batch_size": options.batch_size,
        "threads": threads,
        "rounds": options.rounds,
        "recommendation": recommendation(measured),
        "forms": {form.name: dataclasses.asdict(form) for form in measured},
        "left_out": dict(left_out),
        "versions": report.versions(),
    }
    (output / "report.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    page = render("fastest.md", name=short_name(exported.origin.name), table=table(measured), **facts)
    (output / "report.md").write_text(page, encoding="utf-8")

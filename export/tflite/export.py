"""Exports a model as TFLite files, and verifies them against the Keras model.

Input: image (1, H, W, C) float32 in the value range of the model. Outputs: those of the task, by the names of the
signature, see `export.tasks`; with --target gpu or npu they are all float32.
"""

import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from export import parity, report
from export.files import note_on_earlier, write_beside
from export.inference_model import in_dtype, inner_blocks
from export.options import CALIBRATED, EIGHT_BIT_WEIGHTS, OF_CLASSES, PROCESSORS, Target, TFLiteFormat, TFLiteOptions
from export.tasks import Classification, Measures, Task
from export.tflite import accelerator, quantize, tflite_file
from export.tflite.convert import to_delegate_tflite, to_tflite
from export.tflite.delegate_checks import require_rules, run_in_half
from export.tflite.gptq import round_kernels
from export.tflite.quantize import WEIGHT_SHARE, DenseLayers
from keras_vit import UserError
from keras_vit.cli.progress import Progress
from keras_vit.errors import ParityError, refuse_without_effect
from keras_vit.files.atomic import staged
from keras_vit.files.remote import output_folder
from keras_vit.images.files import Samples
from keras_vit.models.build import exact_products
from keras_vit.scores import UNKNOWN_SCORE

_COMPARED, _LISTED = 8, 30  # number of images for the comparison of layers, and of layers in the report
_TOGETHER = 5  # largest number of images in a batch that is compared
_RECOMMENDED = (0.99, 0.005)  # smallest agreement and largest loss of accuracy of a format that the report recommends


@exact_products()
def export_tflite(
    task: Task, options: TFLiteOptions, calibration: Samples | None = None
) -> dict[TFLiteFormat, tuple[pathlib.Path, Measures]]:
    """Write one file per format. Returns its path and its differences from the Keras model.

    Each file is loaded again and run on all samples. Raises ParityError, and writes nothing, if float32 differs from
    the model by more than rounding, or another format by more than its task allows. Raises UserError if the output
    holds files of another model.

    Args:
        task: the model and what it does.
        options: of the command; `source` and `calibration` are not used.
        calibration: representative images; see `export.source.read_calibration`.
    """
    output = output_folder(options.output)
    _check_formats(task, options, calibration)
    task = task.prepared(options.max_disagreement)
    texts = task.identity(output)
    with staged(output) as stage:
        with (
            tempfile.TemporaryDirectory(dir=stage) as temporary,
            Progress("TFLite", len(options.formats), "formats") as progress,
        ):
            export = _Export(task, options, calibration, stage, pathlib.Path(temporary))
            for number, form in enumerate(options.formats, 1):
                progress.doing = f"{form} ({number} of {len(options.formats)})"
                export.write(form)
                progress.update()
        if options.target == "gpu":
            accelerator.write_page(stage, [file.name for file, _ in export.written.values()])
        write_beside(stage, task.exported.origin)
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        export.report(note_on_earlier(output, stage) if texts else [])
    return {form: (output / file.name, measures) for form, (file, measures) in export.written.items()}


def _check_formats(task: Task, options: TFLiteOptions, calibration: Samples | None) -> None:
    if calibration is None and (calibrated := [form for form in options.formats if form in CALIBRATED]):
        raise UserError(
            f"{calibrated[0]} is calibrated for classes, and needs representative images for its calibration; pass "
            "--calibration FOLDER, or take another format."
        )
    owner = f"models that classify, and this is an export of {task.noun}"
    refuse_without_effect(options, [(OF_CLASSES, isinstance(task, Classification), owner)])
    if "int4-weights" in options.formats:
        model = task.exported.model
        dense = sum(layer.count_params() for layer in model.layers if isinstance(layer, keras.layers.Dense))
        if options.target != "cpu" or dense < model.count_params() / 2:
            raise UserError(
                "int4-weights stores dense layers in 4 bits, but most weights here are those of convolutions; take "
                "int8-weights."
            )


class _Export:
    """The files of a model, made in the folder `stage`; `temporary` is for float32 files that others are made of."""

    def __init__(
        self,
        task: Task,
        options: TFLiteOptions,
        calibration: Samples | None,
        stage: pathlib.Path,
        temporary: pathlib.Path,
    ):
        self._task, self._options, self._stage, self._temporary = task, options, stage, temporary
        self._model = task.exported.model
        # Files for delegates have the logits alone.
        self._unknown = task.exported.unknown if options.target == "cpu" else None
        self.written: dict[TFLiteFormat, tuple[pathlib.Path, Measures]] = {}
        self._rows = dict[TFLiteFormat, dict[str, Any]]()
        self._quantization = _Quantization()
        self._expected = task.reference(raw_pixels=options.uint8_input)
        self._representative, self._inputs = list[np.ndarray](), list[np.ndarray]()
        if calibration is not None:
            reference = parity.Reference(calibration, task.exported.preprocessing)
            self._representative = [images for _, images in reference.batches()]
            raw = (images for _, images in reference.batches(raw_pixels=True))
            batches = raw if options.uint8_input else self._representative
            self._inputs = [image[None] for images in batches for image in images]
        self._float_file = functools.cache(self._make_float_file)
        self._rounded = functools.cache(functools.partial(round_kernels, self._model, self._representative))

    def write(self, form: TFLiteFormat) -> None:
        """Write the file of a format, compare it with the model, and measure it."""
        started, target, name = time.perf_counter(), self._options.target, f"{form} TFLite file"
        content = self._content(form)
        if target != "cpu":
            require_rules(name, content, target)
        checked = self._gpu_check.facts(form, content) if target == "gpu" else {}
        file = self._stage / f"{self._task.stem}-{form}{self._ending}.tflite"
        scores, threshold = self._score_facts(form, content)
        described = self._with_metadata(form, content, threshold)
        if target == "cpu":
            file.write_bytes(described)
        else:
            accelerator.write_with_golden_numbers(file, described, self._images)
        found = tflite_file.run_samples(file, self._expected, self._options.uint8_input)
        measures = self._task.measure(name, self._expected, found, exact=form == "float32")
        if self._options.dynamic_batch:
            few = self._expected.first(_TOGETHER)
            together = tflite_file.run_together(file, few, self._options.uint8_input)
            self._task.measure(f"{name} for several images at a time", few, together, exact=form == "float32")
        self.written[form] = (file, measures)
        self._rows[form] = {**measures, "bytes": file.stat().st_size, **checked}
        if isinstance(self._task, Classification):
            self._rows[form] = self._measure_classifier(form, started) | scores | checked
            scoring, exact = self._task.exported.origin.scoring(), form == "float32"
            if scoring.promise is not None:  # by which the program beside the file decides
                logits = np.stack([outputs["logits"] for outputs in found])
                decided = scoring.promise.decide(scoring.probabilities(logits))
                self._rows[form] |= parity.promise_facts(name, scoring, self._expected, decided, exact=exact)
            if target == "gpu":
                half = parity.compare(self._expected, run_in_half(content, self._expected))
                self._rows[form] |= {"float16_agreement": half.agreement, "float16_max_abs_diff": half.max_abs_diff}

    def report(self, notes: Sequence[str]) -> None:
        """Write the report of all files."""
        notes = [*accelerator.sentences(self._rows), *notes]
        extra = report.Extra(notes)
        if isinstance(self._task, Classification):
            extra = _extra(self._expected, self._rows, self._quantization, notes, self._options)
        self._task.report(self._stage, "TFLite", self._expected, self._rows, extra)

    def _measure_classifier(self, form: TFLiteFormat, started: float) -> dict[str, Any]:
        """Return size, speed and operators of a file. Raises ParityError if it does not have its weights."""
        file, measures = self.written[form]
        in_float = 0 if self._unknown is None else self._unknown.num_bytes
        check_weights(file, 4 * self._model.count_params(), WEIGHT_SHARE[form], in_float)
        latency = functools.partial(tflite_file.latency, file)
        operators = tflite_file.operators(file)
        measured = report.measurements(file.stat().st_size, measures, latency, operators, started)
        if form == "int8":
            images = [image[None] for image in self._images]
            errors = quantize.layer_errors(self._float_file_of(form), file, images, self._layers)
            self._quantization.errors[form] = errors
        return {"file": file.name, **measured, "xnnpack_partitions": tflite_file.partitions(file)}

    def _content(self, form: TFLiteFormat) -> bytes:
        file, steps = self._float_file_of(form), self._quantization.steps
        if form == "float32":
            return file.read_bytes()
        if form == "int8":
            multi_label, at_run_time = self._task.exported.origin.multi_label, self._options.target == "cpu"
            content, steps[form] = quantize.quantize_static(
                file, self._inputs, multi_label=multi_label, at_run_time=at_run_time
            )
            return content
        if form == "int4-weights":
            kept = self._quantization.in_eight_bits = quantize.kept_in_eight_bits(file, self._inputs)
            in_four_bits = quantize.in_four_bits(file, kept, self._layers)
            return quantize.quantize_four_bits(self._float_file(True, in_four_bits), kept)
        return quantize.quantize(file, form)

    def _float_file_of(self, form: TFLiteFormat) -> pathlib.Path:
        """Return the float32 file that a format is made of, its kernels rounded where these are rounded to 8 bits."""
        is_rounded = form in EIGHT_BIT_WEIGHTS and bool(self._representative)
        # Ranges over all tokens are wider than those of the class tokens of a few images, and clip less.
        all_tokens = self._task.all_tokens or form in CALIBRATED
        return self._float_file(all_tokens, frozenset() if is_rounded else None)

    def _make_float_file(self, all_tokens: bool, in_four_bits: frozenset[str] | None) -> pathlib.Path:
        """Write a float32 file; its kernels are rounded, of some layers to 4 bits, unless that is None."""
        network = self._model if in_four_bits is None else self._rounded(in_four_bits)
        finish = self._task.network
        if self._options.target != "cpu":
            content = to_delegate_tflite(network, self._images, all_tokens=all_tokens, finish=finish)
        else:
            content = to_tflite(
                network,
                uint8_input=self._options.uint8_input,
                dynamic_batch=self._options.dynamic_batch,
                all_tokens=all_tokens,
                finish=finish,
                unknown=self._unknown,
            )
        names = "-".join(map(str, (all_tokens, in_four_bits is not None, bool(in_four_bits))))
        file = self._temporary / f"{names}.tflite"
        file.write_bytes(content)
        return file

    @functools.cached_property
    def _images(self) -> np.ndarray:
        count = _COMPARED if isinstance(self._task, Classification) else accelerator.NUM_IMAGES
        batches = (images for _, images in self._expected.batches(raw_pixels=self._options.uint8_input))
        images = next(batches)
        if isinstance(self._task, Classification) or len(images) >= count:
            return images[:count]
        return np.concatenate([images, *batches])[:count]

    @functools.cached_property
    def _layers(self) -> list[str]:
        return [layer.name for layer in self._model.layers]

    @functools.cached_property
    def _gpu_check(self) -> accelerator.GpuCheck:
        task, copy = self._task, None
        if self._options.check == "two-blocks" and inner_blocks(self._model):
            form: dict[str, Any] = {"all_tokens": task.all_tokens, "finish": task.network}
            copy = to_delegate_tflite(self._model, self._images, first_and_last_block=True, **form)
        accept = accelerator.is_right if isinstance(task, Classification) else functools.partial(_accepted, task)
        images = self._images[: accelerator.NUM_IMAGES]
        return accelerator.GpuCheck(self._options.require_gpu_check, images, copy, accept)

    @property
    def _ending(self) -> str:
        options = self._options
        parts = [
            "" if options.target == "cpu" else f"-{options.target}",
            "-uint8-input" if options.uint8_input else "",
            "-dynamic-batch" if options.dynamic_batch else "",
        ]
        return "".join(parts)

    @functools.cached_property
    def _expected_scores(self) -> np.ndarray:
        assert self._unknown is not None
        raw, normalize = self._options.uint8_input, self._task.exported.preprocessing.normalize
        batches = (images for _, images in self._expected.batches(raw_pixels=raw))
        normalized = (np.asarray(normalize(each)) if raw else each for each in batches)
        return self._unknown.scores(in_dtype(self._model, "float32"), normalized)

    def _score_facts(self, form: TFLiteFormat, content: bytes) -> tuple[dict[str, object], float | None]:
        """Return the measurements of the score of unknown images, and its threshold in a file."""
        unknown = self._unknown
        if unknown is None:
            return {}, None
        file, threshold, exact = self._temporary / "scored.tflite", unknown.threshold, form == "float32"
        file.write_bytes(content)
        outputs = tflite_file.run_samples(file, self._expected, self._options.uint8_input)
        scores = np.stack([each[UNKNOWN_SCORE] for each in outputs])
        if not exact:
            threshold = parity.matched_threshold(threshold, self._expected_scores, scores)
        facts = parity.unknown_facts(
            f"{form} TFLite file", unknown, self._expected_scores, scores, exact=exact, threshold=threshold
        )
        return facts, threshold

    def _with_metadata(self, form: TFLiteFormat, content: bytes, threshold: float | None) -> bytes:
        exported, description = self._task.exported, self._task.description(form)
        if threshold is not None:
            description += f"; unknown above the unknown_score {threshold:.9g}"
        return tflite_file.with_metadata(
            content,
            exported.model.name,
            description,
            exported.labels,
            exported.preprocessing,
            self._options.uint8_input,
            exported.origin.license_text,
        )


def _accepted(task: Task, found: parity.Outputs, expected: parity.Outputs) -> bool:
    """Return whether outputs (n, ...) of the accelerator are those of the interpreter, as the task compares them."""
    ours, theirs = (
        [dict(zip(each, row, strict=True)) for row in zip(*each.values(), strict=True)] for each in (expected, found)
    )
    reference = parity.Reference(task.exported.samples, task.exported.preprocessing, outputs=ours)
    try:
        task.measure("file in the accelerator", reference, theirs, exact=True)
    except ParityError:
        return False
    return True


@dataclasses.dataclass
class _Quantization:
    steps: dict[TFLiteFormat, Sequence[quantize.Step]] = dataclasses.field(default_factory=dict)
    """By format, what each step gained."""
    errors: dict[TFLiteFormat, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """By format and layer, noise / signal power, the worst layer first."""
    in_eight_bits: Sequence[DenseLayers] = ()
    """The layers that int4-weights keeps in 8 bits."""

    def facts(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "layer_errors": self._worst(),
            "quantization_steps": {
                kind: [dataclasses.asdict(step) for step in found] for kind, found in self.steps.items()
            },
            "layers_in_eight_bits": [dataclasses.asdict(layers) for layers in self.in_eight_bits],
        }

    def tables(self) -> list[report.Table]:
        """For report.md."""
        tables: list[report.Table] = []
        for kind, steps in self.steps.items():
            rows = [
                (step.name, f"{step.error:.3g}", f"{step.agreement:.1%}", "yes" if step.kept else "no")
                for step in steps
            ]
            heading = f"{kind}: steps of the quantization, on calibration images"
            tables.append((heading, ("step", "logit error", "agreement", "kept"), rows))
        heading = "int4-weights: dense layers in 8 bits, with their part of the squared error of all in 4 bits"
        kept = [
            (", ".join(map(quantize.layer_of, layers.outputs)), f"{layers.error:.1%}", f"{layers.weights:.1%}")
            for layers in self.in_eight_bits
        ]
        tables += [(heading, ("layers", "error", "weights"), kept)] if kept else []
        for kind, worst in self._worst().items():
            noise = [(name, f"{error:.3g}") for name, error in worst.items()]
            tables.append((f"{kind}: noise / signal power, the worst layer first", ("layer", "noise"), noise))
        return tables

    def _worst(self) -> dict[TFLiteFormat, dict[str, float]]:
        return {kind: dict(list(found.items())[:_LISTED]) for kind, found in self.errors.items()}


def check_weights(file: pathlib.Path, weight_bytes: int, share: float, in_float: int = 0) -> None:
    """Raise ParityError if a file is too small to hold the weights, or too large for quantized weights.

    `in_float` are the bytes of what stays in float32 beside the weights.
    """
    size = file.stat().st_size - in_float
    if size < 0.9 * share * weight_bytes:
        raise ParityError(f"{file.name} has {size} bytes, too few for its weights, so it was not kept.")
    if share < 1.0 and size > (share + 0.5) / 1.5 * weight_bytes + 2**20:
        raise ParityError(f"{file.name} has {size} bytes: its weights were not quantized, so it was not kept.")


def recommend(rows: Mapping[TFLiteFormat, Mapping[str, Any]], keras_accuracy: float | None) -> str:
    """A sentence with the recommended format, and the formats that are not recommended."""
    agreement, lost = _RECOMMENDED

    def is_good(row: Mapping[str, Any]) -> bool:
        is_known = keras_accuracy is not None and row["accuracy"] is not None
        return row["agreement"] >= agreement and not (is_known and keras_accuracy - row["accuracy"] > lost)

    good = {kind: row for kind, row in rows.items() if is_good(row)}
    poor = [kind for kind in rows if kind not in good]
    sentence = "None of these formats is accurate enough; use float32."
    if good:
        best = min(good, key=lambda kind: good[kind]["latency_ms"]["1_threads"])
        row = good[best]
        sentence = (
            f"Recommended: {best}, the fastest on one thread ({row['latency_ms']['1_threads']:.3g} ms, "
            f"{row['bytes'] / 1e6:,.2f} MB) of those that agree with the model on at least {agreement:.0%} of the"
            f" images and lose at most {100 * lost:.1f} points of accuracy."
        )
    return sentence + (f" Not recommended for this model: {', '.join(poor)}." if poor and good else "")


def _extra(
    expected: parity.Reference,
    rows: Mapping[TFLiteFormat, Mapping[str, Any]],
    quantization: _Quantization,
    notes: Sequence[str],
    options: TFLiteOptions,
) -> report.Extra:
    recommendation = recommend(rows, expected.accuracy)
    columns: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "XNNPACK partitions": lambda row: row["xnnpack_partitions"]
    }
    if any("float16_agreement" in row for row in rows.values()):
        columns["agreement in float16"] = lambda row: f"{row['float16_agreement']:.1%}"
        columns["max diff in float16"] = lambda row: f"{row['float16_max_abs_diff']:.3g}"
    panels: dict[str, Mapping[str, float]] = {
        "agreement with the Keras model": {form: row["agreement"] for form, row in rows.items()},
        **{f"{form}: noise / signal": found for form, found in quantization.errors.items()},
    }
    facts = quantization.facts() | {"recommendation": recommendation}
    notes = [recommendation, *notes]
    return report.Extra(notes, facts, columns, quantization.tables(), panels, raw_pixels=options.uint8_input)


def summary(task: Task, written: Mapping[TFLiteFormat, tuple[pathlib.Path, Measures]], target: Target = "cpu") -> str:
    """Return the result of `export_tflite` for the terminal: a table, of a classifier, or sentences."""
    if isinstance(task, Classification):
        return report.format_table(written, PROCESSORS[target])
    sentences = [f"{path}: {task.sentence(measures)}" for path, measures in written.values()]
    return "\n".join(f"{sentence}; {PROCESSORS[target]}." for sentence in sentences)

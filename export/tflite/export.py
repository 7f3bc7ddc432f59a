"""Exports a model as TFLite files, and verifies them against the Keras model."""

import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from export import fingerprint, parity, report
from export.inference_model import in_dtype
from export.options import CALIBRATED, PROCESSORS, Target, TFLiteFormat, TFLiteOptions
from export.source import ExportedModel, Provenance
from export.tflite import gpu_check, quantize, tflite_file
from export.tflite.convert import to_tflite
from export.tflite.delegate_rules import require_rules
from export.tflite.four_bits import DenseLayers
from export.tflite.gptq import round_kernels
from export.tflite.half_precision import run_in_half
from export.tflite.quantize import EIGHT_BIT_WEIGHTS, WEIGHT_SHARE
from keras_vit import UserError, run_directory
from keras_vit.cli.progress import Progress
from keras_vit.errors import ParityError
from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name
from keras_vit.files.tflite_metadata import SEVERAL_CLASSES, calibration_text
from keras_vit.run_directory import Samples
from keras_vit.unknown_score import UNKNOWN_SCORE

# Number of images for the comparison of layers, and of layers in the report.
_COMPARED, _LISTED = 8, 30
# Smallest agreement and largest loss of accuracy of a format that the report recommends.
_RECOMMENDED = (0.99, 0.005)


def export_tflite(
    exported: ExportedModel, options: TFLiteOptions, calibration: Samples | None = None
) -> dict[TFLiteFormat, tuple[pathlib.Path, parity.Parity]]:
    """Write one file per format. Returns its path and its differences from the Keras model.

    Each file is loaded again and run on all samples. Raises ParityError, and writes nothing, if float32 differs from
    the model by more than rounding, or if another format predicts other classes for too many images. Raises UserError
    if the output holds files of another model.

    Args:
        exported: the model.
        options: of the command; `source` and `calibration` are not used.
        calibration: representative images; see `export.tflite.calibration.read_calibration`.
    """
    output = run_directory.output_folder(options.output)
    if calibration is None and (calibrated := [kind for kind in options.formats if kind in CALIBRATED]):
        raise UserError(f"{calibrated[0]} needs representative images for its calibration; pass --calibration FOLDER.")
    if "int4-weights" in options.formats:
        _check_dense(exported.model, options.target)
    exported = exported.with_logits()
    if options.target != "cpu":  # files for delegates have the logits alone
        exported = dataclasses.replace(exported, unknown=None)
    texts = fingerprint.identity_files(output, exported.model, exported.labels, exported.origin)
    with staged(output) as stage:
        with (
            tempfile.TemporaryDirectory(dir=stage) as temporary,
            Progress("TFLite", len(options.formats), "formats") as progress,
        ):
            export = _Export(exported, options, calibration, stage, pathlib.Path(temporary))
            for number, kind in enumerate(options.formats, 1):
                progress.doing = f"{kind} ({number} of {len(options.formats)})"
                export.write(kind)
                progress.update()
        if options.target == "gpu":
            gpu_check.write_page(stage, [file.name for file, _ in export.written.values()])
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        export.report(fingerprint.note_on_earlier(output, stage)).write(stage)
    return {kind: (output / file.name, found) for kind, (file, found) in export.written.items()}


class _Export:
    """The files of a classifier, while they are made.

    Args:
        exported: the model.
        options: of the command.
        calibration: representative images.
        stage: folder for the files.
        temporary: folder for float32 files that others are made of.
    """

    def __init__(
        self,
        exported: ExportedModel,
        options: TFLiteOptions,
        calibration: Samples | None,
        stage: pathlib.Path,
        temporary: pathlib.Path,
    ):
        self._exported, self._options, self._stage, self._temporary = exported, options, stage, temporary
        self.written: dict[TFLiteFormat, tuple[pathlib.Path, parity.Parity]] = {}
        self._rows = dict[TFLiteFormat, dict[str, Any]]()
        self._quantization = _Quantization()
        self._expected = parity.reference(
            in_dtype(exported.model, "float32"),
            exported.preprocessing,
            exported.samples,
            multi_label=exported.origin.multi_label,
            raw_pixels=options.uint8_input,
        )
        self._representative, self._inputs = list[np.ndarray](), list[np.ndarray]()
        if calibration is not None:
            reference = parity.Reference(calibration, exported.preprocessing, np.zeros(0))
            self._representative = [images for _, images in reference.batches()]
            raw = (images for _, images in reference.batches(raw_pixels=True))
            batches = raw if options.uint8_input else self._representative
            self._inputs = [image[None] for images in batches for image in images]
        self._float_file = functools.cache(self._make_float_file)
        self._rounded = functools.cache(functools.partial(round_kernels, exported.model, self._representative))

    def write(self, kind: TFLiteFormat) -> None:
        """Write the file of a format, compare it with the model, and measure it."""
        started, target = time.perf_counter(), self._options.target
        content = self._content(kind)
        checked = dict[str, Any]()
        if target != "cpu":
            require_rules(f"{kind} TFLite file", content, target)
        if target == "gpu":
            checked = self._gpu_check.facts(kind, content)
        file = self._stage / f"model-{kind}{self._ending}.tflite"
        scores, threshold = self._score_facts(kind, content)
        described = self._with_metadata(kind, content, threshold)
        if target == "cpu":
            file.write_bytes(described)
        else:
            gpu_check.write_with_golden_numbers(file, described, self._images)
        unknown = self._exported.unknown
        in_float = 0 if unknown is None else unknown.num_bytes
        check_weights(file, 4 * self._exported.model.count_params(), WEIGHT_SHARE[kind], in_float)
        found = parity.compare(self._expected, run_tflite(file, self._expected, self._options.uint8_input))
        if kind == "float32":
            parity.require_equal("float32 TFLite file", found)
        else:
            parity.require_agreement(f"{kind} TFLite file", found, self._options.max_disagreement)
        self.written[kind] = (file, found)
        self._rows[kind] = _measurements(file, found, started) | scores | checked
        if target == "gpu":
            half = parity.compare(self._expected, run_in_half(content, self._expected))
            self._rows[kind] |= {"float16_agreement": half.agreement, "float16_max_abs_diff": half.max_abs_diff}
        if kind == "int8":
            self._quantization.errors[kind] = quantize.layer_errors(
                self._float_file_of(kind), file, [image[None] for image in self._images], self._layers
            )

    def report(self, notes: Sequence[str]) -> report.FormatsReport:
        """The report of all files."""
        notes = [*gpu_check.sentences(self._rows), *notes]
        return _report(self._exported.origin, self._expected, self._rows, self._quantization, notes, self._options)

    def _content(self, kind: TFLiteFormat) -> bytes:
        """The file of a format, without metadata."""
        file, steps = self._float_file_of(kind), self._quantization.steps
        if kind == "float32":
            return file.read_bytes()
        if kind == "int8":
            multi_label, at_run_time = self._exported.origin.multi_label, self._options.target == "cpu"
            content, steps[kind] = quantize.quantize_static(
                file, self._inputs, multi_label=multi_label, at_run_time=at_run_time
            )
            return content
        if kind == "int4-weights":
            kept = self._quantization.in_eight_bits = quantize.kept_in_eight_bits(file, self._inputs)
            in_four_bits = quantize.in_four_bits(file, kept, self._layers)
            return quantize.quantize_four_bits(self._float_file(True, in_four_bits), kept)
        return quantize.quantize(file, kind)

    def _float_file_of(self, kind: TFLiteFormat) -> pathlib.Path:
        """The float32 file that a format is made of, with rounded kernels where these are rounded to 8 bits."""
        is_rounded = kind in EIGHT_BIT_WEIGHTS and bool(self._representative)
        # Ranges over all tokens are wider than those of the class tokens of a few images, and clip less.
        return self._float_file(kind in CALIBRATED, frozenset() if is_rounded else None)

    def _make_float_file(self, all_tokens: bool, in_four_bits: frozenset[str] | None) -> pathlib.Path:
        """A float32 file; its kernels are rounded, of some layers to 4 bits, unless that is None."""
        network = self._exported.model if in_four_bits is None else self._rounded(in_four_bits)
        content = to_tflite(
            network,
            for_delegates=None if self._options.target == "cpu" else self._images,
            uint8_input=self._options.uint8_input,
            dynamic_batch=self._options.dynamic_batch,
            all_tokens=all_tokens,
            unknown=self._exported.unknown,
        )
        names = "-".join(map(str, (all_tokens, in_four_bits is not None, bool(in_four_bits))))
        file = self._temporary / f"{names}.tflite"
        file.write_bytes(content)
        return file

    @functools.cached_property
    def _images(self) -> np.ndarray:
        """Some inputs of the files."""
        return next(self._expected.batches(raw_pixels=self._options.uint8_input))[1][:_COMPARED]

    @functools.cached_property
    def _layers(self) -> list[str]:
        return [layer.name for layer in self._exported.model.layers]

    @functools.cached_property
    def _gpu_check(self) -> gpu_check.GpuCheck:
        return gpu_check.GpuCheck.of(self._options, self._exported.model, self._images)

    @functools.cached_property
    def _ending(self) -> str:
        """Of the names of the files."""
        options = self._options
        ending = "" if options.target == "cpu" else f"-{options.target}"
        return (
            ending
            + ("-uint8-input" if options.uint8_input else "")
            + ("-dynamic-batch" if options.dynamic_batch else "")
        )

    @functools.cached_property
    def _expected_scores(self) -> np.ndarray:
        """Of unknown images, by the Keras model."""
        assert self._exported.unknown is not None
        raw = self._options.uint8_input
        batches = (images for _, images in self._expected.batches(raw_pixels=raw))
        normalized = (np.asarray(self._exported.preprocessing.normalize(each)) if raw else each for each in batches)
        return self._exported.unknown.scores(in_dtype(self._exported.model, "float32"), normalized)

    def _score_facts(self, kind: TFLiteFormat, content: bytes) -> tuple[dict[str, object], float | None]:
        """The measurements of the score of unknown images, and its threshold in a file."""
        unknown = self._exported.unknown
        if unknown is None:
            return {}, None
        file, threshold = self._temporary / "scored.tflite", unknown.threshold
        file.write_bytes(content)
        scores = tflite_file.run_samples(file, self._expected, self._options.uint8_input, output=UNKNOWN_SCORE)
        if kind != "float32":
            threshold = parity.matched_threshold(threshold, self._expected_scores, scores)
        facts = parity.unknown_facts(
            f"{kind} TFLite file", unknown, self._expected_scores, scores, exact=kind == "float32", threshold=threshold
        )
        return facts, threshold

    def _with_metadata(self, kind: TFLiteFormat, content: bytes, threshold: float | None) -> bytes:
        exported, origin = self._exported, self._exported.origin
        description = f"{short_name(origin.name)}, {kind}; weights: {origin.weights}"
        if origin.multi_label:
            description += f"; {SEVERAL_CLASSES}"
        if origin.temperature != 1.0:
            description += calibration_text(origin.temperature)
        if threshold is not None:
            description += f"; unknown above the unknown_score {threshold:.9g}"
        return tflite_file.with_metadata(
            content,
            exported.model.name,
            description,
            exported.labels,
            exported.preprocessing,
            self._options.uint8_input,
            origin.license_text,
        )


@dataclasses.dataclass
class _Quantization:
    """What the quantization to the formats of an export did, and what it lost."""

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
        errors = [
            (
                f"{kind}: noise / signal power, the worst layer first",
                ("layer", "noise"),
                [(name, f"{error:.3g}") for name, error in found.items()],
            )
            for kind, found in self._worst().items()
        ]
        return [*_gains(self.steps), *_kept(self.in_eight_bits), *errors]

    def _worst(self) -> dict[TFLiteFormat, dict[str, float]]:
        return {kind: dict(list(found.items())[:_LISTED]) for kind, found in self.errors.items()}


def _check_dense(model: keras.Model, target: Target) -> None:
    """Raise UserError unless most weights are those of dense layers, which int4-weights stores in 4 bits."""
    dense = sum(layer.count_params() for layer in model.layers if isinstance(layer, keras.layers.Dense))
    if target != "cpu" or dense < model.count_params() / 2:
        raise UserError(
            "int4-weights stores dense layers in 4 bits, but most weights here are those of convolutions; take "
            "int8-weights."
        )


def check_weights(file: pathlib.Path, weight_bytes: int, share: float, in_float: int = 0) -> None:
    """Raise ParityError if a file is too small to hold the weights, or too large for quantized weights.

    `in_float` are the bytes of what stays in float32 beside the weights.
    """
    size = file.stat().st_size - in_float
    if size < 0.9 * share * weight_bytes:
        raise ParityError(f"{file.name} has {size} bytes, too few for its weights, so it was not kept.")
    if share < 1.0 and size > (share + 0.5) / 1.5 * weight_bytes + 2**20:
        raise ParityError(f"{file.name} has {size} bytes: its weights were not quantized, so it was not kept.")


def run_tflite(file: pathlib.Path, expected: parity.Reference, raw_pixels: bool = False) -> np.ndarray:
    """Logits (n, K) of the sample images from a TFLite file."""
    return tflite_file.run_samples(file, expected, raw_pixels)


def _measurements(file: pathlib.Path, found: parity.Parity, started: float) -> dict[str, Any]:
    return {
        "file": file.name,
        **report.measurements(
            file.stat().st_size,
            found,
            lambda threads: tflite_file.latency(file, threads),
            tflite_file.operators(file),
            started,
        ),
        "xnnpack_partitions": tflite_file.partitions(file),
    }


def recommend(rows: Mapping[TFLiteFormat, Mapping[str, Any]], keras_accuracy: float | None) -> str:
    """A sentence with the recommended format, and the formats that are not recommended."""
    agreement, lost = _RECOMMENDED

    def is_good(row: Mapping[str, Any]) -> bool:
        loss = 0.0
        if keras_accuracy is not None and row["accuracy"] is not None:
            loss = keras_accuracy - row["accuracy"]
        return row["agreement"] >= agreement and not loss > lost

    good = {kind: row for kind, row in rows.items() if is_good(row)}
    poor = [kind for kind in rows if kind not in good]
    sentence = "None of these formats is accurate enough; use float32."
    if good:
        best = min(good, key=lambda kind: good[kind]["latency_ms"]["1_threads"])
        row = good[best]
        sentence = (
            f"Recommended: {best}, the fastest on one thread ({row['latency_ms']['1_threads']:.3g} ms, "
            f"{row['bytes']:,} bytes) of those that agree with the model on at least {agreement:.0%} of the images"
            f" and lose at most {100 * lost:.1f} points of accuracy."
        )
    return sentence + (f" Not recommended for this model: {', '.join(poor)}." if poor and good else "")


def _report(
    origin: Provenance,
    expected: parity.Reference,
    rows: Mapping[TFLiteFormat, Mapping[str, Any]],
    quantization: _Quantization,
    notes: Sequence[str],
    options: TFLiteOptions,
) -> report.FormatsReport:
    recommendation = recommend(rows, expected.accuracy)
    half: dict[str, Callable[[Mapping[str, Any]], object]] = {}
    if any("float16_agreement" in row for row in rows.values()):
        half = {
            "agreement in float16": lambda row: f"{row['float16_agreement']:.4f}",
            "max diff in float16": lambda row: f"{row['float16_max_abs_diff']:.3g}",
        }
    return report.FormatsReport(
        "TFLite",
        f"{short_name(origin.name)} as TFLite",
        origin,
        expected,
        rows,
        facts=quantization.facts() | {"recommendation": recommendation, "notes": [recommendation, *notes]},
        columns={"XNNPACK partitions": lambda row: row["xnnpack_partitions"], **half},
        tables=quantization.tables(),
        panels={
            "agreement with the Keras model": {kind: row["agreement"] for kind, row in rows.items()},
            **{f"{kind}: noise / signal": found for kind, found in quantization.errors.items()},
        },
        raw_pixels=options.uint8_input,
    )


def _kept(in_eight_bits: Sequence[DenseLayers]) -> list[report.Table]:
    """The table of the layers that int4-weights keeps in 8 bits."""
    if not in_eight_bits:
        return []
    rows = [
        (", ".join(quantize.layer_of(name) for name in layers.outputs), f"{layers.error:.1%}", f"{layers.weights:.1%}")
        for layers in in_eight_bits
    ]
    heading = "int4-weights: dense layers in 8 bits, with their part of the squared error of all in 4 bits"
    return [(heading, ("layers", "error", "weights"), rows)]


def _gains(steps: Mapping[TFLiteFormat, Sequence[quantize.Step]]) -> list[report.Table]:
    """Tables of what each step of the quantization gained."""
    return [
        (
            f"{kind}: steps of the quantization, on calibration images",
            ("step", "logit error", "agreement", "kept"),
            [(step.name, f"{step.error:.3g}", f"{step.agreement:.4f}", "yes" if step.kept else "no") for step in found],
        )
        for kind, found in steps.items()
    ]


def summary(written: Mapping[TFLiteFormat, tuple[pathlib.Path, parity.Parity]], target: Target = "cpu") -> str:
    """The result of `export_tflite` as a table for the terminal."""
    sizes = {kind: path.stat().st_size for kind, (path, _) in written.items()}
    return report.format_table(written, sizes, PROCESSORS[target])

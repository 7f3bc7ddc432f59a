"""Exports a model as TFLite files, and verifies them against the Keras model."""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from export import fingerprint, parity, report
from export.files import save_module
from export.inference_model import in_dtype, inference_model
from export.options import CALIBRATED, Target, TFLiteFormat, TFLiteOptions
from export.source import ExportedModel, Provenance
from export.tflite import quantize, tflite_file
from export.tflite.delegate_model import delegate_model, with_four_axes
from export.tflite.delegate_rules import require_rules
from export.tflite.four_bits import DenseLayers
from export.tflite.gptq import round_kernels
from export.tflite.half_precision import run_in_half
from export.tflite.quantize import EIGHT_BIT_ACTIVATIONS, EIGHT_BIT_WEIGHTS, STATIC, WEIGHT_SHARE
from export.tflite.smooth_quant import Gain, smooth_quant
from keras_vit import UserError, preprocessing_of, run_directory
from keras_vit.cli.progress import Progress
from keras_vit.errors import ParityError
from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name
from keras_vit.files.tflite_metadata import SEVERAL_CLASSES, calibration_text
from keras_vit.run_directory import Samples
from keras_vit.unknown_score import UNKNOWN_SCORE, UnknownScorer, features_and_logits

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
    output, formats, target = run_directory.output_folder(options.output), options.formats, options.target
    uint8_input, dynamic_batch = options.uint8_input, options.dynamic_batch
    if calibration is None and (calibrated := [kind for kind in formats if kind in CALIBRATED]):
        raise UserError(f"{calibrated[0]} needs representative images for its calibration; pass --calibration FOLDER.")
    if "int4-weights" in formats:
        _check_dense(exported.model, target)
    exported = exported.with_logits()
    model, labels, samples, origin = exported.model, exported.labels, exported.samples, exported.origin
    # Files for delegates have the logits alone.
    unknown = exported.unknown if target == "cpu" else None
    texts = fingerprint.identity_files(output, model, labels, origin)
    ending = "" if target == "cpu" else f"-{target}"
    ending += ("-uint8-input" if uint8_input else "") + ("-dynamic-batch" if dynamic_batch else "")
    preprocessing = exported.preprocessing
    expected = parity.reference(
        in_dtype(model, "float32"), preprocessing, samples, multi_label=origin.multi_label, raw_pixels=uint8_input
    )
    expected_scores = np.zeros(0)
    if unknown is not None:
        batches = (images for _, images in expected.batches(raw_pixels=uint8_input))
        normalized = (np.asarray(preprocessing.normalize(images)) if uint8_input else images for images in batches)
        expected_scores = unknown.scores(in_dtype(model, "float32"), normalized)
    representative, inputs = list[np.ndarray](), list[np.ndarray]()
    smoothed, scaled = model, dict[str, Gain]()
    if calibration is not None:
        reference = parity.Reference(calibration, preprocessing, np.zeros(0))
        representative = [images for _, images in reference.batches()]
        raw = (images for _, images in reference.batches(raw_pixels=True)) if uint8_input else representative
        inputs = [image[None] for images in raw for image in images]
        if any(kind in EIGHT_BIT_ACTIVATIONS for kind in formats):
            smoothed, scaled = smooth_quant(model, representative, head=unknown is None)
    scaled_by = None if target == "cpu" else next(expected.batches())[1][:_COMPARED]
    written: dict[TFLiteFormat, tuple[pathlib.Path, parity.Parity]] = {}
    rows, quantization = dict[TFLiteFormat, dict[str, Any]](), _Quantization(scaled)
    with (
        staged(output) as stage,
        tempfile.TemporaryDirectory(dir=stage) as temporary,
        Progress("TFLite", len(formats), "formats") as progress,
    ):
        float_files: dict[tuple[bool, bool, frozenset[str] | None], pathlib.Path] = {}
        rounded: dict[tuple[bool, frozenset[str]], keras.Model] = {}

        def float_file_of(all_tokens: bool, is_smoothed: bool, in_four_bits: frozenset[str] | None) -> pathlib.Path:
            """The float32 file of a form; its kernels are rounded, of some layers to 4 bits, unless that is None."""
            form, network = (all_tokens, is_smoothed, in_four_bits), smoothed if is_smoothed else model
            if form in float_files:
                return float_files[form]
            if in_four_bits is not None:
                if (is_smoothed, in_four_bits) not in rounded:
                    rounded[is_smoothed, in_four_bits] = round_kernels(network, representative, in_four_bits)
                network = rounded[is_smoothed, in_four_bits]
            file = float_files[form] = pathlib.Path(temporary) / f"{len(float_files)}.tflite"
            file.write_bytes(
                to_tflite(
                    network,
                    for_delegates=scaled_by,
                    uint8_input=uint8_input,
                    dynamic_batch=dynamic_batch,
                    all_tokens=all_tokens,
                    unknown=unknown,
                )
            )
            return file

        for number, kind in enumerate(formats, 1):
            started = time.perf_counter()
            progress.doing = f"{kind} ({number} of {len(formats)})"
            # Ranges over all tokens are wider than those of the class tokens of a few images, and clip less.
            all_tokens, is_smoothed = kind in CALIBRATED, kind in EIGHT_BIT_ACTIVATIONS and smoothed is not model
            is_rounded = kind in EIGHT_BIT_WEIGHTS and bool(representative)
            float_file = float_file_of(all_tokens, is_smoothed, frozenset() if is_rounded else None)
            if kind in STATIC:
                content, quantization.steps[kind] = quantize.quantize_static(
                    float_file, kind, inputs, multi_label=origin.multi_label, at_run_time=target == "cpu"
                )
            elif kind == "int4-weights":
                kept = quantization.in_eight_bits = quantize.kept_in_eight_bits(float_file, inputs)
                in_four_bits = quantize.in_four_bits(float_file, kept, [layer.name for layer in model.layers])
                content = quantize.quantize_four_bits(float_file_of(all_tokens, is_smoothed, in_four_bits), kept)
            else:
                content = float_file.read_bytes() if kind == "float32" else quantize.quantize(float_file, kind)
            if target != "cpu":
                require_rules(f"{kind} TFLite file", content, target)
            file = stage / _file_name(kind, ending)
            description = f"{short_name(origin.name)}, {kind}; weights: {origin.weights}"
            if origin.multi_label:
                description += f"; {SEVERAL_CLASSES}"
            if origin.temperature != 1.0:
                description += calibration_text(origin.temperature)
            score_facts = dict[str, object]()
            if unknown is not None:
                file.write_bytes(content)
                scores = tflite_file.run_samples(file, expected, uint8_input, output=UNKNOWN_SCORE)
                exact, threshold = kind == "float32", unknown.threshold
                if not exact:
                    threshold = parity.matched_threshold(threshold, expected_scores, scores)
                score_facts = parity.unknown_facts(
                    f"{kind} TFLite file", unknown, expected_scores, scores, exact=exact, threshold=threshold
                )
                description += f"; unknown above the unknown_score {threshold:.9g}"
            file.write_bytes(
                tflite_file.with_metadata(
                    content, model.name, description, labels, preprocessing, uint8_input, origin.license_text
                )
            )
            in_float = 0 if unknown is None else unknown.num_bytes
            check_weights(file, 4 * model.count_params(), WEIGHT_SHARE[kind], in_float)
            found = parity.compare(expected, run_tflite(file, expected, uint8_input))
            if kind == "float32":
                parity.require_equal("float32 TFLite file", found)
            else:
                parity.require_agreement(f"{kind} TFLite file", found, options.max_disagreement)
            written[kind] = (output / file.name, found)
            rows[kind] = _measurements(file, found, started) | score_facts
            if target == "gpu":
                half = parity.compare(expected, run_in_half(content, expected))
                rows[kind]["float16_agreement"] = half.agreement
                rows[kind]["float16_max_abs_diff"] = half.max_abs_diff
            if kind in STATIC:
                images = [image[None] for image in next(expected.batches(raw_pixels=uint8_input))[1][:_COMPARED]]
                layers = [layer.name for layer in model.layers]
                quantization.errors[kind] = quantize.layer_errors(float_file, file, images, layers)
            progress.update()
        for float_file in float_files.values():
            float_file.unlink()
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        pathlib.Path(temporary).rmdir()
        notes = fingerprint.note_on_earlier(output, stage)
        _report(origin, expected, rows, quantization, notes, uint8_input).write(stage)
    return written


@dataclasses.dataclass
class _Quantization:
    """What the quantization to the formats of an export did, and what it lost."""

    scaled: Mapping[str, Gain]
    """By layer, what scaled channels gained."""
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
            "scaled_channels": {name: dataclasses.asdict(found) for name, found in self.scaled.items()},
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
        return [*_gains(self.scaled, self.steps), *_kept(self.in_eight_bits), *errors]

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


def _file_name(kind: TFLiteFormat, ending: str = "") -> str:
    return f"model-{kind}{ending}.tflite"


def to_tflite(
    model: keras.Model,
    *,
    for_delegates: np.ndarray | None = None,
    uint8_input: bool = False,
    dynamic_batch: bool = False,
    all_tokens: bool = False,
    finish: Callable[[keras.Model], keras.Model] | None = None,
    unknown: UnknownScorer | None = None,
) -> bytes:
    """Convert the `inference_model` of a model to a float32 TFLite file, with batch 1 or a dynamic batch.

    With some inputs (n, h, w, C) as `for_delegates`, convert its `delegate_model` instead, with batch 1. The output is
    logits (B, K); with `unknown`, there is another, unknown_score (B,). `finish` adds what follows the model, and may
    give a dict of outputs. The conversion goes through a SavedModel. A file converted from a concrete function would
    have no weights.
    """
    preprocessing = preprocessing_of(model)
    if for_delegates is None:
        network = inference_model(model, all_tokens=all_tokens)
    else:
        network = delegate_model(model, for_delegates, all_tokens=all_tokens)
    network = network if finish is None else finish(network)
    shape = (None if dynamic_batch else 1, *preprocessing.image_size, preprocessing.channels)
    scored = None if unknown is None else features_and_logits(network)
    spec = tf.TensorSpec(shape, tf.uint8 if uint8_input else tf.float32, name="image")

    @tf.function(autograph=False, input_signature=[spec])
    def classify(image):
        pixels = preprocessing.normalize(image) if uint8_input else image
        if unknown is not None:
            inside = scored(pixels, training=False)
            logits = inside["logits"]
            with tf.name_scope(UNKNOWN_SCORE):
                return {"logits": logits, UNKNOWN_SCORE: unknown.score(inside["pre_logits"], logits)}
        logits = network(pixels, training=False)
        if isinstance(logits, dict):
            return logits
        return {"logits": tf.reshape(logits, (1, logits.shape[-1])) if for_delegates is not None else logits}

    module = tf.Module()
    module.weights = [weight.value for weight in network.weights]
    with tempfile.TemporaryDirectory() as directory:
        signatures = {"serving_default": classify.get_concrete_function()}
        save_module(module, pathlib.Path(directory), signatures)
        content = tf.lite.TFLiteConverter.from_saved_model(directory).convert()
    return content if for_delegates is None else with_four_axes(content)


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
    raw_pixels: bool,
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
        raw_pixels=raw_pixels,
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


def _gains(scaled: Mapping[str, Gain], steps: Mapping[TFLiteFormat, Sequence[quantize.Step]]) -> list[report.Table]:
    """Tables of what each step of the quantization gained."""
    tables: list[report.Table] = [
        (
            f"{kind}: steps of the quantization, on calibration images",
            ("step", "logit error", "agreement", "kept"),
            [(step.name, f"{step.error:.3g}", f"{step.agreement:.4f}", "yes" if step.kept else "no") for step in found],
        )
        for kind, found in steps.items()
    ]
    if scaled:
        worst = sorted(scaled.items(), key=lambda item: -item[1].before)[:_LISTED]
        rows = [(name, f"{found.before:.3g}", f"{found.after:.3g}", f"{found.alpha:g}") for name, found in worst]
        heading = "Scaled channels: noise / signal power of the products in 8 bits, the worst layer first"
        tables.append((heading, ("layer", "before", "after", "alpha"), rows))
    return tables


def summary(written: Mapping[TFLiteFormat, tuple[pathlib.Path, parity.Parity]]) -> str:
    """The result of `export_tflite` as a table for the terminal."""
    return report.format_table(written, {kind: path.stat().st_size for kind, (path, _) in written.items()})

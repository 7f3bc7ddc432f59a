"""Exports a model as ONNX and OpenVINO files, and verifies them against the Keras model."""

import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from export import fingerprint, parity, report
from export.inference_model import in_dtype, inference_model
from export.onnx import runtimes, web_page, write
from export.onnx.runtimes import FILES, Runner
from export.options import OnnxFormat, OnnxOptions
from export.source import ExportedModel, Provenance
from keras_vit import run_directory
from keras_vit.cli.progress import Progress
from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name
from keras_vit.unknown_score import UnknownScorer, features_and_logits

# Further batch sizes to verify, on the first images.
_BATCHES = (1, 5)


def export_onnx(exported: ExportedModel, options: OnnxOptions) -> dict[OnnxFormat, tuple[pathlib.Path, parity.Parity]]:
    """Write the files of each format. Returns the path of the file to load and its differences from the Keras model.

    Each file is loaded again and run on all samples, with several batch sizes. Raises ParityError, and writes nothing,
    if the logits differ from those of the model by more than rounding. Raises UserError if the output holds files of
    another model. `options.source` is not used.
    """
    output, formats = run_directory.output_folder(options.output), options.formats
    if options.web:
        web_page.check_page(exported.preprocessing)
    runtimes.require_packages(formats)
    exported = exported.with_logits()
    model, labels, origin = exported.model, exported.labels, exported.origin
    for kind in formats:
        write.check_size(kind, model)
    texts = fingerprint.identity_files(output, model, labels, origin)
    expected = parity.reference(
        in_dtype(model, "float32"), exported.preprocessing, exported.samples, multi_label=origin.multi_label
    )
    network, scores = inference_model(model, for_onnx=True), np.zeros(0)
    scorer = exported.unknown
    if scorer is not None:
        network = _with_score(network, scorer)
        scores = scorer.scores(in_dtype(model, "float32"), (images for _, images in expected.batches()))
    written: dict[OnnxFormat, tuple[pathlib.Path, parity.Parity]] = {}
    rows, notes = {}, []
    with staged(output) as stage, Progress("Writing the files"):
        for kind in dict.fromkeys(formats):
            started = time.perf_counter()
            about = {"weights": origin.weights, "license": origin.license_text}
            about["temperature"] = str(origin.temperature)
            about["multi_label"] = str(origin.multi_label).lower()
            about |= {} if scorer is None else {"unknown_threshold": f"{scorer.threshold:.9g}"}
            write.write_onnx(network, kind, stage, labels, about)
            file = stage / FILES[kind][0]
            found, batches = _verify(file, kind, expected)
            written[kind] = (output / file.name, found)
            rows[kind] = _measurements(file, kind, expected, found, batches, started)
            if scorer is not None:
                found_scores = _run(runtimes.open_file(file, kind, output="unknown_score"), expected, file.name)
                rows[kind] |= parity.unknown_facts(f"{kind} file", scorer, scores, found_scores, exact=True)
            if kind == "openvino":
                notes += _default_precision(file, expected)
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        if options.web:
            web_page.write_page(stage, exported.preprocessing, labels, origin)
        notes += fingerprint.note_on_earlier(output, stage)
        _report(origin, expected, rows, notes).write(stage)
    return written


def _with_score(network: keras.Model, scorer: UnknownScorer) -> keras.Model:
    """The model with the score of unknown images as another output."""
    inside = features_and_logits(network)
    logits = inside.output["logits"]
    return keras.Model(
        inside.input, {"logits": logits, "unknown_score": scorer.score(inside.output["pre_logits"], logits)}
    )


def _verify(file: pathlib.Path, kind: OnnxFormat, expected: parity.Reference) -> tuple[parity.Parity, dict[str, float]]:
    """Run a file on all images, and on the first images with the batch sizes of _BATCHES.

    Returns the differences from the Keras model, and the largest difference by batch size. Raises ParityError if a
    difference is larger than rounding.
    """
    runner = runtimes.open_file(file, kind)
    found = parity.compare(expected, _run(runner, expected, file.name))
    parity.require_equal(f"{kind} file", found)
    first = next(expected.batches())[1]
    rows = np.arange(max(_BATCHES)) % len(first)  # repeated if there are fewer images
    images, differences = first[rows], dict[str, float]()
    for size in _BATCHES:
        logits = [runner(images[start : start + size]) for start in range(0, len(images), size)]
        differences[str(size)] = float(np.abs(np.concatenate(logits) - expected.logits[rows]).max())
        what = f"logits of the {kind} file for {size} images at a time"
        parity.require_close(what, differences[str(size)], expected.tolerance)
    return found, differences


def _run(runner: Runner, expected: parity.Reference, name: str) -> np.ndarray:
    """Logits (n, K) of the sample images, or what else the runner returns of each."""
    logits = []
    with Progress(f"verifying {name}", len(expected.logits)) as progress:
        for _, images in expected.batches():
            logits.append(runner(images))
            progress.update(len(images))
    return np.concatenate(logits)


def _measurements(
    file: pathlib.Path,
    kind: OnnxFormat,
    expected: parity.Reference,
    found: parity.Parity,
    batches: dict[str, float],
    started: float,
) -> dict[str, Any]:
    image = next(expected.batches())[1][:1]

    def latency(threads: int) -> float:
        runner = runtimes.open_file(file, kind, threads)
        return report.latency(lambda: runner(image))

    return {
        "files": list(FILES[kind]),
        **report.measurements(_bytes(file.parent, kind), found, latency, runtimes.operators(file, kind), started),
        "max_abs_diff_by_batch": batches,
        "packages": runtimes.versions(kind),
    }


def _bytes(directory: pathlib.Path, kind: OnnxFormat) -> int:
    return sum((directory / name).stat().st_size for name in FILES[kind])


def _default_precision(file: pathlib.Path, expected: parity.Reference) -> list[str]:
    """A note on the differences with the default precision of OpenVINO, unless it is float32 on this processor."""
    name, runner = runtimes.default_precision(file)
    if name == "f32":
        return []
    found = parity.compare(expected, _run(runner, expected, f"{file.name} in {name}"))
    return [
        f"The measurements use INFERENCE_PRECISION_HINT f32. Without it OpenVINO computes in {name} on this "
        f"processor: logits differ from the model's by up to {found.max_abs_diff:.3g}, and {found.agreement:.2%} of "
        "the images have the same predicted class."
    ]


def _report(
    origin: Provenance,
    expected: parity.Reference,
    rows: Mapping[OnnxFormat, Mapping[str, Any]],
    notes: Sequence[str],
) -> report.FormatsReport:
    return report.FormatsReport(
        "ONNX and OpenVINO",
        f"{short_name(origin.name)} as {' and '.join(rows)}",
        origin,
        expected,
        rows,
        facts={"notes": notes},
        columns={f"max diff, batch {size}": functools.partial(_difference, str(size)) for size in _BATCHES},
        panels={f"{kind}: operators": row["operators"] for kind, row in rows.items()},
    )


def _difference(size: str, row: Mapping[str, Any]) -> str:
    return f"{row['max_abs_diff_by_batch'][size]:.3g}"


def summary(written: Mapping[OnnxFormat, tuple[pathlib.Path, parity.Parity]]) -> str:
    """The result of `export_onnx` as a table for the terminal."""
    return report.format_table(written, {kind: _bytes(path.parent, kind) for kind, (path, _) in written.items()})

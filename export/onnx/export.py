"""Exports a model as an ONNX file, with a page that runs it in the browser, and verifies it against the Keras model.

Input: image (B, H, W, C) float32 in the value range of the model. Outputs: those of the task, by name, see
`export.tasks`.
"""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from export import parity, report
from export.files import note_on_earlier, write_beside
from export.inference_model import in_dtype, inference_model
from export.onnx import onnx_file
from export.options import OnnxOptions
from export.source import ExportedModel, Provenance
from export.tasks import Classification, Measures, Task
from keras_vit import Preprocessing, UserError
from keras_vit.cli.progress import Progress
from keras_vit.files.atomic import staged
from keras_vit.files.remote import output_folder
from keras_vit.files.tables import short_name
from keras_vit.scores import UNKNOWN_SCORE, UnknownScorer, features_and_logits

# Further batch sizes to verify, on the first images.
_BATCHES = (1, 5)
# The page, and what it needs to know of the model.
PAGE, FACTS = "classify.html", "classify.json"


def export_onnx(task: Task, options: OnnxOptions) -> tuple[pathlib.Path, Measures]:
    """Write the file. Returns its path and its differences from the Keras model.

    It is loaded again and run on all samples, with several batch sizes. Raises ParityError, and writes nothing, if the
    outputs differ from those of the model by more than rounding. Raises UserError if the output holds files of another
    model. `options.source` is not used.
    """
    output = output_folder(options.output)
    if options.web:
        check_page(task)
    onnx_file.require_packages()
    task = task.prepared()
    onnx_file.check_size(task.exported.model)
    texts = task.identity(output)
    expected, started = task.reference(), time.perf_counter()
    with staged(output) as stage, Progress("Writing the file"):
        file, exported = stage / onnx_file.FILE, task.exported
        onnx_file.write(_network(task), file, exported.labels, _metadata(exported, task))
        runner = onnx_file.open_file(file)
        found = expected.outputs_of(runner)
        measures = task.measure("onnx file", expected, found, exact=True)
        row = {**measures, "bytes": file.stat().st_size}
        extra = report.Extra(note_on_earlier(output, stage) if texts else [])
        if isinstance(task, Classification):
            row = _measure_classifier(file, runner, expected, measures, started)
            if exported.unknown is not None:
                row |= _unknown_facts(exported, exported.unknown, expected, found)
            row |= parity.promise_facts("onnx file", exported.origin.scoring(), expected, found, exact=True)
            columns = {f"max diff, batch {size}": functools.partial(_difference, str(size)) for size in _BATCHES}
            extra = dataclasses.replace(extra, columns=columns, panels={"onnx: operators": row["operators"]})
        write_beside(stage, task.exported.origin)
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        if options.web:
            write_page(stage, exported.preprocessing, exported.labels, exported.origin)
        task.report(stage, "ONNX", expected, {"onnx": row}, extra)
    return output / file.name, measures


def _network(task: Task) -> keras.Model:
    """Return the inference model with its outputs, of a classifier also the score of unknown images and decisions."""
    model, scorer, scoring = task.exported.model, task.exported.unknown, task.exported.origin.scoring()
    network = inference_model(model, for_onnx=True, all_tokens=task.all_tokens)
    if not isinstance(task, Classification):
        return task.network(network)
    if scorer is None and scoring.promise is None:
        return network
    inside = features_and_logits(network)
    logits = inside.output["logits"]
    outputs = {"logits": logits}
    if scorer is not None:
        outputs[UNKNOWN_SCORE] = scorer.score(inside.output["pre_logits"], logits)
    if scoring.promise is not None:
        activation = keras.ops.sigmoid if scoring.is_multi_label else keras.ops.softmax
        outputs |= scoring.promise.decide(activation(logits / scoring.temperature))
    return keras.Model(inside.input, outputs)


def _metadata(exported: ExportedModel, task: Task) -> dict[str, str]:
    """Return texts about a model for its file."""
    origin = exported.origin
    about = {"weights": origin.weights, "license": origin.license_text}
    if isinstance(task, Classification):
        about |= {"temperature": str(origin.temperature), "multi_label": str(origin.multi_label).lower()}
        if exported.unknown is not None:
            about["unknown_threshold"] = f"{exported.unknown.threshold:.9g}"
        if origin.promise is not None:
            about["promise"] = json.dumps(origin.promise.as_json())
    return about


def _measure_classifier(
    file: pathlib.Path, runner: onnx_file.Runner, expected: parity.Reference, measures: Measures, started: float
) -> dict[str, Any]:
    """Return size, speed and operators of a file, and its differences in other batches.

    Raises ParityError if one of these is larger than rounding.
    """
    first = next(expected.batches())[1]
    rows = np.arange(max(_BATCHES)) % len(first)  # repeated if there are fewer images
    images, differences = first[rows], dict[str, float]()
    for size in _BATCHES:
        logits = [runner(images[start : start + size])["logits"] for start in range(0, len(images), size)]
        differences[str(size)] = float(np.abs(np.concatenate(logits) - expected.logits[rows]).max())
        what = f"logits of the onnx file for {size} images at a time"
        parity.require_close(what, differences[str(size)], expected.tolerance)

    def latency(threads: int) -> float:
        run = onnx_file.open_file(file, threads)
        return report.latency(lambda: run(images[:1]))

    return {
        "files": [file.name],
        **report.measurements(file.stat().st_size, measures, latency, onnx_file.operators(file), started),
        "max_abs_diff_by_batch": differences,
        "packages": onnx_file.versions(),
    }


def _difference(size: str, row: Mapping[str, Any]) -> str:
    return f"{row['max_abs_diff_by_batch'][size]:.3g}"


def _unknown_facts(
    exported: ExportedModel, scorer: UnknownScorer, expected: parity.Reference, found: Sequence[parity.Outputs]
) -> dict[str, object]:
    scores = scorer.scores(in_dtype(exported.model, "float32"), (images for _, images in expected.batches()))
    written = np.stack([outputs[UNKNOWN_SCORE] for outputs in found])
    return parity.unknown_facts("onnx file", scorer, scores, written, exact=True)


def check_page(task: Task) -> None:
    """Raise UserError unless an image in a browser has the model's channels, and the model classifies it."""
    channels = task.exported.preprocessing.channels
    if not isinstance(task, Classification) or channels not in (1, 3):
        raise UserError(
            f"The page of --web is for classifiers of images with 1 or 3 channels, and this is a {task.noun} of "
            f"{channels}; leave --web out."
        )


def write_page(
    directory: pathlib.Path, preprocessing: Preprocessing, labels: Sequence[str], origin: Provenance
) -> None:
    """Write the page and its facts beside model.onnx."""
    page = pathlib.Path(__file__).with_name(PAGE).read_text(encoding="utf-8")
    (directory / PAGE).write_text(page, encoding="utf-8")
    facts = {
        "model": short_name(origin.name),
        "weights": origin.weights,
        "license": origin.license_text,
        "labels": list(labels),
        "preprocessing": dataclasses.asdict(preprocessing),
        "temperature": origin.temperature,
        "multi_label": origin.multi_label,
        "promise": [] if origin.promise is None else origin.promise.sentences(),
    }
    (directory / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def summary(task: Task, path: pathlib.Path, measures: Measures) -> str:
    """Return the result of `export_onnx` for the terminal."""
    if isinstance(task, Classification):
        return report.format_table({"onnx": (path, measures)})
    return f"{path}: {task.sentence(measures)}."

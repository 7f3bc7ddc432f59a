"""Evaluate a model on the evaluation images of a data set: refuse what does not fit, predict, measure, report.

A published checkpoint is also compared with its published top-1 accuracy on ImageNet.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import UserError
from keras_vit.errors import refuse_without_effect
from keras_vit.files.atomic import write_text
from keras_vit.files.documents import read_json, validated
from keras_vit.files.labels import check_classes, composed
from keras_vit.files.tables import short_name
from keras_vit.models.build import exact_products
from keras_vit.promise import PROMISE
from keras_vit.published import ACCURACY
from keras_vit.run import SPLIT, TEMPERATURE, Run
from keras_vit.scores import KINDS, Scoring
from keras_vit.text.classes import classes_of_labels
from training.checks import report_directory
from training.data.checks import split_folders
from training.data.dataset import Split
from training.data.known_images import check_evaluation_images, may_know_images
from training.data.sources import DataSet, open_source
from training.evaluation.intervals import of_share
from training.evaluation.metrics import (
    LEAST_LOGIT,
    calibration,
    intervals,
    measure,
    measure_multi_label,
    measure_real,
    multi_label_intervals,
    read_real_labels,
)
from training.evaluation.predictions import open_comparison
from training.evaluation.predictors import Predictor, open_predictor
from training.evaluation.promises import fit_promise
from training.evaluation.report import Subject, multi_label_report, single_label_report, write_report
from training.options.common import DataOptions, StrategyOptions
from training.options.evaluate import EvaluateOptions, InputOptions, VerifyOfficialOptions


def evaluate_run(run: Run, options: EvaluateOptions) -> tuple[Predictor, dict[str, Any]]:
    """Evaluate an opened model on the data of the options; see `evaluate`."""
    source = open_source(options.source, multi_label=True) if options.classes == () else None
    if source is not None:  # the names of the data's classes are the texts
        run = dataclasses.replace(run, texts=classes_of_labels(source.labels, options.templates))
    predictor = open_predictor(run, options.input, options.devices)  # whose mistakes are found before data are read
    return predictor, evaluate(predictor, source or open_source(options.source, multi_label=True), options)


def evaluate(predictor: Predictor, source: DataSet, options: EvaluateOptions) -> dict[str, Any]:
    """Evaluate a model on the evaluation images, write the report, and return its metrics.

    Raises UserError where model, data and options do not belong together.
    """
    run, split, names = predictor.run, source.evaluation, source.labels
    directory = report_directory(run, options.output)
    order = class_order(predictor, source)
    _check(predictor, source, options)
    accepted = None if options.real_labels is None else read_real_labels(options.real_labels, split, len(names))
    comparison = None if options.compare is None else open_comparison(options.compare)
    subject = Subject(
        f"{short_name(run.name)} on {short_name(options.source.data)}{options.input.as_typed()}",
        directory,
        split,
        {"model": run.name, "kind": predictor.kind, "data": options.source.data, **options.input.given()},
        str(options.source.path) if options.source.kind == "folder" else "",
        comparison,
        bool(predictor.labels),
        options.save_predictions,
        options.raw,
    )
    if comparison is not None:
        comparison.check_images(subject.files)
    logits, labels = _predicted(predictor, split, order, options.batch_size)
    if source.multi_label:
        metrics = measure_multi_label(logits, labels, names)
        metrics["intervals"] = multi_label_intervals(logits, labels, names)
        metrics |= _promise(run, logits, labels, order, options) | _groups(run, source)
        return write_report(multi_label_report(subject, logits, labels, names, metrics))
    metrics = measure(logits, labels, names) | {"intervals": intervals(logits, labels, names)} | _groups(run, source)
    if accepted is not None:
        metrics["real_labels"] = measure_real(logits, labels, accepted)
    if run.unknown is not None and run.unknown.auroc:
        metrics["unknown"] = {"score": run.unknown.kind, **dict(zip(KINDS, run.unknown.auroc, strict=True))}
    try:
        if options.calibrate:
            metrics["calibration"] = calibration(logits, labels)
            assert run.directory is not None  # see `training.checks.open_measured`
            write_text(run.directory / TEMPERATURE, json.dumps(metrics["calibration"], indent=2) + "\n")
            (run.directory / PROMISE).unlink(missing_ok=True)  # it was of another temperature
        metrics |= _promise(run, logits, labels, order, options)
    finally:  # without a temperature or a promise, the rest of the report is right
        metrics = write_report(single_label_report(subject, logits, labels, names, metrics))
    return metrics


def _promise(
    run: Run, logits: np.ndarray, labels: np.ndarray, order: Sequence[int], options: EvaluateOptions
) -> dict[str, Any]:
    """Fit the promise that the options ask for, store it in the run, and return it as a metric; {} without one.

    order: the number in the model of each column of the logits.
    """
    if options.max_error is None and options.coverage is None:
        return {}
    assert run.directory is not None  # see `training.checks.open_measured`
    scoring = Scoring(Run.open(run.name).temperature, is_multi_label=run.is_multi_label)  # the temperature of now
    own = np.take(logits, np.argsort(order), axis=1)
    labels = np.take(labels, np.argsort(order), axis=1) if labels.ndim == 2 else np.asarray(order)[labels]
    promise = fit_promise(own, labels, scoring, options.max_error, options.coverage, options.by_class)
    promise = dataclasses.replace(promise, model_checksum=run.model_checksum)
    promise.save(run.directory / PROMISE)
    return {"promise": {**dataclasses.asdict(promise), "sentences": promise.sentences()}}


def _groups(run: Run, source: DataSet) -> dict[str, Any]:
    """Return as a metric how many groups the images are, with what a run on them noted; {} where each is alone."""
    if source.groups is None:
        return {}
    count, groups = len(source.groups), len(np.unique(source.groups))
    if (file := run.file(SPLIT)) is not None:
        noted = validated(read_json(file), {"groups": int, "sentence": str}, file)
        if noted["groups"] == groups:
            return {"split": noted}
    sentence = f"{count:,} images in {groups:,} groups, of which each is either trained or evaluated on."
    return {"split": {"groups": groups, "sentence": sentence}}


def evaluate_model(model: keras.Model, data: str | DataOptions, *, batch_size: int = 64) -> dict[str, Any]:
    """Measure a model on the evaluation images of a data set, as `keras-vit evaluate` does, without a report.

    Args:
        model: built by keras_vit, with a head for the classes of the data.
        data: as `--data` of the commands takes it, such as "folder:pictures"; `DataOptions` for its further options.
        batch_size: images per forward pass.

    Returns:
        The metrics of evaluation.json by name, such as "accuracy" and "log_loss"; "mean_average_precision" for images
        of several classes each.

    Raises UserError for data of other classes.
    """
    options = DataOptions(data) if isinstance(data, str) else data
    source = open_source(options, multi_label=True)
    predictor = open_predictor(Run.of_model(model), InputOptions(), StrategyOptions("single"))
    order = class_order(predictor, source)
    logits, labels = _predicted(predictor, source.evaluation, order, batch_size)
    return (measure_multi_label if source.multi_label else measure)(logits, labels, source.labels)


def _check(predictor: Predictor, source: DataSet, options: EvaluateOptions) -> None:
    """Raise UserError unless model, data and options agree on how many classes an image may have.

    Print what is not known of the images.
    """
    run, of_model = predictor.run, predictor.is_multi_label
    known = check_evaluation_images(run, options.source, source)
    if not known and may_know_images(run, source, is_export=predictor.is_export):
        print(
            f"These images may be training images of {run.name}, which cannot be checked; then the accuracy is too "
            "high."
        )
    if of_model is None and source.multi_label:
        print(f"{run.name} does not say whether it is a multi-label model; it is evaluated as one.")
    if of_model not in (None, source.multi_label):
        had, have = ("several classes", "one class")[:: 1 if of_model else -1]
        raise UserError(
            f"{run.name} was trained on images of {had} each, but these have {have} each; evaluate on the same kind."
        )
    of_one = ("real_labels", "calibrate", "max_error")
    refuse_without_effect(options, [(of_one, not source.multi_label, "images of one class each")])


def class_order(predictor: Predictor, source: DataSet) -> list[int]:
    """Return the number that each class of the data has in the model.

    Raises UserError unless both have the same classes, or as many where the model does not name them.
    """
    names, is_published = predictor.labels, not predictor.is_export and not predictor.run.is_ours
    # A published checkpoint may name the same classes in other words; then they must be in one order.
    if names and not (is_published and {*names} != {*source.labels}):
        check_classes(sorted(names), sorted(source.labels))
        numbers = {composed(name): number for number, name in enumerate(names)}
        return [numbers[composed(name)] for name in source.labels]
    if predictor.num_classes != len(source.labels):
        raise UserError(
            f"The model has {predictor.num_classes} classes and the data have {len(source.labels)}; evaluate on data "
            "with the same classes."
        )
    return [*range(predictor.num_classes)]


def _predicted(
    predictor: Predictor, split: Split, order: Sequence[int], batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits (n, K) in the order of the classes of the data, and labels.

    Minus infinity, the logarithm of probability 0, is replaced, because scikit-learn refuses it.
    """
    logits, labels = predictor.predict(split, batch_size)
    is_bad = np.any(np.isnan(logits) | np.isposinf(logits), axis=-1) | np.all(np.isneginf(logits), axis=-1)
    if bad := int(is_bad.sum()):
        raise UserError(
            f"The model's outputs are not finite for {bad:,} of {len(logits):,} images; its weights are damaged, or "
            "its activations overflow."
        )
    return np.maximum(np.take(logits, order, axis=1), LEAST_LOGIT), labels


@exact_products()
def verify_official(options: VerifyOfficialOptions) -> None:
    """Measure the checkpoint with the preprocessing of its published figure, and print a row of a table and a verdict.

    It is downloaded if it is not in the cache. Of TFDS, the split validation is taken by default, since ImageNet's test
    images have no labels. Raises UserError for data with other classes than the checkpoint, and outputs that are not
    finite.
    """
    name, source, published = options.name, options.source, ACCURACY[options.name]
    size = (published.pixels, published.pixels)
    overrides = InputOptions(image_size=size, resize=published.resize, crop_from=published.crop_from)
    predictor = open_predictor(Run.open(name, image_size=size), overrides, options.devices)
    if source.data.startswith("tfds:") and source.eval_split is None:
        source = dataclasses.replace(source, train_split="validation", eval_split="validation")
    dataset = open_source(source)
    order = class_order(predictor, dataset)
    correct, count, splits = 0, 0, [dataset.evaluation]
    if source.kind == "folder" and split_folders(source.path) is None:  # of which the evaluation images are a tenth
        splits.append(dataset.train)
    for split in splits:
        logits, labels = _predicted(predictor, split, order, options.batch_size)
        correct += int(np.sum(logits.argmax(axis=-1) == labels))
        count += len(labels)
    low, high = (100.0 * end for end in of_share(correct, count))
    cells = (
        name,
        f"{published.pixels} px, {published.resize or 'its own resize'}",
        f"{count:,}",
        f"{100.0 * correct / count:.2f}% ({low:.2f} to {high:.2f})",
        f"{published.top1}%",
        published.source,
        f"keras_vit {keras_vit.__version__}, Keras {keras.__version__}, TensorFlow {tf.__version__}",
    )
    print(f"| {' | '.join(cells)} |")
    verdict, advice = "within", ""
    if not low <= published.top1 <= high:
        verdict = "outside"
        advice = (
            "; check that they are ImageNet's validation images, and that their classes are in the order of the "
            "WordNet ids"
        )
    print(f"The published {published.top1}% is {verdict} the 95% interval of {count:,} images{advice}.")

"""Evaluate a model on the evaluation split of a data set, and write the report: metrics, tables and plots."""

import json
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from keras_vit import UserError, run_directory
from keras_vit.files.atomic import staged, write_text
from keras_vit.files.npz import write_npz
from keras_vit.files.remote import to_path
from keras_vit.files.tables import markdown_table, rounded, short_name
from training.evaluation.calibration import HIGHEST_TEMPERATURE, calibration
from training.evaluation.classifiers import KERAS_MODEL, Classifier, open_classifier
from training.evaluation.metrics import intervals, measure, measure_real, read_real_labels, softmax
from training.evaluation.multi_label import write_multi_label_report
from training.evaluation.plots import draw_confusion, draw_mistakes, draw_reliability, worst_mistakes
from training.input.sources import Source, open_source
from training.options.checks import OUTPUT_NEEDED, check_classes
from training.options.common import DataOptions, InputOptions, StrategyOptions
from training.options.workdir import check_images, trained_on, warn_of_training_images

_COUNTS = {"num_examples": "images", "num_correct": "correctly classified"}
_MEASURES = {
    "accuracy": "accuracy",
    "top5_accuracy": "top-5 accuracy",
    "log_loss": "log loss",
    "macro_precision": "precision, mean of the classes with images",
    "macro_recall": "recall, mean of the classes with images",
    "macro_f1": "F1, mean of the classes with images",
    "ece": "expected calibration error",
}
_CONFUSIONS = 10  # pairs of classes in the report
_PLOTS = {
    "confusion.png": "confusion matrix",
    "reliability.png": "reliability diagram",
    "mistakes.png": "the worst mistakes",
}


def evaluate(
    run: str,
    source: DataOptions,
    *,
    batch_size: int = 256,
    output: str | None = None,
    real_labels: str | None = None,
    save_predictions: bool = False,
    calibrate: bool = False,
    overrides: InputOptions | None = None,
    devices: StrategyOptions | None = None,
) -> dict:
    """Evaluate a model, write the report, and return its metrics.

    `overrides` are those of the model's input size and preprocessing. See `EvaluateOptions` for the other arguments.
    """
    if calibrate and not (to_path(run) / run_directory.CONFIG).is_file():
        raise UserError(f"--calibrate stores the temperature in a run directory, but {run} is none; leave it out.")
    overrides = overrides or InputOptions()
    if calibrate:
        overrides.refuse(
            ("image_size", "resize", "crop_from", "value_range"), "--calibrate, which is for the run as it is used"
        )
    classifier = open_classifier(run, overrides, devices or StrategyOptions("single"))
    directory = _report_directory(run, output)
    dataset = open_source(source, multi_label=True)
    names = class_names(classifier, dataset)
    if dataset.held_out:
        counts = dataset.train.num_examples, dataset.evaluation.num_examples
        check_images(run, source, *counts, dataset.fingerprint)
    known = warn_of_training_images(run, dataset.evaluation.digests, dataset.evaluation.name)
    if not known and _may_know_images(run, classifier, dataset):
        print(
            f"Whether some of these images were among the training images of {run} is not known; if so, the accuracy "
            "is too high."
        )
    _check_multi_label(run, classifier.multi_label, dataset, real_labels is not None, calibrate)
    accepted = None
    if real_labels is not None:
        accepted = read_real_labels(real_labels, dataset.evaluation, len(names))
    logits, labels = classifier.predict(dataset.evaluation, batch_size)
    check_finite(logits)
    title = f"{short_name(run)} on {short_name(source.data)}{overrides.as_typed()}"
    what = {"model": run, "kind": classifier.kind, "data": source.data, **overrides.given()}
    if dataset.multi_label:
        return write_multi_label_report(
            directory,
            title,
            what,
            dataset.evaluation,
            logits,
            labels,
            names,
            save_predictions=save_predictions,
        )
    metrics = measure(logits, labels, names) | {"intervals": intervals(logits, labels, names)}
    if accepted is not None:
        metrics["real_labels"] = measure_real(logits, labels, accepted)
    not_calibrated: UserError | None = None
    if calibrate:
        try:
            metrics["calibration"] = calibration(logits, labels)
        except UserError as error:
            not_calibrated = error  # raised after the report
        else:
            text = json.dumps(metrics["calibration"], indent=2) + "\n"
            write_text(to_path(run) / run_directory.TEMPERATURE, text)
    probabilities = softmax(logits)
    mistakes = worst_mistakes(probabilities, labels)
    metrics["worst_mistakes"] = [
        {
            "image": dataset.evaluation.name(int(index)),
            "label": names[labels[index]],
            "predicted": names[np.argmax(probabilities[index])],
            "label_probability": float(probabilities[index, labels[index]]),
            "predicted_probability": float(probabilities[index].max()),
        }
        for index in mistakes
    ]

    # Write the metrics before the plots, so that a plot that fails does not lose them.
    with staged(directory) as stage:
        (stage / "evaluation.json").write_text(json.dumps(what | metrics, indent=2) + "\n", encoding="utf-8")
        (stage / "evaluation.md").write_text(_report(title, classifier, metrics), encoding="utf-8")
        if save_predictions:
            write_npz(stage / "predictions.npz", {"logits": logits, "labels": labels.astype(np.int64)})
    plots = {
        "confusion.png": lambda path: draw_confusion(np.array(metrics["confusion"]), names, path),
        "reliability.png": lambda path: draw_reliability(metrics["reliability"], metrics["ece"], path),
    }
    if len(mistakes):
        plots["mistakes.png"] = lambda path: draw_mistakes(
            dataset.evaluation, mistakes, probabilities, labels, names, path
        )
    with staged(directory) as stage:
        drawn = [name for name, draw in plots.items() if _is_drawn(draw, stage / name)]
        (stage / "evaluation.md").write_text(_report(title, classifier, metrics, drawn), encoding="utf-8")
    unwritten = [] if save_predictions else ["predictions.npz"]
    for name in [*unwritten, *(_PLOTS.keys() - set(drawn))]:
        (directory / name).unlink(missing_ok=True)  # from a previous report
    print(
        f"Accuracy {metrics['accuracy']:.4f}: {metrics['num_correct']:,} of {metrics['num_examples']:,} images "
        f"correct, log loss {metrics['log_loss']:.4f}; report in {directory / 'evaluation.md'}."
    )
    if not_calibrated is not None:
        raise not_calibrated
    if calibrate:
        print(_calibration_sentence(metrics["calibration"]))
    return metrics


def _may_know_images(run: str, classifier: Classifier, dataset: Source) -> bool:
    """Whether the images to evaluate on may be training images of a model: a rule made the split, or they are records.

    Of published checkpoints nothing is asked, and the splits of a run on the same data set are those of the run.
    """
    trained = trained_on(run)
    if trained is None:
        return dataset.held_out and classifier.kind != KERAS_MODEL
    records = trained.place[0] == "tfrecord"
    if dataset.held_out:
        return records or classifier.kind != KERAS_MODEL
    return dataset.evaluation.digests is None and not records and run_directory.load_training_images(run) is not None


def _check_multi_label(run: str, of_model: bool | None, source: Source, has_real_labels: bool, calibrate: bool) -> None:
    """Raise UserError unless model and data agree on whether an image may have several classes.

    `of_model` is what an exported model says; a model that does not say it is taken for one of the data's kind.
    """
    path = to_path(run)
    folder = path.parent if path.name == run_directory.MODEL else path
    if (folder / run_directory.CONFIG).is_file():
        of_model = run_directory.is_multi_label(run)
    if of_model is None and source.multi_label:
        print(f"{run} does not say whether an image may have several classes; it is taken for such a model.")
    if of_model is not None and of_model != source.multi_label:
        kinds = ("one class each", "several classes each")
        raise UserError(
            f"{run} was trained on images of {kinds[not source.multi_label]}, but these have "
            f"{kinds[source.multi_label]}; evaluate on the same kind."
        )
    if source.multi_label and (has_real_labels or calibrate):
        option = "--real-labels" if has_real_labels else "--calibrate"
        raise UserError(f"{option} is for images of one class each, but these have several; leave it out.")


def _report_directory(run: str, output: str | None) -> pathlib.Path:
    """The directory of the report. Raises UserError for the directory of another run."""
    is_run = (to_path(run) / run_directory.CONFIG).is_file()
    if output is None and not is_run:
        raise UserError(OUTPUT_NEEDED.format(run))
    directory = run_directory.check_output(output or run)
    if (directory / run_directory.CONFIG).is_file() and not (is_run and directory.samefile(run)):
        raise UserError(
            f"{directory} is the directory of another run, not of {run}; give --output a directory of its own."
        )
    return directory


def class_names(classifier: Classifier, source: Source) -> tuple[str, ...]:
    """The class names of the data. Raises UserError unless they match the model's names, or their number."""
    if classifier.names is None and classifier.num_classes != len(source.labels):
        raise UserError(
            f"The model has {classifier.num_classes} classes and the data have {len(source.labels)}; evaluate on data "
            "with the same classes."
        )
    if classifier.names is not None:
        check_classes(classifier.names, source.labels)
    return source.labels


def check_finite(logits: np.ndarray) -> None:
    """Raise UserError for invalid logits. Minus infinity is valid: the logarithm of probability 0."""
    bad = int(np.sum(np.any(np.isnan(logits) | np.isposinf(logits), axis=-1) | np.all(np.isneginf(logits), axis=-1)))
    if bad:
        raise UserError(
            f"The model's outputs are not finite for {bad:,} of {len(logits):,} images; its weights are damaged, or "
            "its activations overflow."
        )


def _is_drawn(draw: Callable[[pathlib.Path], None], path: pathlib.Path) -> bool:
    """Draw a plot. If this fails for any reason, print the reason and remove the file."""
    try:
        draw(path)
    except Exception as error:
        path.unlink(missing_ok=True)
        print(f"{path.name} could not be drawn ({type(error).__name__}: {' '.join(str(error).split())[:200]}).")
        return False
    return True


def _report(title: str, classifier: Classifier, metrics: dict, plots: Sequence[str] = ()) -> str:
    """The metrics in Markdown, with the plots of these file names."""
    found = metrics["intervals"]
    totals = [(words, f"{metrics[name]:,}", "") for name, words in _COUNTS.items()]
    totals += [(words, *rounded(metrics[name], found[name])) for name, words in _MEASURES.items() if name in metrics]
    classes = []
    for name, row in metrics["classes"].items():
        scores = [rounded(row[score], found["classes"][name][score]) for score in ("precision", "recall", "f1")]
        classes.append((name, f"{row['num_examples']:,}", *(value for value, _ in scores), scores[-1][1]))
    lines = [
        f"# {title}",
        "",
        markdown_table(("measure", "value", "95 % interval"), totals, num_text_columns=1),
    ]
    if "real_labels" in metrics:
        real = metrics["real_labels"]
        lines += [
            "",
            f"With all accepted labels: accuracy {real['accuracy']:.4g}, {real['num_correct']} of "
            f"{real['num_examples']} images; {real['num_left_out']} without an accepted label are excluded.",
        ]
    if "calibration" in metrics:
        lines += ["", _calibration_sentence(metrics["calibration"])]
    if classifier.names is None:
        lines += ["", "The model does not name its classes; they are assumed to be those of the data, in this order."]
    lines += [
        "",
        "Intervals: percentile bootstrap with 1,000 resamples of the images; the numbers are rounded to them, and "
        "evaluation.json has them in full. The expected calibration error is that of 15 bins.",
        "",
        markdown_table(
            ("class", "images", "precision", "recall", "F1", "F1, 95 % interval"), classes, num_text_columns=1
        ),
        "",
        _confusions(np.array(metrics["confusion"]), tuple(metrics["classes"])),
        "",
    ]
    return "\n".join([*lines, *(f"![{_PLOTS[name]}]({name})\n" for name in plots)])


def _calibration_sentence(found: dict) -> str:
    before, after = found["before"], found["after"]
    useless = found["temperature"] > 0.99 * HIGHEST_TEMPERATURE
    return (
        f"{'The probabilities on these images are no better than equal ones for all classes. ' * useless}"
        f"Temperature {found['temperature']:.3g}: with it the log loss is {after['log_loss']:.3g} instead of "
        f"{before['log_loss']:.3g} and the expected calibration error {after['ece']:.3g} instead of "
        f"{before['ece']:.3g}, on the images that it was fitted to. All other numbers here are without it; "
        "training.predict and exports use it."
    )


def _confusions(matrix: np.ndarray, names: Sequence[str]) -> str:
    """A table of the most frequently confused pairs of classes."""
    wrong = matrix - np.diag(np.diag(matrix))
    pairs = [np.unravel_index(k, wrong.shape) for k in np.argsort(-wrong, axis=None, kind="stable")[:_CONFUSIONS]]
    rows = [(names[row], names[column], str(wrong[row, column])) for row, column in pairs if wrong[row, column]]
    return markdown_table(("label", "predicted", "images"), rows, num_text_columns=2) if rows else "No mistakes."

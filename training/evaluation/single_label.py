"""The report of a model on images of one class each: evaluation.json, evaluation.md, its tables and plots."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from keras_vit.files.atomic import staged
from keras_vit.files.npz import write_npz
from keras_vit.files.tables import markdown_table, markdown_text, rounded_to
from keras_vit.scores import softmax
from training.data.sources import DataSet
from training.evaluation.html_report import Report, html_report, mistakes_of
from training.evaluation.plots import draw_confusion, draw_mistakes, draw_reliability, most_confused, worst_mistakes
from training.evaluation.predictions import PREDICTIONS, Comparison, comparison_sentence, one_class
from training.evaluation.predictors import Predictor
from training.evaluation.temperature import HIGHEST_TEMPERATURE

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
PAGE = "report.html"
_PLOTS = {
    "confusion.png": "confusion matrix",
    "reliability.png": "reliability diagram",
    "mistakes.png": "the worst mistakes",
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, its evaluation images, and where to write the report."""

    title: str
    """Of the report."""
    directory: pathlib.Path
    """For the files."""
    description: dict[str, Any]
    """For evaluation.json, beside the metrics."""
    save_predictions: bool
    """Whether to write predictions.npz."""
    root: str = ""
    """Folder of the images, which is left out of their names in a page."""
    comparison: Comparison | None = None
    """An earlier evaluation on the same images."""

    def stage_numbers(self, stage: pathlib.Path, metrics: dict, markdown: str, logits: np.ndarray, labels: np.ndarray):
        """Write evaluation.json, evaluation.md and, if it is wanted, predictions.npz with the labels (n,) or (n, K)."""
        text = json.dumps(self.description | metrics, indent=2, allow_nan=False) + "\n"
        (stage / "evaluation.json").write_text(text, encoding="utf-8")
        (stage / "evaluation.md").write_text(markdown, encoding="utf-8")
        if self.save_predictions:
            write_npz(stage / "predictions.npz", {"logits": logits, "labels": labels.astype(np.int64)})

    def remove_others(self, names: Iterable[str] = ()) -> None:
        """Remove the files of a previous report that are not written again."""
        for name in (*names, *([] if self.save_predictions else ["predictions.npz"])):
            (self.directory / name).unlink(missing_ok=True)


def write_report(
    subject: Subject, predictor: Predictor, source: DataSet, logits: np.ndarray, labels: np.ndarray, metrics: dict
) -> dict:
    """Write evaluation.json, evaluation.md and the plots, print a sentence, and return the metrics with the mistakes.

    Args:
        subject: what was evaluated on what.
        predictor: the model.
        source: its evaluation images.
        logits: (n, K).
        labels: (n,).
        metrics: of `measure`, with their intervals.
    """
    split, names, directory = source.evaluation, source.labels, subject.directory
    probabilities = softmax(logits)
    predictions = one_class(list(map(split.name, range(split.num_examples))), probabilities, labels, names)
    if subject.comparison is not None:
        metrics = metrics | {"comparison": subject.comparison.measure(predictions)}
    mistakes = worst_mistakes(probabilities, labels)
    worst = ((split.name(int(n)), labels[n], probabilities[n]) for n in mistakes)
    metrics = metrics | {"worst_mistakes": [_described(*mistake, names) for mistake in worst]}
    report = _report(subject.title, predictor, metrics)
    # Write the metrics before the plots, so that a plot that fails does not lose them.
    with staged(directory) as stage:
        subject.stage_numbers(stage, metrics, _page(report, predictor), logits, labels)
        predictions.write(stage / PREDICTIONS)
    plots = {
        "confusion.png": lambda path: draw_confusion(np.array(metrics["confusion"]), names, path),
        "reliability.png": lambda path: draw_reliability(metrics["reliability"], metrics["ece"], path),
    }
    if len(mistakes):
        plots["mistakes.png"] = lambda path: draw_mistakes(split, mistakes, probabilities, labels, names, path)
    page = html_report(report, split, mistakes_of(probabilities, labels, names), subject.root)
    with staged(directory) as stage:
        drawn = [name for name, draw in plots.items() if _is_drawn(draw, stage / name)]
        (stage / "evaluation.md").write_text(_page(report, predictor, drawn), encoding="utf-8")
        (stage / PAGE).write_text(page, encoding="utf-8")
    subject.remove_others(_PLOTS.keys() - set(drawn))
    low, high = metrics["intervals"]["accuracy"]
    print(
        f"Accuracy {metrics['accuracy']:.4f}: {metrics['num_correct']:,} of {metrics['num_examples']:,} images "
        f"correct (95 % interval {low:.3f} to {high:.3f}), log loss {metrics['log_loss']:.4f}; report in "
        f"{directory / PAGE}."
    )
    if "comparison" in metrics:
        print(comparison_sentence(metrics["comparison"]))
    return metrics


def _described(image: str, label: int, probabilities: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return a mistake for evaluation.json."""
    return {
        "image": image,
        "label": names[label],
        "predicted": names[int(np.argmax(probabilities))],
        "label_probability": float(probabilities[label]),
        "predicted_probability": float(probabilities.max()),
    }


def _report(title: str, predictor: Predictor, metrics: dict) -> Report:
    """The page of the metrics, but for its pictures."""
    low, high = metrics["intervals"]["accuracy"]
    notes = ["The model does not name its classes; they are taken for those of the data."] * (not predictor.labels)
    if "comparison" in metrics:
        notes.append(comparison_sentence(metrics["comparison"]))
    if "calibration" in metrics:
        notes.append(calibration_sentence(metrics["calibration"]))
    return Report(
        title,
        f"Accuracy {100 * metrics['accuracy']:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f} %): "
        f"{metrics['num_correct']:,} of {metrics['num_examples']:,} pictures are right.",
        metrics,
        _MEASURES,
        notes,
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


def _page(report: Report, predictor: Predictor, plots: Sequence[str] = ()) -> str:
    """Return the metrics in Markdown, with the plots of these file names."""
    metrics, intervals = report.metrics, report.metrics["intervals"]
    totals = [(words, f"{metrics[name]:,}", "") for name, words in _COUNTS.items()] + report.facts
    classes = []
    for name, row in metrics["classes"].items():
        scores = [rounded_to(row[score], intervals["classes"][name][score]) for score in ("precision", "recall", "f1")]
        classes.append((name, f"{row['num_examples']:,}", *(value for value, _ in scores), scores[-1][1]))
    lines = [
        f"# {markdown_text(report.title)}",
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
        lines += ["", calibration_sentence(metrics["calibration"])]
    if "unknown" in metrics:
        kind = metrics["unknown"]["score"]
        lines += [
            "",
            f"Images of none of the classes: the score {kind} separated left-out classes with an AUROC of "
            f"{metrics['unknown'][kind]:.4f}.",
        ]
    if "comparison" in metrics:
        lines += ["", comparison_sentence(metrics["comparison"])]
    if not predictor.labels:
        lines += ["", "The model does not name its classes; they are assumed to be those of the data, in this order."]
    lines += [
        "",
        "Intervals: Wilson's for the accuracies, else percentile bootstrap with 1,000 resamples of the images; the "
        "numbers are rounded to them, and evaluation.json has them in full. The expected "
        "calibration error is that of 15 bins.",
        "",
        markdown_table(
            ("class", "images", "precision", "recall", "F1", "F1, 95 % interval"), classes, num_text_columns=1
        ),
        "",
        _confusions(np.array(metrics["confusion"]), tuple(metrics["classes"])),
        "",
    ]
    return "\n".join([*lines, *(f"![{_PLOTS[name]}]({name})\n" for name in plots)])


def calibration_sentence(fitted: dict) -> str:
    """Return what the temperature of `calibration` changes."""
    before, after = fitted["before"], fitted["after"]
    useless = fitted["temperature"] > 0.99 * HIGHEST_TEMPERATURE
    return (
        f"{'The probabilities on these images are no better than equal ones for all classes. ' * useless}"
        f"Temperature {fitted['temperature']:.3g}: with it the log loss is {after['log_loss']:.3g} instead of "
        f"{before['log_loss']:.3g} and the expected calibration error {after['ece']:.3g} instead of "
        f"{before['ece']:.3g}, on the images that it was fitted to. All other numbers here are without it; "
        "keras-vit predict and exports use it."
    )


def _confusions(matrix: np.ndarray, names: Sequence[str]) -> str:
    """A table of the most frequently confused pairs of classes."""
    rows = [(names[row], names[column], str(count)) for row, column, count in most_confused(matrix, _CONFUSIONS)]
    return markdown_table(("label", "predicted", "images"), rows, num_text_columns=2) if rows else "No mistakes."

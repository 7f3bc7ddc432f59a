"""The report of a model on images: one dict, as JSON, as Markdown, and as report.html, with the mistakes as images.

The page needs no network and is readable on a phone.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.cli.pages import render, thumbnail_address
from keras_vit.files.atomic import staged
from keras_vit.files.npz import write_npz
from keras_vit.files.tables import markdown_table, markdown_text, rounded_to
from keras_vit.scores import sigmoid
from training.data.dataset import Split
from training.evaluation.metrics import HIGHEST_TEMPERATURE, decision_losses
from training.evaluation.plots import (
    LEGIBLE_CLASSES,
    draw_confusion,
    draw_mistakes,
    draw_precision_recall,
    draw_reliability,
    most_confused,
)
from training.evaluation.predictions import (
    PREDICTIONS,
    Comparison,
    Prediction,
    comparison_sentence,
    one_class,
    several_classes,
    write_predictions,
)

PAGE = "report.html"
_ARRAYS = "predictions.npz"
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
_MULTI_LABEL_MEASURES = {
    "mean_average_precision": "mean average precision",
    "micro_f1": "F1 of all decisions",
    "macro_f1": "F1, mean of the classes with images",
    "exact_match": "images with all classes right",
    "log_loss": "log loss of a class",
}
# Measures that few people know, in words.
_MEANINGS = {
    "log loss": "The log loss is 0 if every answer is right and certain; sure mistakes raise it most.",
    "expected calibration error": "The expected calibration error is how far certainty and accuracy are apart: at 0, "
    "four of five images with a probability of 80% are right.",
    "mean average precision": "The average precision of a class is 1 if all its images come before all others in "
    "the order of its probability.",
}
_INTERVAL, _SCORES = "95% interval", ("precision", "recall", "f1")
_PLOTS = {
    "confusion.png": "confusion matrix",
    "reliability.png": "reliability diagram",
    "mistakes.png": "the worst mistakes",
    "precision_recall.png": "precision and recall",
}
# In the JSON: mistakes, and decisions of images of several classes; in the Markdown: pairs of classes.
_WORST, _WORST_DECISIONS, _CONFUSIONS = 24, 20, 10
# On the page: mistakes with an image, of about 5 kB each, and their longest side in pixels; pairs of classes, where
# there are too many for a matrix.
_IMAGES, _SIDE, _PAIRS = 200, 160, 30


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model and data of an evaluation, and where and how to write the report."""

    title: str
    directory: pathlib.Path
    split: Split
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For evaluation.json, beside the metrics."""
    root: str = ""
    """Folder of the images, which is left out of their names in a page."""
    comparison: Comparison | None = None
    """An earlier evaluation on the same images."""
    names_classes: bool = True
    save_predictions: bool = False
    raw: bool = False
    """See `CsvOptions`."""

    @property
    def files(self) -> list[str]:
        return [self.split.name(index) for index in range(self.split.num_examples)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The content of a report."""

    subject: Subject
    metrics: dict[str, Any]
    """Those of evaluation.json."""
    measures: Mapping[str, str]
    """The names of the metrics of all images, and what to call them."""
    headline: str
    """The result in a sentence, of the page."""
    summary: str = ""
    """The same, with the measures, for the terminal."""
    notes: Sequence[str] = ()
    """Sentences on how to read it."""
    sentences: Sequence[str] = ()
    """Sentences on a comparison and a calibration."""
    paragraphs: Sequence[str] = ()
    """Paragraphs of Markdown after these sentences."""
    predictions: Sequence[Prediction] = ()
    mistakes: Sequence[Prediction] = ()
    """The worst first."""
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """For predictions.npz."""
    plots: Mapping[str, Callable[[pathlib.Path], None]] = dataclasses.field(default_factory=dict)
    """The name of a file -> draws it."""

    def all_notes(self) -> list[str]:
        """Return the notes, and what the groups of the data change, which opening the data has printed."""
        return [*self.notes, *([self.metrics["split"]["sentence"]] if "split" in self.metrics else [])]

    def facts(self) -> list[tuple[str, str, str]]:
        """Return the measures in words, with their values and intervals, of those that the metrics have."""
        intervals = self.metrics["intervals"]
        known = [(name, words) for name, words in self.measures.items() if self.metrics.get(name) is not None]
        return [(words, *rounded_to(self.metrics[name], intervals[name])) for name, words in known]

    def markdown(self, plots: Sequence[str]) -> str:
        """Return the metrics in Markdown, with the plots of these file names."""
        counts = [(words, f"{self.metrics[name]:,}", "") for name, words in _COUNTS.items() if name in self.metrics]
        table = markdown_table(("measure", "value", _INTERVAL), [*counts, *self.facts()], num_text_columns=1)
        images = [f"![{_PLOTS[name]}]({name})" for name in plots]
        title = f"# {markdown_text(self.subject.title)}"
        return "\n\n".join([title, table, *self.all_notes(), *self.sentences, *self.paragraphs, *images]) + "\n"


def single_label_report(
    subject: Subject, logits: np.ndarray, labels: np.ndarray, names: Sequence[str], metrics: dict[str, Any]
) -> Report:
    """Return the report on images of one class each, from logits (n, K), labels (n,) and `measure`, with intervals."""
    predictions, mistakes = one_class(subject.files, logits, labels, names)
    worst = [
        {
            "image": each.file,
            "label": each.label[0],
            "predicted": each.predicted[0],
            "label_probability": each.label_probability,
            "predicted_probability": each.probabilities[0],
        }
        for each in mistakes[:_WORST]
    ]
    metrics, sentences = _compared(metrics, subject, predictions)
    metrics["worst_mistakes"] = worst
    confusion, (low, high) = np.array(metrics["confusion"]), metrics["intervals"]["accuracy"]
    plots: dict[str, Callable[[pathlib.Path], None]] = {
        "confusion.png": lambda path: draw_confusion(confusion, names, path),
        "reliability.png": lambda path: draw_reliability(metrics["reliability"], metrics["ece"], path),
    }
    if mistakes:
        plots["mistakes.png"] = lambda path: draw_mistakes(subject.split, mistakes, path)
    unnamed = "The model does not name its classes; they are taken for those of the data, in this order."
    counts = f"{metrics['num_correct']:,} of {metrics['num_examples']:,}"
    interval = f"{_INTERVAL} {100 * low:.1f} to {100 * high:.1f}%"
    accuracy = f"Accuracy {100 * metrics['accuracy']:.1f}% ({interval})"
    return Report(
        subject=subject,
        metrics=metrics,
        measures=_MEASURES,
        headline=f"{accuracy}: {counts} images are right.",
        summary=f"{accuracy}, {counts} images correct, log loss {metrics['log_loss']:.4f}",
        notes=[] if subject.names_classes else [unnamed],
        sentences=sentences,
        paragraphs=_single_label_paragraphs(metrics, confusion, names),
        predictions=predictions,
        mistakes=mistakes,
        arrays={"logits": logits, "labels": labels},
        plots=plots,
    )


def _single_label_paragraphs(metrics: Mapping[str, Any], confusion: np.ndarray, names: Sequence[str]) -> list[str]:
    paragraphs, rows = [], []
    if (real := metrics.get("real_labels")) is not None:
        paragraphs.append(
            f"With all accepted labels: accuracy {real['accuracy']:.4g}, {real['num_correct']} of "
            f"{real['num_examples']} images; {real['num_left_out']} without an accepted label are excluded."
        )
    if (unknown := metrics.get("unknown")) is not None:
        paragraphs.append(
            f"Images of none of the classes: the score {unknown['score']} separated left-out classes with an AUROC of "
            f"{unknown[unknown['score']]:.4f}."
        )
    for name, row in metrics["classes"].items():
        own = metrics["intervals"]["classes"][name]
        # Nothing is known of the recall of a class without images, and of the precision of one that is not predicted.
        scores = [rounded_to(row[score], own[score]) if own[score] else ("–", "") for score in _SCORES]
        rows.append((name, f"{row['num_examples']:,}", *(value for value, _ in scores), scores[-1][1]))
    header = ("class", "images", "precision", "recall", "F1", f"F1, {_INTERVAL}")
    pairs = [(names[row], names[column], str(n)) for row, column, n in most_confused(confusion, _CONFUSIONS)]
    return [
        *paragraphs,
        "Intervals: Wilson's for accuracies and the scores of a class, else percentile bootstrap with 1,000 resamples "
        "of the images; the numbers are rounded to them, and evaluation.json has them in full. The expected "
        "calibration error is that of 15 bins.",
        markdown_table(header, rows, num_text_columns=1),
        markdown_table(("label", "predicted", "images"), pairs, num_text_columns=2) if pairs else "No mistakes.",
    ]


def multi_label_report(
    subject: Subject, logits: np.ndarray, targets: np.ndarray, names: Sequence[str], metrics: dict[str, Any]
) -> Report:
    """Return the report on images of several classes each, from logits (n, K) and targets (n, K) of 0 and 1."""
    truth, average = targets > 0.5, metrics["mean_average_precision"]
    predictions, mistakes = several_classes(subject.files, logits, truth, names)
    metrics, sentences = _compared({"multi_label": True, **metrics}, subject, predictions)
    metrics["worst_mistakes"] = _worst_decisions(subject.split, logits, truth, names)
    rows = []
    for name, row in metrics["classes"].items():
        own, precision = metrics["intervals"]["classes"][name], row["average_precision"]
        measured = ("", "") if precision is None else rounded_to(precision, own["average_precision"])
        rows.append((name, f"{row['num_examples']:,}", *measured, *(f"{row[s]:.3f}" for s in _SCORES)))
    wrong = [
        (row["image"], row["class"], "yes" if row["has_class"] else "no", f"{row['probability']:.3g}")
        for row in metrics["worst_mistakes"]
    ]
    header = ("class", "images", "average precision", _INTERVAL, "precision", "recall", "F1")
    tables = [markdown_table(header, rows, num_text_columns=1)]
    if wrong:
        tables.append(markdown_table(("image", "class", "has it", "probability"), wrong, num_text_columns=3))
    known = "unknown, since no image has a class" if average is None else f"{average:.4f}"
    return Report(
        subject=subject,
        metrics=metrics,
        measures=_MULTI_LABEL_MEASURES,
        headline=f"All classes are right for {100 * metrics['exact_match']:.1f}% of {metrics['num_examples']:,} "
        "images.",
        summary=f"Mean average precision {known}, F1 {metrics['micro_f1']:.4f}, all classes of an image right "
        f"{metrics['exact_match']:.4f} on {metrics['num_examples']:,} images",
        notes=["An image may have several classes; a class is predicted if its probability is at least 50%."],
        sentences=sentences,
        paragraphs=[
            "Intervals: Wilson's for the images whose classes are all right and for F1 of a class, else percentile "
            "bootstrap with 1,000 resamples of the images. Means of the classes leave out those without an image.",
            *tables,
        ],
        predictions=predictions,
        mistakes=mistakes,
        arrays={"logits": logits, "labels": targets},
        plots={}
        if average is None
        else {"precision_recall.png": lambda path: draw_precision_recall(logits, truth, names, path)},
    )


def _worst_decisions(split: Split, logits: np.ndarray, truth: np.ndarray, names: Sequence[str]) -> list[dict]:
    losses = np.where(truth == (logits >= 0.0), 0.0, decision_losses(logits, truth))
    worst = np.argsort(-losses, axis=None, kind="stable")[:_WORST_DECISIONS]
    places = (np.unravel_index(place, losses.shape) for place in worst)
    return [
        {
            "image": split.name(int(row)),
            "class": names[column],
            "has_class": bool(truth[row, column]),
            "probability": float(sigmoid(logits[row, column])),
        }
        for row, column in places
        if losses[row, column] > 0.0
    ]


def _compared(
    metrics: dict[str, Any], subject: Subject, predictions: Sequence[Prediction]
) -> tuple[dict[str, Any], list[str]]:
    """Return the metrics with those of the comparison, if there is one, and what it and a calibration say."""
    metrics, sentences = dict(metrics), []
    if subject.comparison is not None:
        metrics["comparison"] = subject.comparison.measure(predictions)
        sentences.append(comparison_sentence(metrics["comparison"]))
    if "calibration" in metrics:
        sentences.append(_calibration_sentence(metrics["calibration"]))
    sentences += metrics.get("promise", {}).get("sentences", [])
    return metrics, sentences


def _calibration_sentence(fitted: Mapping[str, Any]) -> str:
    before, after = fitted["before"], fitted["after"]
    useless = fitted["temperature"] > 0.99 * HIGHEST_TEMPERATURE
    return (
        f"{'The probabilities on these images are no better than equal ones for all classes. ' * useless}"
        f"Temperature {fitted['temperature']:.3g}: with it the log loss is {after['log_loss']:.3g} instead of "
        f"{before['log_loss']:.3g} and the expected calibration error {after['ece']:.3g} instead of "
        f"{before['ece']:.3g}, on the images that it was fitted to. All other numbers here are without it; "
        "keras-vit predict and exports use it."
    )


def write_report(report: Report) -> dict[str, Any]:
    """Write the files of a report, remove those of an earlier one that are not written again, and print a summary.

    Returns its metrics.
    """
    subject = report.subject
    # Write the metrics before the plots, so that a plot that fails does not lose them.
    with staged(subject.directory) as stage:
        text = json.dumps({**subject.description, **report.metrics}, indent=2, allow_nan=False)
        (stage / "evaluation.json").write_text(f"{text}\n", encoding="utf-8")
        (stage / "evaluation.md").write_text(report.markdown(()), encoding="utf-8")
        write_predictions(stage / PREDICTIONS, report.predictions, raw=subject.raw)
        if subject.save_predictions:
            write_npz(stage / _ARRAYS, {**report.arrays, "labels": report.arrays["labels"].astype(np.int64)})
    page = html_report(report)
    with staged(subject.directory) as stage:
        drawn = [name for name, draw in report.plots.items() if _is_drawn(draw, stage / name)]
        (stage / "evaluation.md").write_text(report.markdown(drawn), encoding="utf-8")
        (stage / PAGE).write_text(page, encoding="utf-8")
    for name in [name for name in _PLOTS if name not in drawn] + [_ARRAYS] * (not subject.save_predictions):
        (subject.directory / name).unlink(missing_ok=True)
    print(f"{report.summary}; report in {subject.directory / PAGE}.", *report.sentences, sep="\n")
    return report.metrics


def _is_drawn(draw: Callable[[pathlib.Path], None], path: pathlib.Path) -> bool:
    """Draw a plot. If this fails for any reason, print the reason and remove the file."""
    try:
        draw(path)
    except Exception as error:
        path.unlink(missing_ok=True)
        print(f"{path.name} could not be drawn ({type(error).__name__}: {' '.join(str(error).split())[:200]}).")
        return False
    return True


# The page


def html_report(report: Report) -> str:
    """Return the page as text; as many mistakes are shown as it can hold."""
    classes, facts, confusion = report.metrics["classes"], report.facts(), report.metrics.get("confusion")
    shown, legible = report.mistakes[:_IMAGES], len(classes) <= LEGIBLE_CLASSES
    names, pairs = list(classes), None
    if confusion is not None and not legible:
        places = most_confused(np.array(confusion), _PAIRS)
        pairs = [(names[row], names[column], count, count / sum(confusion[row])) for row, column, count in places]
    bars = []
    for name, row in classes.items():
        scores = row["recall"] if row["num_examples"] else None, row["precision"]
        bars.append({"name": name, "num_images": row["num_examples"], "scores": scores})
    return render(
        "evaluation",
        title=report.subject.title,
        headline=report.headline,
        notes=[*report.all_notes(), *report.sentences],
        num_mistakes=len(report.mistakes),
        cards=[_card(report.subject, mistake) for mistake in shown],
        classes=sorted({name for mistake in shown for name in (*mistake.label, *mistake.predicted)}),
        bars=sorted(bars, key=lambda bar: 2.0 if bar["scores"][0] is None else bar["scores"][0]),
        bar_titles=["found (recall)", "right if said (precision)"],
        names=names,
        matrix=confusion if legible else None,
        pairs=pairs,
        facts=facts,
        meanings=" ".join(text for name, text in _MEANINGS.items() if any(name in words for words, *_ in facts)),
    )


def _card(subject: Subject, mistake: Prediction) -> dict[str, Any]:
    card = {
        "name": mistake.file.removeprefix(subject.root).lstrip("/"),
        "label": ", ".join(mistake.label) or "none",
        "predicted": ", ".join(mistake.predicted) or "none",
        "classes": (*mistake.label, *mistake.predicted),
        "worst": mistake.worst,
        "probability": mistake.worst_probability,
        "label_probability": mistake.label_probability,
        "address": "",
        "problem": "",
    }
    try:  # one image that cannot be read must not cost the others
        pixels = subject.split.example(tf.constant(mistake.index, tf.int64))[0].numpy()
        return {**card, "address": thumbnail_address(pixels, _SIDE)}
    except Exception as error:
        return {**card, "problem": str(error)[:120]}

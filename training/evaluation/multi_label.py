"""The report of a model for images of several classes each: average precision, F1, and the decisions it gets wrong.

A class is predicted where its probability, the sigmoid of its logit, is at least 0.5. The average precision needs no
threshold: "The PASCAL Visual Object Classes Challenge" as scikit-learn computes it, without interpolation.
"""

import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np
import sklearn.metrics

from keras_vit.files.atomic import staged
from keras_vit.files.tables import markdown_table, markdown_text, rounded_to
from keras_vit.scores import sigmoid
from training.data.sources import DataSet, Split
from training.evaluation.html_report import Report, html_report, mistakes_of_several
from training.evaluation.metrics import DRAWS, interval
from training.evaluation.plots import save_figure
from training.evaluation.predictions import PREDICTIONS, comparison_sentence, several_classes
from training.evaluation.single_label import PAGE, Subject

_MEASURES = {
    "mean_average_precision": "mean average precision",
    "micro_f1": "F1 of all decisions",
    "macro_f1": "F1, mean of the classes with images",
    "exact_match": "images with all classes right",
    "log_loss": "log loss of a class",
}
_CURVES = "precision_recall.png"
# Classes with a curve of their own, the most frequent, and decisions in the report.
_MOST_CURVES, _WORST = 10, 20


def measure_multi_label(logits: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> dict:
    """Return the numbers of the report from logits (n, K) and targets (n, K) of 0 and 1.

    mean_average_precision is the mean over the classes with an image; micro_f1 counts every decision about a class,
    macro_f1 is the mean over the classes with an image; exact_match is the share of images without a wrong decision;
    log_loss is the mean binary cross-entropy of a decision in nats.
    """
    truth, predicted = targets > 0.5, logits >= 0.0
    # scikit-learn takes a single column for two classes, so one without positives stands beside.
    both = [np.pad(decisions, ((0, 0), (0, 1))) for decisions in (truth, predicted)]
    scores = sklearn.metrics.precision_recall_fscore_support(*both, zero_division=0.0)
    precision, recall, f1, support = (score[:-1] for score in scores)
    average = [
        float(sklearn.metrics.average_precision_score(truth[:, k], logits[:, k])) if support[k] else None
        for k in range(len(names))
    ]
    known = [value for value in average if value is not None]
    return {
        "num_examples": len(targets),
        "mean_average_precision": float(np.mean(known)) if known else None,
        "micro_f1": float(sklearn.metrics.f1_score(*both, average="micro", zero_division=0.0)),
        "macro_f1": float(f1[support > 0].mean()) if known else None,
        "exact_match": float(sklearn.metrics.accuracy_score(*both)),
        "log_loss": float(np.mean(_losses(logits, truth))),
        "classes": {
            name: {
                "num_examples": int(support[k]),
                "average_precision": average[k],
                "precision": float(precision[k]),
                "recall": float(recall[k]),
                "f1": float(f1[k]),
            }
            for k, name in enumerate(names)
        },
    }


def multi_label_intervals(
    logits: np.ndarray, targets: np.ndarray, names: Sequence[str], *, seed: int = 0
) -> dict[str, Any]:
    """Return 95 % intervals [low, high] by 1,000 draws of the images with replacement, as `metrics.intervals` does.

    A class without an image in a draw is left out of that draw.
    """
    truth, predicted = targets > 0.5, logits >= 0.0
    losses, exact = _losses(logits, truth).mean(axis=1), np.all(truth == predicted, axis=1)
    order = np.argsort(-logits, axis=0, kind="stable")
    ordered_truth = np.take_along_axis(truth, order, axis=0).astype(np.float64)
    ordered = np.take_along_axis(logits, order, axis=0)
    # Precision and recall change only behind the last of equal scores.
    ends = np.vstack([ordered[1:] != ordered[:-1], np.ones((1, len(names)), bool)])
    drawn: dict[str, list] = {name: [] for name in (*_MEASURES, "average_precision", "f1")}
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        for _ in range(DRAWS):
            weights = np.bincount(rng.integers(0, len(truth), len(truth)), minlength=len(truth)).astype(np.float64)
            average = _average_precision(weights[order], ordered_truth, ends)
            right, said, there = (weights @ values for values in (truth & predicted, predicted, truth))
            f1 = 2.0 * right / np.maximum(said + there, 1.0)
            drawn["average_precision"].append(average)
            drawn["f1"].append(f1)
            drawn["mean_average_precision"].append(np.nanmean(average))
            drawn["micro_f1"].append(2.0 * right.sum() / max(said.sum() + there.sum(), 1.0))
            drawn["macro_f1"].append(f1[there > 0.0].mean() if there.any() else np.nan)
            drawn["exact_match"].append(weights @ exact / len(truth))
            drawn["log_loss"].append(weights @ losses / len(truth))
    of_class = {name: np.array(drawn[name]) for name in ("average_precision", "f1")}  # (draws, K)
    found: dict[str, Any] = {name: _known_interval(np.array(drawn[name])) for name in _MEASURES}
    found["classes"] = {
        name: {measure: _known_interval(values[:, k]) for measure, values in of_class.items()}
        for k, name in enumerate(names)
    }
    return found


def _known_interval(values: np.ndarray) -> list[float] | None:
    """The interval of the draws that have a value; None if none has."""
    known = values[~np.isnan(values)]
    return interval(known) if known.size else None


def _average_precision(weights: np.ndarray, truth: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Average precision (K,) of images (n, K) in the order of their scores; nan without a positive weight."""
    right, seen = np.cumsum(weights * truth, axis=0), np.cumsum(weights, axis=0)
    precision = right / np.maximum(seen, 1.0)
    before = np.maximum.accumulate(np.where(ends, right, 0.0), axis=0)
    gained = np.where(ends, right - np.vstack([np.zeros((1, right.shape[1])), before[:-1]]), 0.0)
    return np.sum(precision * gained, axis=0) / np.where(right[-1] > 0.0, right[-1], np.nan)


def _losses(logits: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Binary cross-entropy (n, K) in nats."""
    return np.logaddexp(0.0, np.where(truth, -logits, logits).astype(np.float64))


def write_multi_label_report(subject: Subject, source: DataSet, logits: np.ndarray, targets: np.ndarray) -> dict:
    """Measure, write evaluation.json, evaluation.md and the curves, print a sentence, and return the metrics.

    Args:
        subject: what was evaluated on what.
        source: the images.
        logits: (n, K).
        targets: (n, K) of 0 and 1.
    """
    names, directory = source.labels, subject.directory
    metrics = measure_multi_label(logits, targets, names)
    metrics["intervals"] = multi_label_intervals(logits, targets, names)
    metrics["worst_mistakes"] = _worst_decisions(source.evaluation, logits, targets > 0.5, names)
    average = metrics["mean_average_precision"]
    split, truth = source.evaluation, targets > 0.5
    predictions = several_classes(list(map(split.name, range(split.num_examples))), logits, truth, names)
    if subject.comparison is not None:
        metrics["comparison"] = subject.comparison.measure(predictions)
    mistakes = mistakes_of_several(sigmoid(logits), truth, names)
    report = _report(subject.title, metrics)
    page = html_report(report, split, mistakes, subject.root)
    with staged(directory) as stage:
        subject.stage_numbers(stage, {"multi_label": True, **metrics}, _markdown(report), logits, targets)
        if average is not None:
            _draw_curves(logits, truth, names, stage / _CURVES)
        predictions.write(stage / PREDICTIONS)
        (stage / PAGE).write_text(page, encoding="utf-8")
    subject.remove_others()
    shown = "unknown, since no image has a class" if average is None else f"{average:.4f}"
    print(
        f"Mean average precision {shown}, F1 {metrics['micro_f1']:.4f}, all classes of "
        f"an image right {metrics['exact_match']:.4f} on {metrics['num_examples']:,} images; report in "
        f"{directory / PAGE}."
    )
    if "comparison" in metrics:
        print(comparison_sentence(metrics["comparison"]))
    return metrics


def _report(title: str, metrics: dict) -> Report:
    """Return the page of the metrics, but for its images."""
    notes = ["An image may have several classes; a class is predicted if its probability is at least 50 %."]
    if "comparison" in metrics:
        notes.append(comparison_sentence(metrics["comparison"]))
    return Report(
        title,
        f"All classes are right for {100 * metrics['exact_match']:.1f} % of {metrics['num_examples']:,} pictures.",
        metrics,
        _MEASURES,
        notes,
    )


def _worst_decisions(split: Split, logits: np.ndarray, truth: np.ndarray, names: Sequence[str]) -> list[dict]:
    losses = np.where(truth == (logits >= 0.0), 0.0, _losses(logits, truth))
    worst = np.argsort(-losses, axis=None, kind="stable")[:_WORST]
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


def _markdown(report: Report) -> str:
    """Return the metrics in Markdown."""
    metrics = report.metrics
    totals = [("images", f"{metrics['num_examples']:,}", ""), *report.facts]
    rows = []
    for name, row in metrics["classes"].items():
        own = metrics["intervals"]["classes"][name]
        average = ("", "")
        if row["average_precision"] is not None:
            average = rounded_to(row["average_precision"], own["average_precision"])
        others = [f"{row[score]:.3f}" for score in ("precision", "recall", "f1")]
        rows.append((name, f"{row['num_examples']:,}", *average, *others))
    header = ("class", "images", "average precision", "95 % interval", "precision", "recall", "F1")
    lines = [
        f"# {markdown_text(report.title)}",
        "",
        "An image may have several classes; a class is predicted if its probability is at least 0.5.",
        "",
        markdown_table(("measure", "value", "95 % interval"), totals, num_text_columns=1),
        "",
        "Intervals: percentile bootstrap with 1,000 resamples of the images. Means of the classes leave out those "
        "without an image.",
        "",
        markdown_table(header, rows, num_text_columns=1),
        "",
    ]
    if metrics["worst_mistakes"]:
        wrong = [
            (row["image"], row["class"], "yes" if row["has_class"] else "no", f"{row['probability']:.3g}")
            for row in metrics["worst_mistakes"]
        ]
        lines += [markdown_table(("image", "class", "has it", "probability"), wrong, num_text_columns=3), ""]
    curves = [] if metrics["mean_average_precision"] is None else [f"![precision and recall]({_CURVES})\n"]
    return "\n".join([*lines, *curves])


def _draw_curves(logits: np.ndarray, truth: np.ndarray, names: Sequence[str], path: pathlib.Path) -> None:
    """Plot precision over recall of the most frequent classes."""
    figure = matplotlib.figure.Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    frequent = np.argsort(-truth.sum(axis=0), kind="stable")[:_MOST_CURVES]
    for k in (k for k in frequent if truth[:, k].any()):
        precision, recall, _ = sklearn.metrics.precision_recall_curve(truth[:, k], logits[:, k])
        # Labels of Matplotlib that begin with an underscore are not shown, and a $ would begin a formula.
        axes.plot(recall, precision, label=f"\u200b{names[k]}".replace("$", r"\$"))
    axes.set(xlim=(0, 1.01), ylim=(0, 1.01), xlabel="recall", ylabel="precision", title="Precision and recall")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)

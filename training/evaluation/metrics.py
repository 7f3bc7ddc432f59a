"""The numbers of a report, from logits and labels: scikit-learn's where it has them, intervals, calibration.

Calibration: "On Calibration of Modern Neural Networks" (arXiv 1706.04599), section 2, and 4.2 for the temperature.
Accepted labels: "Are we done with ImageNet?" (2006.07159) and its real.json.
Intervals: Wilson's for shares of images, else percentile bootstrap over the images. Several classes an image: one
is predicted where its probability, the sigmoid of its logit, is at least 0.5; the average precision needs no threshold,
and is that of scikit-learn, without interpolation.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import sklearn.metrics

from keras_vit import UserError
from keras_vit.errors import reading
from keras_vit.files.remote import existing_file
from keras_vit.scores import TOP_K, Scoring, softmax
from training.data.dataset import Split
from training.evaluation.intervals import draws, of_draws, of_f1, of_share

BINS = 15  # of confidence, of equal width
_DRAWS = 1000  # of the bootstrap
# How the files of ImageNet's validation set are called, in the order of real.json.
_VALIDATION_FILE = re.compile(r"ILSVRC2012_val_(\d{8})")
_LOWEST, HIGHEST_TEMPERATURE = 0.05, 20.0  # temperatures that are considered
_HALVINGS = 60
LEAST_LOGIT = -1e4  # in the place of minus infinity, the logit of a probability of 0


def measure(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of the report from logits (n, K) and labels (n,).

    Top-5 counts a label among the five highest logits, and is left out below six classes; log_loss is the mean
    negative log-likelihood in nats; precision, recall and F1 are per class, the macro ones their means over the classes
    with an image; ece is the expected calibration error over 15 bins of confidence.
    """
    classes, predicted = np.arange(len(names)), np.argmax(logits, axis=-1)
    probabilities = softmax(logits)
    precision, recall, f1, support = sklearn.metrics.precision_recall_fscore_support(
        labels, predicted, labels=classes, zero_division=0.0
    )
    metrics: dict[str, Any] = {
        "num_examples": len(labels),
        "num_correct": int(np.sum(predicted == labels)),
        "accuracy": float(sklearn.metrics.accuracy_score(labels, predicted)),
        "log_loss": log_loss(probabilities, labels),
        "macro_precision": float(precision[support > 0].mean()),
        "macro_recall": float(recall[support > 0].mean()),
        "macro_f1": float(f1[support > 0].mean()),
        "ece": expected_calibration_error(probabilities, labels),
    }
    if len(names) > TOP_K:
        metrics["top5_accuracy"] = float(sklearn.metrics.top_k_accuracy_score(labels, logits, k=TOP_K, labels=classes))
    metrics["classes"] = _of_classes(names, num_examples=support, precision=precision, recall=recall, f1=f1)
    metrics["reliability"] = reliability(probabilities, labels)
    confusion = np.zeros((len(names), len(names)), np.int64)
    np.add.at(confusion, (labels, predicted), 1)
    metrics["confusion"] = confusion.tolist()
    return metrics


def measure_multi_label(logits: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of the report for images of several classes, from logits (n, K) and targets (n, K) of 0 and 1.

    mean_average_precision is the mean over the classes with an image; micro_f1 counts every decision about a class,
    macro_f1 is the mean over the classes with an image; exact_match is the share of images without a wrong decision;
    log_loss is the mean binary cross-entropy of a decision in nats.
    """
    truth, predicted = targets > 0.5, logits >= 0.0
    # scikit-learn takes a single column for two classes, so one without positives stands beside.
    both = [np.pad(decisions, ((0, 0), (0, 1))) for decisions in (truth, predicted)]
    scores = sklearn.metrics.precision_recall_fscore_support(*both, zero_division=0.0)
    precision, recall, f1, support = (score[:-1] for score in scores)
    average = np.array(
        [
            sklearn.metrics.average_precision_score(truth[:, k], logits[:, k]) if support[k] else np.nan
            for k in range(len(names))
        ]
    )
    any_image = bool(support.any())
    return {
        "num_examples": len(targets),
        "mean_average_precision": float(np.mean(average[support > 0])) if any_image else None,
        "micro_f1": float(sklearn.metrics.f1_score(*both, average="micro", zero_division=0.0)),
        "macro_f1": float(f1[support > 0].mean()) if any_image else None,
        "exact_match": float(sklearn.metrics.accuracy_score(*both)),
        "log_loss": float(np.mean(decision_losses(logits, truth))),
        "classes": _of_classes(
            names, num_examples=support, average_precision=average, precision=precision, recall=recall, f1=f1
        ),
    }


def _of_classes(names: Sequence[str], **columns: np.ndarray) -> dict[str, dict[str, Any]]:
    """Return for each class its element of every column (K,); None for nan."""
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    known = ([None if math.isnan(value) else value for value in row] for row in rows)
    return {name: dict(zip(columns, row, strict=True)) for name, row in zip(names, known, strict=True)}


def log_loss(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean negative log-likelihood in nats."""
    return float(np.mean(_losses(probabilities, labels)))


def _losses(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the negative log-likelihood (n,) in nats, cut off as in scikit-learn, which refuses a single class."""
    return -np.log(np.clip(probabilities[np.arange(len(labels)), labels], np.finfo(np.float64).eps, 1.0))


def decision_losses(logits: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the binary cross-entropy (n, K) in nats of the decisions about each class."""
    return np.logaddexp(0.0, np.where(truth, -logits, logits).astype(np.float64))


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean gap between confidence and accuracy over the bins, weighted by their images."""
    bins = reliability(probabilities, labels)
    return sum(row["num_examples"] * abs(row["accuracy"] - row["confidence"]) for row in bins) / len(labels)


def reliability(probabilities: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
    """Return for each bin with images its `low` and `high`, `num_examples`, `confidence`, `accuracy`.

    The confidence is the highest probability; a bin holds its upper end.
    """
    confidence, bins = _binned(probabilities)
    correct = np.argmax(probabilities, axis=-1) == labels
    return [
        {
            "low": k / BINS,
            "high": (k + 1) / BINS,
            "num_examples": int(np.sum(bins == k)),
            "confidence": float(confidence[bins == k].mean()),
            "accuracy": float(correct[bins == k].mean()),
        }
        for k in np.unique(bins).tolist()
    ]


def _binned(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the confidence (n,) of each image and the number (n,) of its bin."""
    confidence = probabilities.max(axis=-1)
    return confidence, np.searchsorted(np.linspace(0.0, 1.0, BINS + 1)[1:-1], confidence)


# Intervals


def intervals(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return 95% intervals [low, high] for the measures and each class.

    Those of accuracies, and of precision, recall and F1 of a class, are Wilson's, which hold also where all images are
    right; the others come from 1,000 draws of the images with replacement.
    They tell how much another sample of as many images may differ, not how much another training may. In draws the ECE
    is larger than in the images, because chance adds to every gap, so they are moved until their mean is the ECE.
    """
    probabilities, count, total = softmax(logits), len(names), len(labels)
    predicted = np.argmax(logits, axis=-1)
    correct = predicted == labels
    confidence, bins = _binned(probabilities)
    losses = _losses(probabilities, labels)

    def drawn(weights: np.ndarray) -> dict[str, Any]:
        right = np.bincount(labels, weights * correct, count)
        of_class, said = np.bincount(labels, weights, count), np.bincount(predicted, weights, count)
        scores = {
            "precision": right / np.maximum(said, 1.0),
            "recall": right / np.maximum(of_class, 1.0),
            "f1": 2.0 * right / _known(of_class + said),
        }
        return {
            "log_loss": weights @ losses / total,
            "ece": np.abs(np.bincount(bins, weights * (correct - confidence), BINS)).sum() / total,
            **{f"macro_{name}": values[of_class > 0].mean() for name, values in scores.items()},
        }

    shares = {"accuracy": correct}
    if count > TOP_K:  # of equal logits the later, as scikit-learn decides it
        highest = np.argsort(logits, axis=-1, kind="mergesort")[:, -TOP_K:]
        shares["top5_accuracy"] = np.any(highest == labels[:, None], axis=-1)
    wilsons = {name: of_share(int(right.sum()), total) for name, right in shares.items()}
    values = _bootstrap(total, drawn)
    values["ece"] = np.maximum(values["ece"] - values["ece"].mean() + drawn(np.ones(total))["ece"], 0.0)
    found = wilsons | _intervals(values, names)
    right, said, there = (np.bincount(each, minlength=count) for each in (labels[correct], predicted, labels))
    for k, name in enumerate(names):
        for share, of in (("precision", said[k]), ("recall", there[k])):
            found["classes"][name][share] = of_share(right[k], of) if of else None
        found["classes"][name]["f1"] = of_f1(right[k], said[k], there[k])
    return found


def multi_label_intervals(logits: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return 95% intervals [low, high] for images of several classes, as `intervals` does.

    A class without an image in a draw is left out of that draw.
    """
    truth, predicted, total = targets > 0.5, logits >= 0.0, len(targets)
    losses, exact = decision_losses(logits, truth).mean(axis=1), np.all(truth == predicted, axis=1)
    order = np.argsort(-logits, axis=0, kind="stable")
    ordered_truth = np.take_along_axis(truth, order, axis=0).astype(np.float64)
    ordered = np.take_along_axis(logits, order, axis=0)
    # Precision and recall change only behind the last of equal scores.
    ends = np.vstack([ordered[1:] != ordered[:-1], np.ones((1, len(names)), bool)])

    def drawn(weights: np.ndarray) -> dict[str, Any]:
        average = _average_precision(weights[order], ordered_truth, ends)
        right, said, there = (weights @ values for values in (truth & predicted, predicted, truth))
        f1 = 2.0 * right / _known(said + there)
        return {
            "mean_average_precision": np.nanmean(average),
            "micro_f1": 2.0 * right.sum() / max(said.sum() + there.sum(), 1.0),
            "macro_f1": f1[there > 0.0].mean() if there.any() else np.nan,
            "log_loss": weights @ losses / total,
            "average_precision": average,
        }

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        found = {"exact_match": of_share(int(exact.sum()), total), **_intervals(_bootstrap(total, drawn), names)}
    counts = (each.sum(axis=0) for each in (truth & predicted, predicted, truth))
    for name, *of_class in zip(names, *counts, strict=True):
        found["classes"][name]["f1"] = of_f1(*of_class)
    return found


def _bootstrap(count: int, measured: Callable[[np.ndarray], Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return each measure of random draws of so many images: (draws,), of the classes (draws, K).

    measured: how often each image was drawn (n,) -> measures; (K,) those of the classes; nan for what is unknown.
    """
    found = [measured(np.bincount(rows, minlength=count).astype(np.float64)) for rows in draws(count, _DRAWS)]
    return {name: np.array([draw[name] for draw in found]) for name in found[0]}


def _known(counts: np.ndarray) -> np.ndarray:
    """Return counts to divide by, nan in the place of 0."""
    return np.where(counts > 0.0, counts, np.nan)


def _intervals(values: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    of_all = {name: of_draws(each) for name, each in values.items() if each.ndim == 1}
    of_classes = {
        name: {measure: of_draws(each[:, k]) for measure, each in values.items() if each.ndim == 2}
        for k, name in enumerate(names)
    }
    return {**of_all, "classes": of_classes}


def _average_precision(weights: np.ndarray, truth: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return average precision (K,) of images (n, K) in the order of their scores; nan without a positive weight."""
    right, seen = np.cumsum(weights * truth, axis=0), np.cumsum(weights, axis=0)
    precision = right / np.maximum(seen, 1.0)
    before = np.maximum.accumulate(np.where(ends, right, 0.0), axis=0)
    gained = np.where(ends, right - np.vstack([np.zeros((1, right.shape[1])), before[:-1]]), 0.0)
    return np.sum(precision * gained, axis=0) / _known(right[-1])


# Temperature


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature with the lowest mean negative log-likelihood, from logits (n, K) and labels (n,).

    The likelihood is concave in 1 / temperature, so halving an interval around the root of its derivative finds it.
    Raises UserError if no temperature is best: without a mistake in the images a lower one is always better.
    """
    logits = np.maximum(logits.astype(np.float64), LEAST_LOGIT)
    own = logits[np.arange(len(labels)), labels]
    if own.min() == LEAST_LOGIT:  # which would decide the temperature
        raise UserError("Calibration needs a probability for each image's class, but one is 0; use the model itself.")
    low, high = 1.0 / HIGHEST_TEMPERATURE, 1.0 / _LOWEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if np.mean((softmax(logits * middle) * logits).sum(axis=-1) - own) < 0.0:  # the loss still falls
            low = middle
        else:
            high = middle
    temperature = float(2.0 / (low + high))
    if (own >= logits.max(axis=-1)).all() or temperature < 1.01 * _LOWEST:
        raise UserError(
            f"Calibration needs images that the model gets wrong, but nearly all {len(labels)} are right; evaluate on "
            "more or other images, or leave --calibrate out."
        )
    return temperature


def calibration(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return the content of temperature.json: the temperature, and log loss and ECE without and with it."""
    temperature = fit_temperature(logits, labels)
    content: dict[str, Any] = {"temperature": temperature, "num_examples": len(labels)}
    for name, divisor in (("before", 1.0), ("after", temperature)):
        probabilities = Scoring(divisor).probabilities(logits)
        error = expected_calibration_error(probabilities, labels)
        content[name] = {"log_loss": log_loss(probabilities, labels), "ece": error}
    return content


# Several accepted labels


def measure_real(logits: np.ndarray, labels: np.ndarray, accepted: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the accuracy where every accepted label counts; images without one are left out.

    Raises UserError where the images' own labels are hardly among the accepted ones: these are of other images then.
    """
    own = [label in numbers for label, numbers in zip(labels, accepted, strict=True) if numbers]
    if not own or np.mean(own) < 0.5:
        raise UserError(
            f"Only {sum(own)} of {len(labels)} images have their own label among those of --real-labels, so the file "
            "is probably in another order than the images; put both in the same order."
        )
    predicted = np.argmax(logits, axis=-1)
    right = int(sum(said in numbers for said, numbers in zip(predicted, accepted, strict=True)))
    return {
        "num_examples": len(own),
        "num_left_out": len(labels) - len(own),
        "num_correct": right,
        "accuracy": right / len(own),
    }


def read_real_labels(path: str, split: Split, num_classes: int) -> list[list[int]]:
    """Return the accepted labels of each image of a split, from a JSON list of lists of class numbers.

    The list is in the order of the images; or, where their files are called ILSVRC2012_val_…, in that of the numbers
    in these names. Raises UserError for a file of anything else.
    """
    file = existing_file(path, "--real-labels accepts a JSON list with a list of labels per image")
    with reading(path, "JSON", advice="--real-labels accepts a file such as ImageNet's real.json"):
        accepted = json.loads(file.read_text(encoding="utf-8"))
    classes = range(num_classes)
    are_lists = isinstance(accepted, list) and all(
        isinstance(numbers, list) and all(type(k) is int and k in classes for k in numbers) for numbers in accepted
    )
    matches = [_VALIDATION_FILE.search(split.name(index)) for index in range(split.num_examples)]
    places = [int(match[1]) - 1 for match in matches if match]
    if are_lists and len(places) == split.num_examples and max(places) < len(accepted):
        return [accepted[place] for place in places]
    if not are_lists or len(accepted) != split.num_examples:
        raise UserError(
            f"{path} must be a JSON list which has for each of the {split.num_examples:,} images a list of class "
            f"numbers, 0 to {num_classes - 1}; give such a file, as real.json of ImageNet."
        )
    return accepted

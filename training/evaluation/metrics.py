"""The numbers of a report, from logits and labels: scikit-learn's where it has them, calibration, intervals.

Calibration: "On Calibration of Modern Neural Networks" (arXiv 1706.04599) section 2. Accepted labels: "Are we done with
ImageNet?" (2006.07159) and its real.json. Intervals: Wilson's for shares of the images, else percentile bootstrap over
the images.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats
import sklearn.metrics

from keras_vit import UserError
from keras_vit.errors import reading
from keras_vit.files.remote import existing_file
from keras_vit.scores import TOP_K, softmax
from training.data.dataset import Split

BINS = 15  # of confidence, of equal width
DRAWS = 1000  # of the bootstrap
_LEVEL = 0.95
# How the files of ImageNet's validation set are called, in the order of real.json.
_VALIDATION_FILE = re.compile(r"ILSVRC2012_val_(\d{8})")


def measure(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict:
    """The numbers of the report from logits (n, K) and labels (n,).

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
    metrics["classes"] = {
        name: {
            "num_examples": int(support[k]),
            "precision": float(precision[k]),
            "recall": float(recall[k]),
            "f1": float(f1[k]),
        }
        for k, name in enumerate(names)
    }
    metrics["reliability"] = reliability(probabilities, labels)
    metrics["confusion"] = sklearn.metrics.confusion_matrix(labels, predicted, labels=classes).tolist()
    return metrics


def log_loss(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log-likelihood in nats."""
    return float(sklearn.metrics.log_loss(labels, probabilities, labels=np.arange(probabilities.shape[-1])))


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean gap between confidence and accuracy over the bins, weighted by their images."""
    bins = reliability(probabilities, labels)
    return sum(row["num_examples"] * abs(row["accuracy"] - row["confidence"]) for row in bins) / len(labels)


def reliability(probabilities: np.ndarray, labels: np.ndarray) -> list[dict]:
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
    """The confidence (n,) of each image and the number (n,) of its bin."""
    confidence = probabilities.max(axis=-1)
    return confidence, np.searchsorted(np.linspace(0.0, 1.0, BINS + 1)[1:-1], confidence)


def intervals(logits: np.ndarray, labels: np.ndarray, names: Sequence[str], *, seed: int = 0) -> dict:
    """95 % intervals [low, high] for the measures and each class.

    Those of accuracy and top-5 accuracy are Wilson's, which hold also where all images are right; the others come from
    1,000 draws of the images with replacement. They tell how much another sample of as many images may differ, not how
    much another training may.
    """
    probabilities, count = softmax(logits), len(names)
    predicted = np.argmax(logits, axis=-1)
    correct = predicted == labels
    confidence, bins = _binned(probabilities)
    own = np.clip(probabilities[np.arange(len(labels)), labels], np.finfo(np.float64).eps, 1.0)
    means = {"log_loss": -np.log(own)}
    shares = {"accuracy": correct} | ({"top5_accuracy": _is_in_top(logits, labels)} if count > TOP_K else {})
    macro = ("macro_precision", "macro_recall", "macro_f1")
    drawn: dict[str, list] = {name: [] for name in (*means, "ece", *macro, "precision", "recall", "f1")}
    rng = np.random.default_rng(seed)
    for _ in range(DRAWS):
        weights = np.bincount(rng.integers(0, len(labels), len(labels)), minlength=len(labels)).astype(np.float64)
        for name, values in means.items():
            drawn[name].append(weights @ values / len(labels))
        gaps = np.bincount(bins, weights * (correct - confidence), BINS)
        drawn["ece"].append(np.abs(gaps).sum() / len(labels))
        right = np.bincount(labels, weights * correct, count)
        of_class, said = np.bincount(labels, weights, count), np.bincount(predicted, weights, count)
        drawn["precision"].append(right / np.maximum(said, 1.0))
        drawn["recall"].append(right / np.maximum(of_class, 1.0))
        drawn["f1"].append(2.0 * right / np.maximum(of_class + said, 1.0))
        for name in macro:
            drawn[name].append(drawn[name.removeprefix("macro_")][-1][of_class > 0].mean())
    found: dict[str, Any] = {name: share_interval(int(right.sum()), len(labels)) for name, right in shares.items()}
    found |= {name: interval(drawn[name]) for name in (*means, "ece", *macro)}
    per_class = {name: np.array(drawn[name]) for name in ("precision", "recall", "f1")}  # (draws, K)
    found["classes"] = {
        name: {measure: interval(values[:, k]) for measure, values in per_class.items()} for k, name in enumerate(names)
    }
    return found


def _is_in_top(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether the label is among the five highest logits, of equal ones the later, as scikit-learn decides it."""
    return np.any(np.argsort(logits, axis=-1, kind="mergesort")[:, -TOP_K:] == labels[:, None], axis=-1)


def share_interval(count: int, total: int) -> list[float]:
    """The 95 % interval [low, high] of a share of the images, by Wilson's score."""
    return list(map(float, scipy.stats.binomtest(count, total).proportion_ci(_LEVEL, "wilson")))


def interval(values: Sequence[float] | np.ndarray) -> list[float]:
    """The 95 % interval [low, high] of the values that were drawn."""
    return np.quantile(values, [(1.0 - _LEVEL) / 2.0, (1.0 + _LEVEL) / 2.0]).tolist()


# Several accepted labels


def measure_real(logits: np.ndarray, labels: np.ndarray, accepted: Sequence[Sequence[int]]) -> dict:
    """Accuracy where every accepted label counts; images without one are left out.

    Raises UserError where the images' own labels are hardly among the accepted ones: these are of other images then.
    """
    judged = np.array([bool(numbers) for numbers in accepted])
    if not judged.any():
        raise UserError("The --real-labels file has no label for any image; give a file with labels.")
    own = np.mean([label in numbers for label, numbers in zip(labels, accepted, strict=True) if numbers])
    if own < 0.5:
        raise UserError(
            f"Only {own:.0%} of the images have their own label among those of --real-labels, so the file is probably "
            "in another order than the images; put both in the same order."
        )
    predicted = np.argmax(logits, axis=-1)
    right = int(sum(said in numbers for said, numbers in zip(predicted, accepted, strict=True)))
    count = int(judged.sum())
    return {
        "num_examples": count,
        "num_left_out": len(labels) - count,
        "num_correct": right,
        "accuracy": right / count,
    }


def read_real_labels(path: str, split: Split, num_classes: int) -> list[list[int]]:
    """The accepted labels of each image of a split, from a JSON list of lists of class numbers.

    The list is in the order of the images; or, where their files are called ILSVRC2012_val_…, in that of the numbers
    in these names. Raises UserError for a file of anything else.
    """
    file = existing_file(path, "--real-labels takes a JSON list with a list of labels per image")
    with reading(path, "JSON", advice="--real-labels takes a file such as ImageNet's real.json"):
        accepted = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(accepted, list) or not all(_are_labels(numbers, num_classes) for numbers in accepted):
        raise UserError(
            f"{path} must be a JSON list which has for each image a list of class numbers, 0 to {num_classes - 1}; "
            "give such a file, as real.json of ImageNet."
        )
    found = [_VALIDATION_FILE.search(split.name(index)) for index in range(split.num_examples)]
    if all(found):
        numbers = [int(match[1]) - 1 for match in found if match]
        if max(numbers) < len(accepted):
            return [accepted[number] for number in numbers]
    if len(accepted) != split.num_examples:
        raise UserError(
            f"{path} has labels of {len(accepted):,} images, but {split.num_examples:,} are evaluated; give one list "
            "for each."
        )
    return accepted


def _are_labels(numbers, num_classes: int) -> bool:
    return isinstance(numbers, list) and all(type(k) is int and 0 <= k < num_classes for k in numbers)

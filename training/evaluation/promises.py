"""Fit what a run promises to the probabilities of images that it was not trained on.

Answers: the share of errors among the answered images is at most --max-error, with 95% confidence. As in "Learn then
Test" (arXiv 2110.01052), numbers of the surest images are tested by the exact binomial bound. Their errors grow
together, so the level of each test is the largest with which all of them err with 5% at most, by the exact
distribution of a sum that grows; this assumes that surer images are not wrong more often.

Lists: a new image has its class in the list with the probability --coverage (split conformal prediction, 2107.07511).
Listed is each class whose probability reaches a quantile of those of the true classes, which gives the smallest lists
(1609.00451); a quantile of each class gives each class its coverage. Several classes an image: conformal risk control
(2208.02814) of the share of its classes that are missing.
"""

import dataclasses
import functools
import math

import numpy as np
import scipy.stats

from keras_vit import UserError
from keras_vit.promise import ANSWERED, LABEL_SET, Promise
from keras_vit.scores import Scoring

CONFIDENCE = 0.95
# Numbers of images that are tested, and the least share of them that is worth a promise.
_TESTS, _LEAST_ANSWERED = 60, 1 / 3
_APART = 1e-6  # probabilities nearer than this count as equal, since exports compute in float32
_HALVINGS = 12


def fit_promise(
    logits: np.ndarray,
    labels: np.ndarray,
    scoring: Scoring,
    max_error: float | None = None,
    coverage: float | None = None,
    by_class: bool = False,
) -> Promise:
    """Return the promise from logits (n, K) and labels (n,), of several classes each (n, K) of 0 and 1.

    Raises UserError where the images are too few, or too often wrong, and says which promise they allow.
    """
    probabilities = scoring.probabilities(logits).astype(np.float32).astype(np.float64)
    correct = probabilities.argmax(axis=1) == (labels if labels.ndim == 1 else -1)
    promise = Promise(
        max_error,
        0.0 if max_error is None else answer_threshold(probabilities.max(axis=1), correct, max_error),
        coverage,
        by_class,
        () if coverage is None else tuple(_list_thresholds(probabilities, labels, coverage, by_class).tolist()),
        CONFIDENCE,
        len(labels),
        temperature=scoring.temperature,
        multi_label=scoring.is_multi_label,
    )
    measured: dict[str, float] = {}
    decisions = {name: np.asarray(decision) for name, decision in promise.decide(probabilities).items()}
    if (answered := decisions.get(ANSWERED)) is not None:
        measured = {"answered": float(answered.mean()), "error": float(np.mean(~correct[answered]))}
    if (listed := decisions.get(LABEL_SET)) is not None:
        measured["set_size"] = float(listed.sum(axis=1).mean())
    return dataclasses.replace(promise, measured=measured)


# Answers


def answer_threshold(confidence: np.ndarray, correct: np.ndarray, max_error: float) -> float:
    """Return the least confidence of an answered image, from confidences (n,) and whether they are right (n,).

    Raises UserError where no threshold keeps the promise, and says which share of errors one does.
    """
    if (threshold := _answer_threshold(confidence, correct, max_error)) is not None:
        return threshold
    kept, broken = 1.0, max_error
    while kept - broken > 1e-3 * kept:
        middle = (kept + broken) / 2.0
        kept, broken = (kept, middle) if _answer_threshold(confidence, correct, middle) is None else (middle, broken)
    least = math.ceil(1e3 * kept) / 1e3
    raise UserError(
        f"At most {100.0 * max_error:g}% errors cannot be promised with {len(correct):,} images, of which "
        f"{np.mean(~correct):.1%} are wrong. Use --max-error {least:.3f}, or add images."
    )


def _answer_threshold(confidence: np.ndarray, correct: np.ndarray, max_error: float) -> float | None:
    order = np.argsort(-confidence, kind="stable")
    falling, errors, total = confidence[order], np.cumsum(~correct[order]), len(order)
    least = max(math.ceil(math.log(1.0 - CONFIDENCE) / math.log1p(-max_error)) if max_error < 1.0 else 1, 1)
    # Behind each number of the surest images, there is a gap to the next one.
    ends = np.append(np.flatnonzero(falling[:-1] - falling[1:] >= _APART) + 1, total)
    wanted = np.linspace(max(least, _LEAST_ANSWERED * total), total, _TESTS).round().astype(np.int64)
    counts = np.unique(ends[np.minimum(np.searchsorted(ends, wanted), len(ends) - 1)])
    if least > total:
        return None
    kept = np.flatnonzero(errors[counts - 1] <= _most_errors(tuple(counts.tolist()), max_error))
    if not len(kept):
        return None
    last = counts[kept[-1]]
    return 0.0 if last == total else float((falling[last - 1] + falling[last]) / 2.0)


@functools.lru_cache(maxsize=16)
def _most_errors(counts: tuple[int, ...], max_error: float) -> np.ndarray:
    """Return for growing numbers of images the most errors with which a test passes, -1 for none."""
    low, high, images = 0.0, 1.0 - CONFIDENCE, np.array(counts)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        errs = _passing(images, _limits(images, max_error, middle), max_error) > 1.0 - CONFIDENCE
        low, high = (low, middle) if errs else (middle, high)
    return _limits(images, max_error, low)


def _limits(counts: np.ndarray, max_error: float, level: float) -> np.ndarray:
    """Return the most errors (n,) that a share `max_error` exceeds with the probability 1 - level; -1 for none."""
    errors = scipy.stats.binom.ppf(level, counts, max_error).astype(np.int64)
    return np.where(scipy.stats.binom.cdf(errors, counts, max_error) <= level, errors, errors - 1)


def _passing(counts: np.ndarray, limits: np.ndarray, max_error: float) -> float:
    """Return the probability that any test passes where the share of errors is `max_error`."""
    left = np.zeros(int(limits.max()) + 2)  # of each number of errors without a passed test; more can pass none
    left[0], passed, before = 1.0, 0.0, 0
    for count, limit in zip(counts.tolist(), limits.tolist(), strict=True):
        more = scipy.stats.binom.pmf(np.arange(len(left)), count - before, max_error)
        left, before = np.convolve(left, more)[: len(left)], count
        passed += left[: limit + 1].sum()
        left[: limit + 1] = 0.0
    return passed


# Lists


def _list_thresholds(probabilities: np.ndarray, labels: np.ndarray, coverage: float, by_class: bool) -> np.ndarray:
    count, num_classes, missing = len(labels), probabilities.shape[1], 1.0 - coverage
    if (count + 1) * missing < 1.0:
        raise UserError(
            f"A coverage of {100.0 * coverage:g}% cannot be promised with {count:,} images. "
            f"Use --coverage {math.floor(1e3 * count / (count + 1)) / 1e3:.3f}, or add images."
        )
    if labels.ndim == 2:
        truth = labels > 0.5
        shares = np.where(truth, 1.0 / np.maximum(truth.sum(axis=1, keepdims=True), 1), 0.0)[truth]
        return np.full(num_classes, _quantile(probabilities[truth], shares, missing * (count + 1) - 1.0))
    own = probabilities[np.arange(count), labels]
    parts = [labels == k for k in range(num_classes)] if by_class else [np.ones(count, bool)]
    thresholds = [_quantile(own[part], np.ones(part.sum()), missing * (part.sum() + 1) - 1.0) for part in parts]
    if by_class and (always := sum(threshold == 0.0 for threshold in thresholds)):
        print(f"{always} of {num_classes} classes have too few images for a threshold, so they are in every list.")
    return np.broadcast_to(thresholds, num_classes)


def _quantile(values: np.ndarray, weights: np.ndarray, most: float) -> float:
    """Return the largest threshold below which values (n,) have at most a weight; between two values, or 0."""
    order = np.argsort(values, kind="stable")
    number = int(np.searchsorted(np.cumsum(weights[order]), most + 1e-9, side="right"))
    if most < 0.0 or not len(values):
        return 0.0
    rising = np.append(values[order], 1.0)
    below = rising[:number][rising[number] - rising[:number] >= _APART]
    return float((rising[number] + (below[-1] if len(below) else 0.0)) / 2.0)

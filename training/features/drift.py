"""Say whether new images differ from those that a model was evaluated on, by a summary of these of some kilobytes.

Images differ if a permutation test says so, whose false alarms have exactly the probability that was asked for: of the
energy distance of the features (Szekely and Rizzo, 2004) and of the ranks of the entropies, whichever says more.

The expected accuracy is the share of images with an entropy below a threshold, below which of the images of the summary
is a share as large as is right (average thresholded confidence, arXiv 2201.04234). Where a class is predicted far more
often than there, those of the largest entropy count as errors: under strong changes a model is sure of a few classes.
Transport to the known shares of the classes (2302.05018) has the same effect.
"""

import dataclasses
import os

import numpy as np
import scipy.spatial.distance
import scipy.special
import scipy.stats

from keras_vit.errors import reading
from keras_vit.files.npz import read_npz, write_npz
from training.evaluation.intervals import of_draws

# Directions of the features, and images, that the summary keeps. The directions are random: along those of the largest
# variance the images of the summary would lie further apart than new ones of the same kind.
_DIRECTIONS, _MOST_KEPT = 64, 1000
_MOST_TESTED, _PERMUTATIONS = 1000, 999  # new images of one test at most, and permutations
_DRAWS = 1000
# How much more often than before a class may be predicted, as a factor and in standard deviations of chance.
_MORE, _DEVIATIONS = 1.5, 2.0


@dataclasses.dataclass(frozen=True)
class Summary:
    """Features and confidences of images that a model was not trained on."""

    mean: np.ndarray
    """(D,) of the features."""
    directions: np.ndarray
    """(D, d) orthogonal and random, so long that distances along them are those of the features on average."""
    features: np.ndarray
    """(n, d) float16 along these, less the mean."""
    entropy: np.ndarray
    """(n,) of the probabilities of the classes."""
    predicted: np.ndarray
    """(n,) the likeliest class."""
    correct: np.ndarray
    """(n,) whether it is right."""
    model_checksum: int = 0
    """CRC-32 of the file of the model; 0 if it is not known."""

    def project(self, values: np.ndarray) -> np.ndarray:
        """Return features (m, D) along the directions, (m, d)."""
        return (values - self.mean) @ self.directions

    def save(self, path: str | os.PathLike) -> None:
        """Write an .npz file."""
        arrays = {field.name: np.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)}
        write_npz(path, arrays)


def read_summary(path: str | os.PathLike) -> Summary:
    """Read what `Summary.save` writes. Raises UserError for any other file."""
    arrays = read_npz(path)
    with reading(
        path, "a summary of features", KeyError, TypeError, IndexError, advice="make it again by keras-vit monitor"
    ):
        fields = {field.name: arrays[field.name] for field in dataclasses.fields(Summary)}
        checksum = int(fields.pop("model_checksum"))
        summary = Summary(**fields, model_checksum=checksum)
        count, width = len(summary.entropy), summary.directions.shape
        lengths = {len(each) for each in (summary.features, summary.predicted, summary.correct)}
        if lengths != {count} or (*summary.mean.shape, summary.features.shape[1]) != width:
            raise ValueError("its arrays do not fit each other")
        if not all(np.isfinite(array).all() for array in fields.values()):
            raise ValueError("it has numbers that are not finite")
        return summary


def _entropy(probabilities: np.ndarray) -> np.ndarray:
    return scipy.special.entr(probabilities).sum(axis=1).astype(np.float32)


def summarize(values: np.ndarray, probabilities: np.ndarray, labels: np.ndarray, model_checksum: int = 0) -> Summary:
    """Return the summary of images from features (n, D), probabilities (n, K) and labels (n,)."""
    mean, width = values.mean(axis=0), values.shape[1]
    count = min(width, _DIRECTIONS)
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(width, count)))[0] * np.sqrt(width / count)
    rows = np.arange(len(values))
    if len(rows) > _MOST_KEPT:
        rows = np.sort(np.random.default_rng(0).choice(len(rows), _MOST_KEPT, replace=False))
    directions, predicted = directions.astype(np.float32), probabilities.argmax(axis=1)
    return Summary(
        mean.astype(np.float32),
        directions,
        ((values - mean) @ directions)[rows].astype(np.float16),
        _entropy(probabilities)[rows],
        predicted[rows].astype(np.int32),
        (predicted == labels)[rows],
        model_checksum,
    )


@dataclasses.dataclass(frozen=True)
class Drift:
    """How new images differ from those of a summary."""

    p_value: float
    """Probability of a difference as large among images of one kind."""
    is_alarm: bool
    distances: np.ndarray
    """(m,) from the images of the summary, less their own distances: how much each new image moved."""
    shares: dict[int, tuple[float, float]]
    """Class -> its share of the predictions then and now, of those whose share changed."""
    accuracy: tuple[float, float, float]
    """Expected, with the ends of its 95% interval, 0 to 1."""


def compare(summary: Summary, values: np.ndarray, probabilities: np.ndarray, false_alarms: float = 0.01) -> Drift:
    """Compare features (m, D) and probabilities (m, K) of new images with a summary of the same model.

    false_alarms: probability of an alarm for images of the same kind.
    """
    entropy, predicted = _entropy(probabilities), probabilities.argmax(axis=1)
    projected, rng = summary.project(values), np.random.default_rng(0)
    rows = np.arange(len(values))
    if len(rows) > _MOST_TESTED:
        rows = rng.choice(len(rows), _MOST_TESTED, replace=False)
    known = summary.features.astype(np.float32)
    p_value = _p_value(known, summary.entropy, projected[rows], entropy[rows], rng)
    cdist = scipy.spatial.distance.cdist
    distances = np.concatenate(
        [cdist(part, known).mean(axis=1) for part in np.array_split(projected, 1 + len(rows) // 500)]
    )
    return Drift(
        p_value,
        p_value <= false_alarms,
        distances - cdist(known, known).mean(),
        _changed_shares(summary.predicted, predicted, probabilities.shape[1], false_alarms),
        _expected_accuracy(summary, entropy, predicted, rng),
    )


def _p_value(
    known: np.ndarray, known_entropy: np.ndarray, new: np.ndarray, entropy: np.ndarray, rng: np.random.Generator
) -> float:
    """Return how often a random division into as many images differs as much, by one of both statistics."""
    every, count = np.concatenate([known, new]), len(new)
    distances = scipy.spatial.distance.cdist(every, every).astype(np.float32)
    ranks = scipy.stats.rankdata(np.concatenate([known_entropy, entropy])).astype(np.float32)
    weights = np.full((_PERMUTATIONS + 1, len(every)), -1.0 / len(known), np.float32)
    weights[0, len(known) :] = 1.0 / count
    for row in weights[1:]:
        row[rng.choice(len(every), count, replace=False)] = 1.0 / count
    energy = -np.einsum("pn,pn->p", weights @ distances, weights)
    order = [scipy.stats.rankdata(-each, method="max") for each in (energy, np.abs(weights @ ranks))]
    least = np.minimum(*order)  # the rank of the statistic that says more
    return float(np.mean(least <= least[0]))


def _changed_shares(
    before: np.ndarray, now: np.ndarray, num_classes: int, false_alarms: float
) -> dict[int, tuple[float, float]]:
    """Return the shares of the classes for which Fisher's exact test, corrected by their number, finds a change."""
    then, new = (np.bincount(each, minlength=num_classes) for each in (before, now))
    changed = {}
    for label in np.flatnonzero(then + new).tolist():
        table = [[then[label], len(before) - then[label]], [new[label], len(now) - new[label]]]
        if scipy.stats.fisher_exact(table).pvalue <= false_alarms / num_classes:
            changed[label] = (float(then[label] / len(before)), float(new[label] / len(now)))
    return changed


def _expected_accuracy(
    summary: Summary, entropy: np.ndarray, predicted: np.ndarray, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return the accuracy to expect from entropies and predicted classes (m,), with its interval by the bootstrap."""
    count, num_known = len(entropy), len(summary.entropy)
    now = np.bincount(predicted, minlength=summary.predicted.max(initial=0) + 1)
    usual = (np.bincount(summary.predicted, minlength=len(now)) + 1.0) * count / num_known
    most = np.maximum(_MORE * usual, usual + _DEVIATIONS * np.sqrt(usual))
    order = np.lexsort((entropy, predicted))
    place = np.arange(count) - np.repeat(np.cumsum(now) - now, now)  # in its class, from the smallest entropy on
    entropy = entropy.copy()
    entropy[order[place >= most[predicted[order]]]] = np.inf

    def expected(known: np.ndarray, new: np.ndarray) -> float:
        threshold = np.quantile(summary.entropy[known], summary.correct[known].mean())
        return float(np.mean(entropy[new] <= threshold))

    every = np.arange(num_known), np.arange(count)
    draws = [expected(*(rng.choice(rows, len(rows)) for rows in every)) for _ in range(_DRAWS)]
    interval = of_draws(draws)
    assert interval is not None  # there are images
    low, high = interval
    return expected(*every), low, high

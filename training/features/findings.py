"""Find what is odd in a data set, by its features and labels: copies, suspicious labels, odd images, coverage.

Labels: "Confident Learning: Estimating Uncertainty in Dataset Labels" (Northcutt, Jiang, Chuang, arXiv 1911.00068),
sections 3.1 (the confident joint) and 3.2 (prune by noise rate). cleanlab is by its authors.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy.sparse

from keras_vit.cli.progress import tracked
from training.features.linear_models import out_of_fold_probabilities
from training.features.lookup import nearest_rows, unit_length
from training.features.store import FeatureIndex

_NEIGHBORS = 10  # neighbors of each image that are looked at
_BLOCK = 4096  # images whose neighbors are looked for at a time
# Odd are the images this far below the quartiles, in their distance (John Tukey's fence), and at least this share.
_FENCE, _LEAST_ODD = 1.5, 0.01
HEAD_C = 0.03  # inverse strength of the penalty of the linear head; strong, because some labels are wrong
_MOST_COMPARED = 2000  # images of a class up to which all are compared


@dataclasses.dataclass(frozen=True)
class ClassCoverage:
    """How well a class is covered; the numbers are nan where there is nothing to compare."""

    name: str
    train: int
    """Images of the split train, or of images without splits."""
    test: int
    recognized: float
    """Share of its images that the linear head, fitted to others, gives this class."""
    train_similarity: float
    """Median cosine of a training image and the nearest other one of its class."""
    test_similarity: float
    """Median cosine of an evaluation image and the nearest training image of its class."""


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Two classes that are hard to tell apart."""

    names: tuple[str, str]
    confused: float
    """Estimated share of their images that have the label of the other one."""
    examples: tuple[int, ...]
    """Rows: of each class the image that looks most like the other."""


@dataclasses.dataclass(frozen=True)
class Findings:
    """Rows of the index in all of them."""

    copies: list[list[int]]
    """Groups of equal images and of nearly equal ones; those in two splits and with two labels first."""
    wrong_labels: np.ndarray
    """The most suspicious first."""
    suggested: np.ndarray
    """(n,) the most likely class of each image by the linear head; empty without classes."""
    confidence: np.ndarray
    """(n,) its probability."""
    odd: np.ndarray
    """The least similar to its neighbors first."""
    similarity: np.ndarray
    """(n,) mean cosine with the nearest images, after the mean of all features is subtracted."""
    overlaps: list[Overlap]
    coverage: list[ClassCoverage]


def findings_of(index: FeatureIndex, duplicate_similarity: float) -> Findings:
    """Look at all images of an index."""
    images = index.images
    values = index.embeddings()
    centered = unit_length(values - values.mean(axis=0))
    cosines, rows = _neighbors(centered)
    similarity = cosines.mean(axis=1) if cosines.shape[1] else np.ones(len(values), np.float32)
    first: dict[str, int] = {}
    same = np.array([first.setdefault(digest, row) for row, digest in enumerate(images.digests)])
    linked = _linked(same, cosines, rows, duplicate_similarity)
    number_of = {name: number for number, name in enumerate(index.description.labels)}
    labels = np.array([-1 if label is None else number_of[label] for label in images.labels], np.int64)
    # Copies in two splits come first, then those with two labels.
    groups = sorted(
        _copies(same, linked),
        key=lambda group: (len({images.splits[row] for row in group}) == 1, len({*labels[group]}) == 1, group[0]),
    )
    nothing = np.zeros(0, np.int64)
    odd = _odd(similarity)
    probabilities = out_of_fold_probabilities(values, labels, linked, len(number_of), HEAD_C)
    if probabilities is None:
        return Findings(groups, nothing, nothing, np.zeros(0), odd, similarity, [], [])
    likeliest = probabilities.argmax(axis=1)
    names = index.description.labels
    return Findings(
        groups,
        suspicious_labels(labels, probabilities),
        likeliest,
        probabilities.max(axis=1),
        odd,
        similarity,
        _overlaps(labels, probabilities, names),
        _coverage(centered, labels, likeliest == labels, np.array(images.splits) == "test", names),
    )


def _neighbors(centered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and rows (n, k) of the nearest other images."""
    count = min(_NEIGHBORS, len(centered) - 1)
    chunks = [centered[begin : begin + 2**16] for begin in range(0, len(centered), 2**16)]
    cosines, rows = [], []
    blocks = range(0, len(centered), _BLOCK)
    for begin in tracked(blocks, "Comparing images", unit="blocks"):
        own = np.arange(begin, min(begin + _BLOCK, len(centered)))
        found, places = nearest_rows(chunks, centered[own], count + 1)
        # Of many equal images, an image itself may be missing: then the last one goes.
        others = places != own[:, None]
        others[others.all(axis=1), -1] = False
        cosines.append(found[others].reshape(len(own), count))
        rows.append(places[others].reshape(len(own), count))
    return np.concatenate(cosines), np.concatenate(rows)


def _linked(same: np.ndarray, cosines: np.ndarray, rows: np.ndarray, least: float) -> np.ndarray:
    """Return (n,) numbers, the same for images of equal content and for those that similarity links."""
    begins, places = np.nonzero(cosines >= least)
    begins, ends = np.concatenate([begins, np.arange(len(same))]), np.concatenate([rows[begins, places], same])
    graph = scipy.sparse.coo_array((np.ones(len(begins), bool), (begins, ends)), shape=(len(same), len(same)))
    return scipy.sparse.csgraph.connected_components(graph, directed=False)[1]


def _copies(same: np.ndarray, linked: np.ndarray) -> list[list[int]]:
    """Return groups of equal images, and groups of nearly equal ones, in which equal ones have one row."""
    equal: dict[int, list[int]] = collections.defaultdict(list)
    near: dict[int, list[int]] = collections.defaultdict(list)
    for row, (first, number) in enumerate(zip(same.tolist(), linked.tolist(), strict=True)):
        equal[first].append(row)
        if first == row:
            near[number].append(row)
    return [group for groups in (equal, near) for group in groups.values() if len(group) > 1]


def _odd(similarity: np.ndarray) -> np.ndarray:
    """Return rows whose similarity is below that of the others, the least first."""
    low, high = np.quantile(similarity, [0.25, 0.75])
    count = max(int(np.sum(similarity < low - _FENCE * (high - low))), math.ceil(_LEAST_ODD * len(similarity)))
    return np.argsort(similarity, kind="stable")[:count]


def _overlaps(labels: np.ndarray, probabilities: np.ndarray, names: Sequence[str]) -> list[Overlap]:
    """Return pairs of classes in the order of the share of their images that probably have the other label."""
    joint = confident_joint(labels, probabilities)
    counts = np.bincount(labels, minlength=len(names))
    both = np.triu(joint + joint.T, 1) / np.maximum(counts[:, None] + counts, 1)
    found = []
    for place in np.argsort(-both, axis=None, kind="stable")[: 2 * len(names)]:
        one, other = np.unravel_index(place, both.shape)
        if both[one, other] == 0.0:
            break
        pairs = ((one, other), (other, one))
        rows = [np.flatnonzero(labels == own) for own, _ in pairs]
        examples = [int(own[np.argmax(probabilities[own, to])]) for own, (_, to) in zip(rows, pairs, strict=True)]
        found.append(Overlap((names[one], names[other]), float(both[one, other]), tuple(examples)))
    return found


def _coverage(
    centered: np.ndarray, labels: np.ndarray, right: np.ndarray, is_test: np.ndarray, names: Sequence[str]
) -> list[ClassCoverage]:
    found = []
    for number, name in enumerate(names):
        of_class = labels == number
        train, test = np.flatnonzero(of_class & ~is_test), np.flatnonzero(of_class & is_test)
        known = centered[train[:: max(len(train) // _MOST_COMPARED, 1)]]
        asked = centered[test[:: max(len(test) // _MOST_COMPARED, 1)]]
        inside = nearest_rows([known], known, 2)[0][:, 1] if len(known) > 1 else np.array([np.nan])
        outside = nearest_rows([known], asked, 1)[0] if len(known) and len(asked) else np.array([np.nan])
        recognized = float(right[of_class].mean()) if of_class.any() else float("nan")
        found.append(
            ClassCoverage(name, len(train), len(test), recognized, float(np.median(inside)), float(np.median(outside)))
        )
    return found


# Confident learning


def confident_joint(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return how many images with the label of the row are truly of the class of the column: (K, K) float64.

    An image counts for the class whose probability for it reaches the threshold of the class: the mean over the
    images with its label. If several reach theirs, it counts for the most likely class, as in the authors' code. Each
    row is scaled to the number of images with its label. Labels are (n,), probabilities (n, K) out of fold.
    """
    num_classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=num_classes)
    own = probabilities[np.arange(len(labels)), labels]
    thresholds = np.bincount(labels, own, num_classes) / np.maximum(counts, 1)
    thresholds[counts == 0] = np.inf  # a class without images
    confident = probabilities >= thresholds - 1e-6
    number = confident.sum(axis=1)
    classes = np.where(number > 1, probabilities.argmax(axis=1), confident.argmax(axis=1))
    kept = number > 0
    joint = np.zeros((num_classes, num_classes))
    np.add.at(joint, (labels[kept], classes[kept]), 1.0)
    np.fill_diagonal(joint, np.maximum(joint.diagonal(), 1.0))
    return joint / joint.sum(axis=1, keepdims=True) * counts[:, None]


def suspicious_labels(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the rows whose label is probably wrong, the least probable beside the most likely class first.

    Of each pair of classes as many images are taken as the confident joint says, those with the largest margin
    between the probability of the other class and of their own; none whose own class is the likeliest. A class with
    one image is left out, since nothing is known of it out of fold.
    """
    joint = _rounded(confident_joint(labels, probabilities))
    own = probabilities[np.arange(len(labels)), labels]
    chosen = np.zeros(len(labels), bool)
    for label, other in zip(*np.nonzero(joint), strict=True):
        rows = np.flatnonzero(labels == label)
        if label == other or len(rows) < 2:
            continue
        margins = probabilities[rows, other] - own[rows]
        chosen[rows[np.argsort(-margins, kind="stable")[: joint[label, other]]]] = True
    chosen &= probabilities.argmax(axis=1) != labels
    found = np.flatnonzero(chosen)
    ratio = own / probabilities.max(axis=1)
    return found[np.argsort(ratio[found], kind="stable")]


def _rounded(joint: np.ndarray) -> np.ndarray:
    """Return whole numbers (K, K) near these, with the same sums of rows: the largest remainders are rounded up."""
    whole = np.floor(joint).astype(np.int64)
    missing = np.rint(joint.sum(axis=1)).astype(np.int64) - whole.sum(axis=1)
    order = np.argsort(whole - joint, axis=1, kind="stable")
    ranks = np.argsort(order, axis=1, kind="stable")
    return whole + (ranks < missing[:, None])

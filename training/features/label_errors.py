"""Confident learning: which labels are probably wrong, from probabilities of pictures that a classifier did not see.

Paper: "Confident Learning: Estimating Uncertainty in Dataset Labels" (Northcutt, Jiang, Chuang, arXiv 1911.00068),
sections 3.1 (the confident joint) and 3.2 (prune by noise rate). cleanlab is by its authors.
"""

import numpy as np


def confident_joint(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """How many pictures with the label of the row are truly of the class of the column: (K, K) float64.

    A picture counts for the class whose probability for it reaches the threshold of the class: the mean over the
    pictures with its label. If several reach theirs, it counts for the likeliest class, as in the authors' code. Each
    row is scaled to the number of pictures with its label.

    Args:
        labels: (n,), 0 to K - 1, as they are stored.
        probabilities: (n, K), out of fold.
    """
    num_classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=num_classes)
    own = probabilities[np.arange(len(labels)), labels]
    thresholds = np.bincount(labels, own, num_classes) / np.maximum(counts, 1)
    thresholds[counts == 0] = np.inf  # a class without pictures
    confident = probabilities >= thresholds - 1e-6
    number = confident.sum(axis=1)
    classes = np.where(number > 1, probabilities.argmax(axis=1), confident.argmax(axis=1))
    kept = number > 0
    joint = np.zeros((num_classes, num_classes))
    np.add.at(joint, (labels[kept], classes[kept]), 1.0)
    np.fill_diagonal(joint, np.maximum(joint.diagonal(), 1.0))
    return joint / joint.sum(axis=1, keepdims=True) * counts[:, None]


def suspicious_labels(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """The rows whose label is probably wrong, those with the least probability beside the likeliest class first.

    Of each pair of classes as many pictures are taken as the confident joint says, those with the largest margin
    between the probability of the other class and of their own; none whose own class is the likeliest. A class with
    one picture is left out, since nothing is known of it out of fold.
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
    """Whole numbers (K, K) near these, with the same sums of rows: the largest remainders are rounded up."""
    whole = np.floor(joint).astype(np.int64)
    missing = np.rint(joint.sum(axis=1)).astype(np.int64) - whole.sum(axis=1)
    order = np.argsort(whole - joint, axis=1, kind="stable")
    ranks = np.argsort(order, axis=1, kind="stable")
    return whole + (ranks < missing[:, None])

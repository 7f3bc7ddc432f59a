"""Confident learning: which labels are probably wrong, from probabilities of pictures that a classifier did not see.

Paper: "Confident Learning: Estimating Uncertainty in Dataset Labels" (Northcutt, Jiang, Chuang, arXiv 1911.00068),
sections 3.1 (the confident joint) and 3.2 (prune by noise rate). cleanlab is by its authors.
"""

import numpy as np


def confident_joint(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """How many pictures with the label of the row are truly of the class of the column: (K, K) float64.

    A picture counts for the class with the largest probability among those that reach the mean probability which
    pictures with this label have for it. Each row is scaled to the number of pictures with its label.

    Args:
        labels: (n,), 0 to K - 1, as they are stored.
        probabilities: (n, K), out of fold.
    """
    num_classes = probabilities.shape[1]
    counts = np.bincount(labels, minlength=num_classes)
    own = probabilities[np.arange(len(labels)), labels]
    thresholds = np.bincount(labels, own, num_classes) / np.maximum(counts, 1)
    thresholds[counts == 0] = np.inf  # a class without pictures
    confident = np.where(probabilities >= thresholds - 1e-6, probabilities, -1.0)
    classes = confident.argmax(axis=1)
    kept = confident.max(axis=1) >= 0.0
    joint = np.zeros((num_classes, num_classes))
    np.add.at(joint, (labels[kept], classes[kept]), 1.0)
    np.fill_diagonal(joint, np.maximum(joint.diagonal(), 1.0))
    return joint / joint.sum(axis=1, keepdims=True) * counts[:, None]


def suspicious_labels(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """The rows whose label is probably wrong, the most suspicious first.

    Of each pair of classes as many pictures are taken as the confident joint says, those with the largest margin
    between the probability of the other class and of their own; none whose own class is the likeliest. A class with
    one picture is left out, since nothing is known of it out of fold.
    """
    joint = np.rint(confident_joint(labels, probabilities)).astype(np.int64)
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
    return found[np.argsort((own - probabilities.max(axis=1))[found], kind="stable")]

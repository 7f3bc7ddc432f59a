"""The vote of the nearest neighbors among features; training/knn.py has its sources."""

from collections.abc import Sequence

import numpy as np
import sklearn.neighbors

from keras_vit import UserError
from training.options.common import FeatureOptions
from training.options.probes import check_votes
from training.probes.features import Features, open_features
from training.probes.report import write_report


def nearest_neighbors(
    train: Features,
    evaluation: Features,
    num_classes: int,
    *,
    neighbors: Sequence[int] = (1, 10, 20, 100),
    temperature: float = 0.07,
) -> list[dict]:
    """Accuracy on the evaluation features for each number of neighbors: `neighbors`, `accuracy`."""
    _check_number(neighbors, len(train.labels))
    index = sklearn.neighbors.NearestNeighbors(n_neighbors=max(neighbors), metric="cosine").fit(train.values)
    distances, rows = index.kneighbors(evaluation.values)  # (n, most neighbors), the nearest first
    # The nearest has weight 1: exp(1 / temperature) itself may overflow.
    votes = np.exp((distances[:, :1] - distances) / temperature)
    found = []
    for number in neighbors:
        scores = np.zeros((len(rows), num_classes))
        np.add.at(scores, (np.arange(len(rows))[:, None], train.labels[rows[:, :number]]), votes[:, :number])
        found.append({"neighbors": number, "accuracy": float(np.mean(scores.argmax(-1) == evaluation.labels))})
    return found


def _check_number(neighbors: Sequence[int], num_examples: int) -> None:
    """Raise UserError for more neighbors than there are training images."""
    if max(neighbors) > num_examples:
        raise UserError(
            f"There are {num_examples} training images, fewer than {max(neighbors)} neighbors; give smaller "
            "--neighbors."
        )


def knn(
    options: FeatureOptions, *, neighbors: Sequence[int] = (1, 10, 20, 100), temperature: float = 0.07
) -> list[dict]:
    """Evaluate, write knn.json and knn.md, and return the rows. See `KnnOptions` for the arguments."""
    check_votes(neighbors, temperature)
    features = open_features(options, lambda source: _check_number(neighbors, source.train.num_examples))
    rows = nearest_neighbors(
        features.train,
        features.evaluation,
        len(features.names),
        neighbors=neighbors,
        temperature=temperature,
    )
    table = [(str(row["neighbors"]), f"{row['accuracy']:.4f}") for row in rows]
    numbers = {"temperature": temperature, "results": rows}
    write_report("knn", "Nearest neighbors", options, features, ("neighbors", "accuracy"), table, numbers)
    return rows

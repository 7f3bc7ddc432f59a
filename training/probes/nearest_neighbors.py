"""The vote of the nearest neighbors among features; training/knn.py has its sources."""

from collections.abc import Sequence

import numpy as np
import sklearn.neighbors

from keras_vit.run import Run
from training.data.sources import DataSet
from training.options.features import KnnOptions
from training.probes.features import Features, open_features, write_report


def nearest_neighbors(
    train: Features,
    evaluation: Features,
    num_classes: int,
    *,
    neighbors: Sequence[int] = (1, 10, 20, 100),
    temperature: float = 0.07,
) -> list[dict]:
    """Accuracy on the evaluation features for each number of neighbors: `neighbors`, `accuracy`.

    Numbers above that of the training images are left out, which is printed; if all are, their number is taken.
    """
    neighbors = _neighbors_that_fit(neighbors, len(train.labels))
    index = sklearn.neighbors.NearestNeighbors(n_neighbors=max(neighbors), metric="cosine").fit(train.values)
    distances, rows = index.kneighbors(evaluation.values)  # (n, most neighbors), the nearest first
    # The nearest has weight 1: exp(1 / temperature) itself may overflow.
    votes = np.exp((distances[:, :1] - distances) / temperature)
    results = []
    for number in neighbors:
        scores = np.zeros((len(rows), num_classes))
        np.add.at(scores, (np.arange(len(rows))[:, None], train.labels[rows[:, :number]]), votes[:, :number])
        results.append({"neighbors": number, "accuracy": float(np.mean(scores.argmax(-1) == evaluation.labels))})
    return results


def _neighbors_that_fit(neighbors: Sequence[int], num_examples: int) -> list[int]:
    """The numbers of neighbors up to that of the training images; print those that are left out."""
    left_out = [str(number) for number in neighbors if number > num_examples]
    if left_out:
        print(f"Not {' or '.join(left_out)} neighbors: there are {num_examples:,} training images.")
    return [number for number in neighbors if number <= num_examples] or [num_examples]


def knn(run: Run, source: DataSet, options: KnnOptions) -> list[dict]:
    """Evaluate, write knn.json and knn.md, and return the rows."""
    features = open_features(run, source, options)
    rows = nearest_neighbors(
        features.train,
        features.evaluation,
        len(features.names),
        neighbors=options.neighbors,
        temperature=options.temperature,
    )
    table = [{"neighbors": str(row["neighbors"]), "accuracy": f"{row['accuracy']:.4f}"} for row in rows]
    numbers = {"temperature": options.temperature, "results": rows}
    write_report("knn", "Nearest neighbors", options, features, table, numbers)
    return rows

"""Accuracy of the nearest neighbours: each evaluation image has the class of the training images most like it.

    python -m training.knn --run runs/mnist-small --data tfds:mnist

Nearness is the cosine of the frozen features; each neighbour votes with exp(cosine / temperature), as in "Unsupervised
Feature Learning via Non-Parametric Instance Discrimination" (arXiv 1805.01978) section 3.4 and DINO (2104.14294).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import sklearn.neighbors

from keras_vit import UserError, cli
from training.features import FeatureArguments, Features, open_features
from training.features_report import write_report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(FeatureArguments):
    """Accuracy of the nearest neighbours among frozen features."""

    neighbors: tuple[int, ...] = (1, 10, 20, 100)
    """How many neighbours vote; each number is a row of the table."""
    temperature: float = 0.07
    """A neighbour votes with exp(cosine / temperature): the smaller, the more the nearest count."""


def nearest_neighbors(
    train: Features,
    evaluation: Features,
    num_classes: int,
    *,
    neighbors: Sequence[int] = (1, 10, 20, 100),
    temperature: float = 0.07,
) -> list[dict]:
    """Accuracy on the evaluation features for each number of neighbours: `neighbors`, `accuracy`."""
    if max(neighbors) > len(train.labels):
        raise UserError(
            f"There are {len(train.labels)} training images, fewer than {max(neighbors)} neighbours; "
            "give smaller --neighbors."
        )
    index = sklearn.neighbors.NearestNeighbors(n_neighbors=max(neighbors), metric="cosine").fit(train.values)
    distances, rows = index.kneighbors(evaluation.values)  # (n, most neighbours), the nearest first
    # The nearest has weight 1: exp(1 / temperature) itself may overflow.
    votes = np.exp((distances[:, :1] - distances) / temperature)
    found = []
    for number in neighbors:
        scores = np.zeros((len(rows), num_classes))
        np.add.at(scores, (np.arange(len(rows))[:, None], train.labels[rows[:, :number]]), votes[:, :number])
        found.append({"neighbors": number, "accuracy": float(np.mean(scores.argmax(-1) == evaluation.labels))})
    return found


def knn(arguments: Arguments) -> list[dict]:
    """Measure, write knn.json and knn.md, and return the rows."""
    if not arguments.neighbors or min(arguments.neighbors) < 1:
        raise UserError("--neighbors takes numbers from 1, such as --neighbors 1 10 20.")
    if not 0.0 < arguments.temperature < np.inf:
        raise UserError(f"--temperature must be a positive number, but is {arguments.temperature}.")
    features = open_features(arguments)
    rows = nearest_neighbors(
        features.train,
        features.evaluation,
        len(features.names),
        neighbors=arguments.neighbors,
        temperature=arguments.temperature,
    )
    table = [(str(row["neighbors"]), f"{row['accuracy']:.4f}") for row in rows]
    numbers = {"temperature": arguments.temperature, "results": rows}
    write_report("knn", "Nearest neighbours", arguments, features, ("neighbours", "accuracy"), table, numbers)
    return rows


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    knn(cli.parse(Arguments, arguments, prog="python -m training.knn"))


if __name__ == "__main__":
    cli.run(main)

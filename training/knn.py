"""Accuracy of the nearest neighbours: each evaluation image has the class of the training images most like it.

    python -m training.knn --run runs/mnist-small --data tfds:mnist

Nearness is the cosine of the frozen features; each neighbour votes with exp(cosine / temperature), as in "Unsupervised
Feature Learning via Non-Parametric Instance Discrimination" (arXiv 1805.01978) section 3.4 and DINO (2104.14294).
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli
from training.arguments import FeatureArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(FeatureArguments):
    """Accuracy of the nearest neighbours among frozen features."""

    neighbors: tuple[int, ...] = (1, 10, 20, 100)
    """How many neighbours vote; each number is a row of the table."""
    temperature: float = 0.07
    """A neighbour votes with exp(cosine / temperature): the smaller, the more the nearest count."""


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m training.knn")
    cli.require_tensorflow()

    from training.nearest_neighbors import knn

    knn(parsed)


if __name__ == "__main__":
    cli.run(main)

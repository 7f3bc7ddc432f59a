"""k-nearest-neighbor accuracy: each evaluation image is classified by the most similar training images.

    keras-vit knn --run runs/mnist-small --data tfds:mnist

Similarity is the cosine of the frozen features; each neighbor votes with exp(cosine / temperature), as in "Unsupervised
Feature Learning via Non-Parametric Instance Discrimination" (arXiv 1805.01978) section 3.4 and DINO (2104.14294).
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.features import KnnOptions


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(KnnOptions, arguments, prog="keras-vit knn", about=__doc__)

    from training.checks import open_backbone

    run = open_backbone(options)
    cli.require_tensorflow()

    from training.data.sources import open_source
    from training.features.nearest_neighbors import knn

    knn(run, open_source(options.source), options)
    cli.print_next([options.probe_command()])


if __name__ == "__main__":
    cli.run(main)

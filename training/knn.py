"""k-nearest-neighbor accuracy: each evaluation image is classified by the most similar training images.

    python -m training.knn --run runs/mnist-small --data tfds:mnist

Similarity is the cosine of the frozen features; each neighbor votes with exp(cosine / temperature), as in "Unsupervised
Feature Learning via Non-Parametric Instance Discrimination" (arXiv 1805.01978) section 3.4 and DINO (2104.14294).
"""

from collections.abc import Sequence

from keras_vit import cli, parser
from keras_vit.checkpoints.fetch.find import check_name
from training.options.checks import check_data, check_finished
from training.options.probes import KnnOptions
from training.options.workdir import check_split


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(KnnOptions, arguments, prog="python -m training.knn")
    check_name(options.run)
    check_data(options.source)
    check_finished(options.run)
    check_split(options.run, options.source)
    cli.require_tensorflow()

    from training.probes.nearest_neighbors import knn

    knn(options, neighbors=options.neighbors, temperature=options.temperature)


if __name__ == "__main__":
    cli.run(main)

"""The paper's studies on your data: grids of runs, in parallel, with a table and a figure like the paper's.

    keras-vit study position-embedding --data tfds:mnist --workdir runs/positions

data-size: accuracy of ViT, hybrid and BiT against the number of training images. scaling: against the training FLOPs.
small-data: techniques for a ViT on few images, against their number.
position-embedding, head, shape: variants of one model. Each model is trained from scratch for the same number of steps,
once per seed, by the recipe study-small for 28x28 grayscale images, or that of --recipe. The table has the accuracy on
the evaluation images and the few-shot accuracy of frozen features. After an interruption the same command continues and
produces the same table.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.experiments.by_recipe import study


def main(arguments: Sequence[str]) -> None:
    """`STUDY --data … --workdir … [--recipe NAME]`, and any field of the recipe."""
    study(arguments, __doc__ or "")


if __name__ == "__main__":
    cli.run(main)

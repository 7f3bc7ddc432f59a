"""Train a model from scratch by a named recipe.

    keras-vit pretrain mnist-notes --data tfds:mnist --workdir runs/mnist-notes

It reaches about 97% on the test images of MNIST. The same command continues an interrupted run from its last
checkpoint. On SIGTERM or Ctrl-C it saves a checkpoint and exits with code 75.

    keras-vit pretrain auto --data folder:pictures --workdir runs/pictures

It chooses model, image size, epochs and augmentation from the data, and says why.

    keras-vit pretrain dino-vit-s16 --checkpoint runs/old --data folder:pictures --workdir runs/own

It continues without labels from a published model or a run.

    keras-vit pretrain vit-b16-i21k --data imagenet-21k --workdir runs/b16 --precision bfloat16 --dry-run --chips v5e-16

It says what the recipe needs on a Cloud TPU: steps, operations, days and memory.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.experiments.by_recipe import pretrain


def main(arguments: Sequence[str]) -> None:
    """`RECIPE --data … --workdir …`, and any field of the recipe."""
    if workdir := pretrain(arguments, __doc__ or ""):
        from keras_vit.run import Run

        cli.print_next(Run.at(workdir).next_commands("train"))


if __name__ == "__main__":
    cli.run(main)

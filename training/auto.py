"""Train a classifier on your images, evaluate it, and save it as a run.

    keras-vit auto --data folder:pictures

It looks at the data and the machine, and says what it does and why. Without a GPU, it fits a linear classifier to
frozen features of a published checkpoint. With a GPU or --minutes, it fine-tunes all weights. Without a checkpoint, it
trains from scratch.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.train import AutoOptions


def main(arguments: Sequence[str]) -> None:
    """`--data DATA [--checkpoint NAME]`"""
    options = parser.parse(AutoOptions, arguments, prog="keras-vit auto", about=__doc__)

    from keras_vit.run import Run
    from training.checks import check_new_workdir, check_outside
    from training.data.checks import check_data, unlabelled_path

    check_data(options.source)
    check_outside(options.workdir, options.source.data)
    check_new_workdir(options.workdir)
    if options.unlabelled is not None:
        unlabelled_path(options.unlabelled)
    if options.checkpoint is not None:
        Run.open(options.checkpoint)
    cli.require_tensorflow()

    from training.experiments.auto import auto

    cli.print_next(auto(options))


if __name__ == "__main__":
    cli.run(main)

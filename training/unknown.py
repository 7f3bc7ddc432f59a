"""Fit a score that tells images of none of a run's classes, and store it in the run.

    keras-vit unknown --run runs/pictures --data folder:pictures

Five scores are fitted to the features of the training images. The one that separates left-out classes best, or nearly
so, is kept as unknown.npz, with a threshold that 5% of the evaluation images exceed. Prediction and exports of the run
then use it.
"""

from collections.abc import Sequence

from keras_vit import UserError, cli
from keras_vit.cli import parser
from training.options.evaluate import UnknownOptions


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(UnknownOptions, arguments, prog="keras-vit unknown", about=__doc__)

    from keras_vit.run import Run
    from training.data.checks import check_data
    from training.data.known_images import check_split

    check_data(options.source)
    run = Run.open_directory(options.run)
    if run.is_multi_label:
        raise UserError(f"{options.run} is for images of several classes each, or of none, so none is unknown to it.")
    check_split(run, options.source)
    cli.require_tensorflow()

    from training.data.sources import open_source
    from training.outliers.fit_unknown import unknown

    unknown(run, open_source(options.source), options)
    cli.print_next(run.next_commands("unknown"))


if __name__ == "__main__":
    cli.run(main)

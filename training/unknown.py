"""Fit a score that tells pictures of none of a run's classes, and store it in the run.

    keras-vit unknown --run runs/pictures --data folder:pictures

Five scores are fitted to the features of the training images. The one that tells left-out classes best, or nearly so,
is kept as unknown.npz, with a threshold that 5 % of the evaluation images exceed. Prediction and exports of the run
then use it.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.input.known_images import check_split
from training.options.checks import check_data
from training.options.outliers import UnknownOptions


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(UnknownOptions, arguments, prog="keras-vit unknown", about=__doc__)
    check_data(options.source)
    run = options.open_run()
    check_split(run, options.source)
    cli.require_tensorflow()

    from training.input.sources import open_source
    from training.outliers.fit_unknown import unknown

    unknown(run, open_source(options.source), options)
    cli.print_next(run.next_commands("unknown"))


if __name__ == "__main__":
    cli.run(main)

"""Inspect a model: plot what it learned and which parts of an image it attends to.

    keras-vit inspect --run runs/mnist-small --output inside
    keras-vit inspect --checkpoint augreg:B_16 --images photographs --output inside

Writes the paper's figures as PNG, arrays.npz, measures.json, and index.html with everything in one report.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.inspection.options import InspectionOptions


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint FILE --output DIR`"""
    options = parser.parse(InspectionOptions, arguments, prog="keras-vit inspect", about=__doc__)
    run = options.open_run()
    options.check(run)
    cli.import_keras()

    from keras_vit.inspection.run import run_inspection

    run_inspection(run, options)
    cli.print_next(options.next_commands(run))


if __name__ == "__main__":
    cli.run(main)

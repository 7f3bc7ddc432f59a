"""Exports a model in all forms that this machine can run, measures them side by side, and recommends one.

    keras-vit fastest --run runs/demo --output forms --batch-size 1 --threads 2

Each form is verified against the Keras model, and runs in a process of its own. In each round all of them run in turn.
"""

from collections.abc import Sequence

from export.options import FastestOptions
from keras_vit import cli
from keras_vit.cli import parser


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    options = parser.parse(FastestOptions, arguments, prog="keras-vit fastest", about=__doc__)

    from export.run import open_for_export

    run = open_for_export(options)

    from export.fastest.compare import compare_forms, recommendation, table
    from export.source import open_model

    measured, left_out = compare_forms(open_model(run, options.source), options)
    print(table(measured))
    for form, reason in left_out.items():
        print(f"Not measured: {form}. {reason}")
    print(recommendation(measured))


if __name__ == "__main__":
    cli.run(main)

"""Look inside a model: what it learned, and where it looks.

    python -m keras_vit.inspection --run runs/mnist-small --output inside
    python -m keras_vit.inspection --checkpoint augreg:B_16 --images photographs --output inside

writes the paper's figures as PNG, arrays.npz, measures.json and index.html, which shows everything.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.inspection.options import InspectionOptions


def main(arguments: Sequence[str]) -> None:
    """`--run DIR | --checkpoint FILE --output DIR`"""
    parsed = cli.parse(InspectionOptions, arguments, prog="python -m keras_vit.inspection")
    cli.import_keras()

    from keras_vit.inspection.run import look

    look(parsed)


if __name__ == "__main__":
    cli.run(main)

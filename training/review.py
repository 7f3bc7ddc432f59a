"""Make a page to clean a data set: copies, suspicious labels, odd images, classes that overlap, coverage.

    keras-vit embed --checkpoint hf:facebook/dinov2-small --data folder:pictures --output features
    keras-vit review --index features

It writes features/review/review.html, on which you keep, relabel or drop images, and decisions.csv. The page saves your
decisions in this file, and `--exclude decisions.csv` of all commands with `--data folder:` or `csv:` reads it.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.features import ReviewOptions


def main(arguments: Sequence[str]) -> None:
    """`--index DIR`"""
    options = parser.parse(ReviewOptions, arguments, prog="keras-vit review", about=__doc__)

    from keras_vit.files.remote import output_folder
    from training.features.store import open_index

    index = open_index(options.index)
    output_folder(options.folder)
    cli.require_tensorflow()

    from training.features.review import review

    cli.print_next([review(index, options)])


if __name__ == "__main__":
    cli.run(main)

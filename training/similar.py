"""Find the images of an index that are most similar to given ones.

    keras-vit similar --index features cat.jpg
    keras-vit similar --index features cat.jpg -k 20 --output similar.html

It prints the images with the largest cosine similarity of their features. The index is a folder that `keras-vit embed`
has written; the model that made it is used for the new images, and its fingerprint is compared.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.features import SimilarOptions


def main(arguments: Sequence[str]) -> None:
    """`--index DIR IMAGES…`"""
    options = parser.parse(SimilarOptions, arguments, prog="keras-vit similar", about=__doc__)

    from training.features.store import open_index
    from training.prediction.arguments import check_output, find_images

    index = open_index(options.index)
    check_output(options.output)
    files = [str(file) for file in find_images(options.images)]
    cli.require_tensorflow()

    from training.features.lookup import similar

    similar(index, files, options)
    page = ("--output", "similar.html")
    following: list[tuple[str, ...]] = [("review", "--index", options.index)]
    if options.output is None:
        following.insert(0, ("similar", "--index", options.index, *options.images, *page))
    cli.print_next(following)


if __name__ == "__main__":
    cli.run(main)

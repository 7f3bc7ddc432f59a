"""Find the images of an index that fit a text, with the text tower of the checkpoint that made the index.

    keras-vit embed --checkpoint hf:openai/clip-vit-base-patch32 photographs/ --output features
    keras-vit search "red bicycle in snow" --index features --output found.html

It prints the images whose embeddings have the largest cosine similarity with that of the text.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.features import SearchOptions


def main(arguments: Sequence[str]) -> None:
    """`TEXT --index DIR`"""
    options = parser.parse(SearchOptions, arguments, prog="keras-vit search", about=__doc__)

    from training.features.store import open_index
    from training.prediction.arguments import check_output

    index = open_index(options.index)
    check_output(options.output)
    cli.require_tensorflow()

    from training.features.lookup import search

    best = search(index, options)
    following: list[tuple[str, ...]] = [("similar", "--index", options.index, best)]
    if options.output is None:
        following.insert(0, ("search", options.text, "--index", options.index, "--output", "found.html"))
    cli.print_next(following)


if __name__ == "__main__":
    cli.run(main)

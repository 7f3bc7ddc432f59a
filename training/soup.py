"""Average the weights of fine-tuned runs: one model, as fast as each of them, often better than the best.

    keras-vit soup runs/fine-0 runs/fine-1 runs/fine-2 --output runs/soup --greedy

The output is a run directory like the others. The runs start from one checkpoint and have one architecture: averages of
models that were trained from scratch are useless.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.evaluate import SoupOptions


def main(arguments: Sequence[str]) -> None:
    """`RUN RUN … --output DIR [--greedy]`"""
    options = parser.parse(SoupOptions, arguments, prog="keras-vit soup", about=__doc__)

    from keras_vit.run import Run
    from training.data.known_images import check_soup

    runs = [Run.open_directory(name) for name in options.runs]
    check_soup(runs)
    cli.require_tensorflow()

    from training.evaluation.soup import cook

    cook(runs, options)
    cli.print_next(Run.open_directory(options.output).next_commands("soup"))


if __name__ == "__main__":
    cli.run(main)

"""Average the weights of fine-tuned runs: one model, as fast as each of them, often better than the best.

    python -m training.soup runs/fine-0 runs/fine-1 runs/fine-2 --output runs/soup --greedy

The output is a run directory like the others. The runs start from one checkpoint and have one architecture: averages of
models that were trained from scratch are useless.
"""

from collections.abc import Sequence

from keras_vit import cli, parser, run_directory
from training.options.evaluate import SoupOptions
from training.options.workdir import check_soup


def main(arguments: Sequence[str]) -> None:
    """`RUN RUN … --output DIR [--greedy]`"""
    options = parser.parse(SoupOptions, arguments, prog="python -m training.soup")
    for run in options.runs:
        run_directory.find(run, run_directory.MODEL)
    check_soup(options.runs)
    cli.require_tensorflow()

    from training.evaluation.soup import cook

    cook(options.runs, options.output, greedy=options.greedy)


if __name__ == "__main__":
    cli.run(main)

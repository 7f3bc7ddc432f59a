"""Few-shot linear accuracy: regularized least squares in closed form on frozen features of a few images per class.

    python -m training.fewshot --run runs/mnist-small --data tfds:mnist

Paper: "An Image is Worth 16x16 Words" (arXiv 2010.11929) section 4.1. Code: big_vision `evaluators/fewshot_lsr.py`,
whose image selection for a seed is the same here; all arithmetic is float64.
"""

from collections.abc import Sequence

from keras_vit import cli, parser
from keras_vit.checkpoints.fetch.find import check_name
from training.options.checks import check_data, check_finished
from training.options.probes import FewshotOptions
from training.options.workdir import check_split


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(FewshotOptions, arguments, prog="python -m training.fewshot")
    check_name(options.run)
    check_data(options.source)
    check_finished(options.run)
    check_split(options.run, options.source)
    cli.require_tensorflow()

    from training.probes.least_squares import fewshot

    fewshot(options, shots=options.shots, seeds=options.seeds, l2=options.l2, sweep=options.sweep)


if __name__ == "__main__":
    cli.run(main)

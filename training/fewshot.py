"""Few-shot linear accuracy: regularized least squares in closed form on frozen features of a few images per class.

    keras-vit fewshot --run runs/mnist-small --data tfds:mnist
    keras-vit fewshot --checkpoint hf:facebook/dinov2-small --data folder:pictures --shots 5 --workdir runs/few

Paper: "An Image is Worth 16x16 Words" (arXiv 2010.11929) section 4.1. Code: big_vision `evaluators/fewshot_lsr.py`,
whose image selection for a seed is the same here; all arithmetic is float64.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.features import FewshotOptions


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(FewshotOptions, arguments, prog="keras-vit fewshot", about=__doc__)

    from keras_vit.run import Run
    from training.checks import open_backbone

    run = open_backbone(options)
    cli.require_tensorflow()

    from training.data.sources import open_source
    from training.features.linear_models import fewshot

    fewshot(run, open_source(options.source), options)
    made = options.workdir
    cli.print_next([options.probe_command()] if made is None else Run.open(made).next_commands("train"))


if __name__ == "__main__":
    cli.run(main)

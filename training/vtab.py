"""VTAB-1k: a checkpoint fine-tuned to each of 19 tasks on 1,000 images, and the mean of its accuracies.

    python -m training.vtab --checkpoint augreg:B_16 --workdir runs/vtab --data-dir tfds

runs the tasks that are prepared in TFDS' directory and says how to prepare the others. Each setting is a run of its own
on 800 images, the best of them on the 200 of val200 is trained again on all 1,000, and measured on the test split. The
defaults are the one setting of "An Image is Worth 16x16 Words" (arXiv 2010.11929) Table 4, where nothing is chosen;
"How to train your ViT" (2106.10270) has --learning-rates 0.001 0.003 0.01 0.03 --steps 500 2500. The same command
continues.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.options.experiments import VtabOptions


def main(arguments: Sequence[str]) -> None:
    """`--checkpoint FILE --workdir DIR`"""
    parsed = cli.parse(VtabOptions, arguments, prog="python -m training.vtab")
    cli.require_tensorflow()

    from training.experiments.vtab_runs import vtab
    from training.loop.setup import report_interruption

    with report_interruption():
        vtab(parsed)


if __name__ == "__main__":
    cli.run(main)

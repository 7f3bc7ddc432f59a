"""VTAB-1k: fine-tune a checkpoint to each of 19 tasks on 1,000 images, and report the mean accuracy.

    keras-vit vtab --checkpoint augreg:B_16 --workdir runs/vtab --data-dir tfds

It runs the tasks that are prepared in the TFDS directory and prints how to prepare the others. A setting is a run on
800 images. The best setting on the 200 images of val200 is trained again on all 1,000 images and evaluated on the test
split. The default is the single setting of "An Image is Worth 16x16 Words" (arXiv 2010.11929) Table 4; "How to train
your ViT" (2106.10270) uses --learning-rates 0.001 0.003 0.01 0.03 --steps 500 2500. After an interruption the same
command continues.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.train import VtabOptions


def main(arguments: Sequence[str]) -> None:
    """`--checkpoint FILE --workdir DIR`"""
    options = parser.parse(VtabOptions, arguments, prog="keras-vit vtab", about=__doc__)

    from keras_vit.run import Run
    from training.loop.devices.backend import prepare_tpu

    Run.open(options.checkpoint)
    prepare_tpu(options.devices)
    cli.require_tensorflow()

    from training.experiments.vtab_runs import vtab
    from training.loop.callbacks import report_interruption

    with report_interruption():
        vtab(options)


if __name__ == "__main__":
    cli.run(main)

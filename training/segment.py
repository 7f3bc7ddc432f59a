"""Segment images with a Vision Transformer: the class of each pixel, objects, or both.

    keras-vit segment fit --checkpoint augreg:B_16 --data folder:scenes --workdir runs/scenes
    keras-vit segment evaluate --run runs/scenes --data folder:scenes --output runs/scenes
    keras-vit segment predict --run runs/scenes --output found new/

`fit`, `evaluate` and `predict` with --help list their options; `fit --head linear` trains a linear head on frozen
features. The same fit command continues an interrupted run.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.segmentation.commands import evaluate, fit, predict


def main(arguments: Sequence[str]) -> None:
    """`fit | evaluate | predict`, with the options of each"""
    cli.run_job("keras-vit segment", __doc__ or "", {"fit": fit, "evaluate": evaluate, "predict": predict}, arguments)


if __name__ == "__main__":
    cli.run(main)

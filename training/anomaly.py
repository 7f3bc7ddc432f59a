"""Find defects when only good parts are known: a heat map, a score and a verdict for each image.

    keras-vit anomaly fit --checkpoint hf:facebook/dinov2-small --data good/ --workdir runs/parts
    keras-vit anomaly predict --run runs/parts new/ --output defects.html

`fit` keeps patch features of good parts (PatchCore, arXiv 2106.08265), sets a threshold on parts that it held out, and
writes a SavedModel. `fit` and `predict` with --help list their options.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.outliers.commands import fit, predict


def main(arguments: Sequence[str]) -> None:
    """`fit | predict`, with the options of each"""
    cli.run_job("keras-vit anomaly", __doc__ or "", {"fit": fit, "predict": predict}, arguments)


if __name__ == "__main__":
    cli.run(main)

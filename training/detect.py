"""Find objects on images with a Vision Transformer: from words, from an example, or of your own classes.

    keras-vit detect predict --checkpoint hf:google/owlv2-base-patch16-ensemble --classes "a red stamp" new/
    keras-vit detect predict --checkpoint hf:google/owlvit-base-patch32 --like a.jpg --box 10 20 80 60 new/
    keras-vit detect fit --checkpoint augreg:B_16 --data yolo:stamps/data.yaml --workdir runs/stamps
    keras-vit detect evaluate --run runs/stamps --data yolo:stamps/data.yaml --output runs/stamps

`predict`, `fit` and `evaluate` with --help list their options.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.detection.commands import evaluate, fit, predict


def main(arguments: Sequence[str]) -> None:
    """`predict | fit | evaluate`, with the options of each"""
    cli.run_job("keras-vit detect", __doc__ or "", {"predict": predict, "fit": fit, "evaluate": evaluate}, arguments)


if __name__ == "__main__":
    cli.run(main)

"""Write evaluation images of a data set to a file, for commands that do not use TensorFlow.

    keras-vit samples --data tfds:mnist --count 1000 --output some

writes samples.npz and labels.txt, as in a run directory.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.run_directory import SAMPLES
from training.options.checks import check_data
from training.options.data import SamplesOptions


def main(arguments: Sequence[str]) -> None:
    """`--data DATA --output DIR`"""
    options = parser.parse(SamplesOptions, arguments, prog="keras-vit samples", about=__doc__)
    check_data(options.source)
    cli.require_tensorflow()

    from training.input.sample_images import write_samples

    write_samples(**vars(options))
    images = ("--images", str(options.output / SAMPLES), "--output", "inspection")
    cli.print_next([("inspect", "--checkpoint", "hf:facebook/dinov2-small", *images)])


if __name__ == "__main__":
    cli.run(main)

"""Write evaluation images of a data set to a file, for commands that do not use TensorFlow.

    keras-vit samples --data tfds:mnist --count 1000 --output some

It writes samples.npz and labels.txt, as in a run directory.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.common import SamplesOptions


def main(arguments: Sequence[str]) -> None:
    """`--data DATA --output DIR`"""
    options = parser.parse(SamplesOptions, arguments, prog="keras-vit samples", about=__doc__)

    from keras_vit.images.files import SAMPLES
    from keras_vit.run import check_no_run
    from training.data.checks import check_data

    check_data(options.source)
    check_no_run(options.output)
    cli.require_tensorflow()

    from training.data.write import write_samples

    write_samples(**vars(options))
    images = ("--images", str(options.output / SAMPLES), "--output", "inspection")
    cli.print_next([("inspect", "--checkpoint", "hf:facebook/dinov2-small", *images)])


if __name__ == "__main__":
    cli.run(main)

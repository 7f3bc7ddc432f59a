"""Write some evaluation images of a data set into a file that commands without TensorFlow read.

    python -m training.samples --data tfds:mnist --count 1000 --output some

makes samples.npz and labels.txt, as in a run directory.
"""

from collections.abc import Sequence

from keras_vit import cli
from training.options.data import SamplesOptions


def main(arguments: Sequence[str]) -> None:
    """`--data DATA --output DIR`"""
    parsed = cli.parse(SamplesOptions, arguments, prog="python -m training.samples")
    cli.require_tensorflow()

    from training.input.sample_images import write_samples

    write_samples(parsed)


if __name__ == "__main__":
    cli.run(main)

"""Write evaluation images of a data set to a file, for commands that do not use TensorFlow.

    python -m training.samples --data tfds:mnist --count 1000 --output some

writes samples.npz and labels.txt, as in a run directory.
"""

from collections.abc import Sequence

from keras_vit import cli, parser
from training.options.checks import check_data
from training.options.data import SamplesOptions
from training.workdir import check_no_run


def main(arguments: Sequence[str]) -> None:
    """`--data DATA --output DIR`"""
    options = parser.parse(SamplesOptions, arguments, prog="python -m training.samples")
    check_data(options.source)
    check_no_run(str(options.output))
    cli.require_tensorflow()

    from training.input.sample_images import write_samples

    write_samples(**vars(options))


if __name__ == "__main__":
    cli.run(main)

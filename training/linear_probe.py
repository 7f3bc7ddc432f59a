"""Linear probe: scikit-learn's logistic regression on frozen features of all training images.

    python -m training.linear_probe --run runs/mnist-small --data tfds:mnist

The strength of the penalty is chosen on a tenth of the training images; then the probe is fitted on all of them.
"""

from collections.abc import Sequence

from keras_vit import cli, parser
from keras_vit.checkpoints.fetch.find import check_name
from training.options.checks import check_data, check_finished
from training.options.probes import LinearProbeOptions
from training.options.workdir import check_split


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(LinearProbeOptions, arguments, prog="python -m training.linear_probe")
    check_name(options.run)
    check_data(options.source)
    check_finished(options.run)
    check_split(options.run, options.source)
    cli.require_tensorflow()

    from training.probes.logistic_regression import probe

    probe(options, c=options.c, max_iterations=options.max_iterations)


if __name__ == "__main__":
    cli.run(main)

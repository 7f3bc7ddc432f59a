"""Linear probe: scikit-learn's logistic regression on frozen features of all training images.

    python -m training.linear_probe --run runs/mnist-small --data tfds:mnist

The strength of the penalty is chosen on a tenth of the training images; then the probe is fitted on all of them.
"""

from collections.abc import Sequence

from keras_vit import cli, parser
from training.input.known_images import check_split
from training.options.checks import check_data, report_directory
from training.options.probes import LinearProbeOptions


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(LinearProbeOptions, arguments, prog="python -m training.linear_probe")
    check_data(options.source)
    run = options.open_run()
    report_directory(run, options.output)
    check_split(run, options.source)
    cli.require_tensorflow()

    from training.input.sources import open_source
    from training.probes.logistic_regression import probe

    probe(run, open_source(options.source), options)


if __name__ == "__main__":
    cli.run(main)

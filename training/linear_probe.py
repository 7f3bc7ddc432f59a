"""Linear probe: scikit-learn's logistic regression on frozen features of all training images.

    keras-vit linear-probe --run runs/mnist-small --data tfds:mnist
    keras-vit linear-probe --checkpoint hf:facebook/dinov2-small --data folder:pictures --workdir runs/probe

The strength of the penalty is chosen on a tenth of the training images; then the probe is fitted on all of them. With
--workdir, the model with the probe as its head is saved as a run.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.input.known_images import check_split
from training.options.checks import check_data
from training.options.probes import LinearProbeOptions
from training.workdir import check_probe_workdir


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(LinearProbeOptions, arguments, prog="keras-vit linear-probe", about=__doc__)
    check_data(options.source)
    run = options.open_run()
    check_probe_workdir(run, options)
    check_split(run, options.source)
    cli.require_tensorflow()

    from training.input.sources import open_source
    from training.probes.logistic_regression import probe

    probe(run, open_source(options.source), options)
    cli.print_next(options.next_commands())


if __name__ == "__main__":
    cli.run(main)

"""Linear probe: scikit-learn's logistic regression on frozen features of all training images.

    keras-vit linear-probe --run runs/mnist-small --data tfds:mnist
    keras-vit linear-probe --checkpoint hf:facebook/dinov2-small --data folder:pictures --workdir runs/probe

The strength of the penalty is chosen on a tenth of the training images; then the probe is fitted on all of them. With
--workdir, the model with the probe as its head is saved as a run.
"""

from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.features import LinearProbeOptions


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    options = parser.parse(LinearProbeOptions, arguments, prog="keras-vit linear-probe", about=__doc__)

    from keras_vit.run import Run
    from training.checks import open_backbone

    run = open_backbone(options)
    cli.require_tensorflow()

    from training.data.sources import open_source
    from training.features.linear_models import probe

    probe(run, open_source(options.source), options)
    made = options.workdir
    cli.print_next([options.probe_command()] if made is None else Run.open(made).next_commands("train"))


if __name__ == "__main__":
    cli.run(main)

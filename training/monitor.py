"""Say whether today's images differ from those that a run was evaluated on, and the accuracy to expect on them.

    keras-vit monitor --run runs/pictures
    keras-vit monitor --run runs/pictures new/ --output moved.html
    keras-vit monitor --run served/1 features.npz --metrics monitor.prom

The first command makes monitor.npz, a summary of the evaluation images, which exports of the run include. The exit code
is 3 if the images differ; among images of the same kind, one test in 100 says so by chance.
"""

import sys
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.features import MonitorOptions

ALARM = 3


def main(arguments: Sequence[str]) -> None:
    """`--run DIR [IMAGES…]`"""
    options = parser.parse(MonitorOptions, arguments, prog="keras-vit monitor", about=__doc__)

    from keras_vit.run import Run
    from training.prediction.arguments import check_output, find_images

    check_output(options.output)
    files = [] if options.saved_features else [str(file) for file in find_images(options.images)]
    run = Run.open(options.run)
    cli.require_tensorflow()

    from training.features.monitor import monitor

    if monitor(run, files, options):
        sys.exit(ALARM)


if __name__ == "__main__":
    cli.run(main)

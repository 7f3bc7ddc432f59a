"""Start several workers of a training command on this machine, to try out training on several machines.

    keras-vit launch --workers 2 -- keras-vit pretrain digits --data digits --workdir runs/two

Each worker gets its own TF_CONFIG with a free port. Each line of its output is printed after its index. SIGTERM and
Ctrl-C are forwarded to all workers. When a worker fails, the others have some time to notice before they are killed.
"""

import sys
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser
from training.options.train import LaunchOptions


def main(arguments: Sequence[str]) -> None:
    """`--workers N -- COMMAND`"""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    options = parser.parse(LaunchOptions, arguments[:split], prog="keras-vit launch -- COMMAND", about=__doc__)

    from training.loop.devices.cluster import launch

    code = launch(arguments[split + 1 :], options.workers, options.grace)
    sys.exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    cli.run(main)

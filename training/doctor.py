"""Check this machine for training: versions, backend, GPUs, memory, disk and network.

    keras-vit doctor

It lists hardware and software, says where training would run, and prints for each problem the command that repairs it.
The exit code is 1 if there is a problem.
"""

import dataclasses
import sys
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Check this machine for training."""


def main(arguments: Sequence[str]) -> None:
    """Without options"""
    parser.parse(DoctorOptions, arguments, prog="keras-vit doctor", about=__doc__)

    from training.machine import description, look_around, problems

    machine = look_around()
    for name, value in description(machine):
        print(f"{name:18} {value}")
    listed = problems(machine)
    for sentence, command in listed:
        print(f"\nProblem: {sentence}\n  {command}")
    print("" if listed else "\nNo problem found.")
    sys.exit(bool(listed))


if __name__ == "__main__":
    cli.run(main)

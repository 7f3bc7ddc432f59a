"""Write some evaluation images of a data set into a file that commands without TensorFlow read.

    python -m training.samples --data tfds:mnist --count 1000 --output some

makes samples.npz and labels.txt, as in a run directory.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

import tyro

from keras_vit import cli
from training.arguments import DataArguments


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write some evaluation images of a data set into samples.npz, and the names of its classes into labels.txt."""

    source: Annotated[DataArguments, tyro.conf.arg(name="")]
    output: pathlib.Path
    """Directory to write into."""
    count: int = 128
    """Images at most, taken in an evenly mixed order."""


def main(arguments: Sequence[str]) -> None:
    """`--data DATA --output DIR`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m training.samples")
    cli.require_tensorflow()

    from training.sampling import write_samples

    write_samples(parsed)


if __name__ == "__main__":
    cli.run(main)

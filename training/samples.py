"""Write some evaluation images of a data set into a file that commands without TensorFlow read.

    python -m training.samples --data tfds:mnist --count 1000 --output some

makes samples.npz and labels.txt, as in a run directory.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import tensorflow as tf
import tyro

from keras_vit import UserError, cli, run_directory
from keras_vit.run_directory import Samples
from training.sources import DataArguments, bad_labels_named, open_source


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write some evaluation images of a data set into samples.npz, and the names of its classes into labels.txt."""

    source: Annotated[DataArguments, tyro.conf.arg(name="")]
    output: pathlib.Path
    """Directory to write into."""
    count: int = 128
    """Images at most, taken in an evenly mixed order."""


def write_samples(arguments: Arguments) -> None:
    """Write both files."""
    if arguments.count < 1:
        raise UserError(f"--count must be at least 1 image, but is {arguments.count}.")
    output = run_directory.check_output(arguments.output)
    source = open_source(arguments.source)
    split = source.evaluation
    chosen = np.random.default_rng(0).permutation(split.num_examples)[: arguments.count]
    with bad_labels_named(source.train, source.evaluation):
        examples = [split.example(tf.constant(index, tf.int64)) for index in chosen]
    encoded = tuple(tf.io.encode_png(image).numpy() for image, _ in examples)
    with run_directory.staged(output) as stage:
        Samples(encoded, np.array([int(label) for _, label in examples])).save(stage / run_directory.SAMPLES)
        (stage / run_directory.LABELS).write_text(run_directory.labels_text(source.labels), encoding="utf-8")
    print(f"{len(encoded)} images in {output / run_directory.SAMPLES}.")


def main(arguments: Sequence[str]) -> None:
    """`--data DATA --output DIR`"""
    write_samples(cli.parse(Arguments, arguments, prog="python -m training.samples"))


if __name__ == "__main__":
    cli.run(main)

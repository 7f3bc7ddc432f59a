"""Compares the input pipeline of training with a minimal tf.data loop, in images per second.

    python -m benchmarks.input

JPEGs of 500x375 become 224x224 by Inception crop and flip. The minimal loop reads a file, samples a window, decodes
only this window, resizes, flips, batches and normalizes. The input pipeline adds a shuffled order that can resume at
any step, labels, seeds, and rounding to bytes. Rounds alternate, so that both meet the same conditions. The ratios are
more reliable than the rates; the ratio by processor time is reliable on a shared machine too.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compare the input pipeline of training with a minimal tf.data loop."""

    rounds: int = 9
    """Timed passes of each, after one warm-up pass."""
    batches: int = 16
    """Batches of 64 images in each pass."""
    images: int = 256
    """Number of different files."""


def main(arguments: Sequence[str]) -> None:
    """`--rounds --batches --images`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m benchmarks.input")
    cli.require_tensorflow()

    from benchmarks.input_pipeline import compare

    compare(parsed.rounds, parsed.batches, parsed.images)


if __name__ == "__main__":
    cli.run(main)

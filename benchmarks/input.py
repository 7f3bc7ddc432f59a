"""Training images per second of the input pipeline beside a bare loop that does only what cannot be left out.

    python -m benchmarks.input

JPEGs of 500x375 become 224x224 by Inception crop and flip. The bare loop is tf.data too: read a file, draw a window,
decode it alone, resize, mirror, batch, normalise. Ours adds the shuffled order that can start anywhere, labels, seeds,
and rounding to bytes. Rounds alternate, so that both see the same machine; the ratio is what to trust, that of the work
(images per second of processor time) also where others use the machine.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Training images per second of the input pipeline beside a bare loop."""

    rounds: int = 9
    """Timed passes of each, after one untimed."""
    batches: int = 16
    """Batches of 64 images in each pass."""
    images: int = 256
    """Different files."""


def main(arguments: Sequence[str]) -> None:
    """`--rounds --batches --images`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m benchmarks.input")
    cli.require_tensorflow()

    from benchmarks.input_pipeline import compare

    compare(parsed)


if __name__ == "__main__":
    cli.run(main)

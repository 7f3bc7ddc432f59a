"""Compares the input pipeline of training with a minimal tf.data loop, in images per second.

    python -m benchmarks.input
    python -m benchmarks.input --records 1281167
    python -m benchmarks.input --augmentation

JPEGs of 500x375 become 224x224 by Inception crop and flip. The minimal loop reads a file, samples a window, decodes
only this window, resizes, flips, batches and normalizes. The input pipeline adds a shuffled order that can resume at
any step, labels, seeds, and rounding to bytes. The sequential loop reads TFRecord files from the first byte to the
last; the pipeline reads them in shuffled order. The last two decode and resize whole images as in evaluation: bilinear
in TensorFlow's way, and bicubic with the pixels of Pillow. Rounds alternate, so that all meet the same conditions. The
ratios are more reliable than the rates; the ratio by processor time is reliable on a shared machine too.

With --augmentation the input pipeline runs beside those of Keras, keras-cv, torchvision, timm and Grain, all with
RandAugment, MixUp and random windows (`benchmarks/input/augmented_peers.py`).
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli
from keras_vit.cli import parser

# For the threads or worker processes of each pipeline.
_CORES = 2


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compare the input pipeline of training with a minimal tf.data loop."""

    rounds: int = 9
    """Timed passes of each, after one warm-up pass."""
    batches: int = 16
    """Batches of 64 images in each pass."""
    images: int = 256
    """Number of different files."""
    records: int | None = None
    """Instead, time the index of so many small records in 100 files."""
    augmentation: bool = False
    """Instead, compare pipelines with RandAugment and MixUp, each on two cores."""


def main(arguments: Sequence[str]) -> None:
    """`--rounds --batches --images --records --augmentation`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.input", about=__doc__)
    cli.require_tensorflow()

    if parsed.augmentation:
        from benchmarks.input.augmented import compare_augmented

        compare_augmented(parsed.rounds, parsed.batches, parsed.images, _CORES)
        return

    from benchmarks.input.loops import compare, time_index

    if parsed.records is not None:
        time_index(parsed.records)
        return
    compare(parsed.rounds, parsed.batches, parsed.images)


if __name__ == "__main__":
    cli.run(main)

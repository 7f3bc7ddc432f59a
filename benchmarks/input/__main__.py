"""Compares input pipelines of training, each in a process of its own, in images per second.

    python -m benchmarks.input
    python -m benchmarks.input --augmentation

JPEGs of 500x375 become 224x224 by Inception crop and flip. This project's pipeline, over files and over TFRecord files,
runs beside a minimal tf.data loop, which has no labels, no seeds and no order that can resume. With --augmentation the
pipeline runs beside those of Keras, keras-cv, torchvision, timm and Grain, all with RandAugment and MixUp. Rounds
alternate, so that all meet the same conditions; the ratios are more reliable than the rates.
"""

import contextlib
import dataclasses
import json
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

from benchmarks.case import Case, photographs, processor
from benchmarks.comparison import PeerProcess
from benchmarks.input.peers import AUGMENTED, BATCH, PLAIN
from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.cli.options import Count
from keras_vit.files.tables import markdown_table

# For the threads or worker processes of each pipeline.
_CORES = 2


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compare the input pipeline of training with others, each on two cores."""

    rounds: Count = 9
    """Timed passes of each, after one warm-up pass."""
    batches: Count = 16
    """Batches of 64 images in each pass."""
    images: Count = 256
    """Number of different files."""
    augmentation: bool = False
    """Compare pipelines with RandAugment and MixUp."""


def compare(peers: Sequence[str], rounds: int, batches: int, images: int, cores: int = _CORES) -> str:
    """Write photographs, let the pipelines take turns, and return a table."""
    case = Case("inference", "ViT-S_16", BATCH, threads=cores)
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder = pathlib.Path(directory) / "photographs"
        for number, content in enumerate(photographs(images)):
            path = folder / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        processes = [PeerProcess(peer, case, stack, "benchmarks.input.peers") for peer in peers]
        request = json.dumps({"folder": str(folder), "batches": batches})
        for number in range(rounds + 1):
            for process in processes:
                answer = process.ask(request)
                if answer and number:
                    seconds[process.peer].append(answer["seconds"])
        failures = {process.peer: process.end().failure for process in processes}
    return table(seconds, failures, batches * BATCH)


def table(seconds: dict[str, list[float]], failures: dict[str, str | None], images: int) -> str:
    """Return a Markdown table: images per second of each pipeline, and how many times as fast ours is, by round."""
    own = next(iter(seconds.values()))
    rows = []
    for peer, times in seconds.items():
        if failures[peer] is not None or not times:
            rows.append((peer, f"failed: {failures[peer]}", "", ""))
            continue
        rates = sorted(images / each for each in times)
        ratios = [theirs / ours for ours, theirs in zip(own, times, strict=True)] if len(own) == len(times) else []
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        rows.append((peer, f"{statistics.median(rates):.0f}", f"{rates[0]:.0f} to {rates[-1]:.0f}", shown))
    header = ("pipeline", "images/s, median", "least to most", "keras_vit is faster by")
    return markdown_table(header, rows, num_text_columns=1)


def main(arguments: Sequence[str]) -> None:
    """`--rounds --batches --images --augmentation`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.input", about=__doc__)
    cli.require_tensorflow()
    peers = [peer.__name__ for peer in (AUGMENTED if parsed.augmentation else PLAIN)]
    print(f"{processor()}, {_CORES} cores, {parsed.rounds} rounds of {parsed.batches} batches of {BATCH} images\n")
    print(compare(peers, parsed.rounds, parsed.batches, parsed.images))


if __name__ == "__main__":
    cli.run(main)

"""Compares input pipelines with RandAugment, MixUp and random windows, each in a process of its own."""

import contextlib
import json
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

from benchmarks.case import Case
from benchmarks.comparison import PeerProcess
from benchmarks.history import processor
from benchmarks.input.augmented_peers import BATCH, PEERS
from benchmarks.server.photographs import photographs
from keras_vit.files.tables import markdown_table


def compare_augmented(rounds: int, batches: int, images: int, cores: int) -> None:
    """Write photographs, let the pipelines take turns, and print a table.

    Args:
        rounds: timed passes of each pipeline, after one to warm up.
        batches: of 64 images in each pass.
        images: number of different files.
        cores: for the threads or worker processes of each.
    """
    case = Case("inference", "ViT-S_16", BATCH, threads=cores)
    seconds: dict[str, list[float]] = {peer: [] for peer in PEERS}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder = pathlib.Path(directory)
        for number, content in enumerate(photographs(images)):
            path = folder / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        processes = [PeerProcess(peer, case, stack, "benchmarks.input.process") for peer in PEERS]
        request = json.dumps({"folder": directory, "batches": batches})
        for number in range(rounds + 1):
            for process in processes:
                answer = process.ask(request)
                if answer and number:
                    seconds[process.peer].append(answer["seconds"])
        failures = {process.peer: process.end().failure for process in processes}
    print(f"{processor()}, {cores} cores, {rounds} rounds of {batches} batches of {BATCH} images\n")
    print(table(seconds, failures, batches * BATCH))


def table(seconds: dict[str, list[float]], failures: dict[str, str | None], images: int) -> str:
    """Markdown: the images per second of each pipeline, and how many times as many ours gives, round by round.

    Args:
        seconds: of each round, by pipeline; the first is ours.
        failures: last line of the error, by pipeline.
        images: in each round.
    """
    own = next(iter(seconds.values()))
    rows = []
    for peer, found in seconds.items():
        if failures[peer] is not None or not found:
            rows.append((peer, f"failed: {failures[peer]}", "", ""))
            continue
        rates: Sequence[float] = sorted(images / each for each in found)
        ratios = [theirs / ours for ours, theirs in zip(own, found, strict=True)] if len(own) == len(found) else []
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        rows.append((peer, f"{statistics.median(rates):.0f}", f"{rates[0]:.0f} to {rates[-1]:.0f}", shown))
    header = ("pipeline", "images/s, median", "least to most", "keras_vit is faster by")
    return markdown_table(header, rows, num_text_columns=1)

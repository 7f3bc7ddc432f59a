"""Compares this project with timm and transformers under torch.compile, on one GPU in bfloat16.

    python -m benchmarks.gpu --quick
    python -m benchmarks.gpu --models ViT-L_16 --sizes 384 --output gpu-results

Training is the compiled step of `keras-vit pretrain`. Each peer runs alone on the GPU, in its own process: inference
with one image, a few, and the largest batch that fits into memory, training with the largest; it is found by halving.
The product of two large matrices comes first, as the limit of the GPU, and the input pipeline last, on all cores. The
command writes results.json and results.md. It needs JAX and torch, each with its GPU build, timm and transformers, and
TensorFlow, which is measured, too, unless it is `tensorflow-cpu`. On a machine without a GPU it runs one image of a
small model on the CPU, as a trial.
"""

import dataclasses
import functools
import importlib.metadata
import math
import os
import pathlib
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Literal, get_args

from benchmarks.case import Case, Task
from benchmarks.comparison import LIMIT, Result, compare, flops, rate, write_results
from keras_vit import MODELS, ViTConfig, cli
from keras_vit.cli import parser
from keras_vit.cli.options import Count
from keras_vit.files.remote import output_folder

_REFERENCE, _TIMM, _TRANSFORMERS = "keras_vit_jax", "timm_compiled", "transformers_compiled"
_SMALL_BATCHES = (1, 8, 64)
# Operations of the first batch that is tried, of its forward pass: 1,024 images of ViT-B_16 at 224 pixels, and 512.
_FIRST_BATCH = {"inference": 3.7e13, "training": 1.85e13}
_Model = Literal["ViT-S_16", "ViT-B_16", "ViT-L_16", "ViT-H_14", "BiT-R50x1", "R50+ViT-B_16"]
_QUICK: tuple[_Model, ...] = ("ViT-B_16", "ViT-L_16")
_SMALLEST_BATCH = 8
# Messages of JAX, XLA and torch.
_FULL_MEMORY = re.compile("memory|RESOURCE_EXHAUSTED|allocat", re.IGNORECASE)
_INPUTS = ("keras_vit_folder", "keras_vit_tfrecord")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compare images per second on one GPU in bfloat16."""

    models: tuple[_Model, ...] = get_args(_Model)
    """Models to measure."""
    sizes: tuple[Count, ...] = (224, 384)
    """Heights and widths in pixels."""
    tasks: tuple[Task, ...] = get_args(Task)
    """Tasks to measure."""
    rounds: Count = 20
    """Timed calls of each peer."""
    quick: bool = False
    """Measure ViT-B_16 and ViT-L_16 at 224 pixels beside timm, in ten minutes."""
    output: pathlib.Path = pathlib.Path("gpu-results")
    """Directory for results.json and results.md."""


def largest(case: Case, peer: str, rounds: int) -> tuple[Case, Result]:
    """Halve the batch of the case until it fits into memory. Returns the last failure if no batch fits."""
    while True:
        case, result = fixed(case, peer, rounds)
        is_full = result.failure is not None and _FULL_MEMORY.search(result.failure)
        if not is_full or case.batch // 2 < _SMALLEST_BATCH:
            return case, result
        case = dataclasses.replace(case, batch=case.batch // 2)


def fixed(case: Case, peer: str, rounds: int) -> tuple[Case, Result]:
    """Measure a case as it is."""
    return case, compare(case, [peer], rounds)[0]


def rows(results: Sequence[tuple[Case, Result]], limit: float) -> list[str]:
    """Markdown: one row per peer, compared with this project and with the matrix product."""
    own = next((case.batch / r.median for case, r in results if r.peer == _REFERENCE and r.failure is None), None)
    lines = []
    for case, result in results:
        head = f"| {case.model} | {case.size} | {case.task} | {result.peer} |"
        if result.failure is not None:
            lines.append(f"{head} | failed: {result.failure.replace('|', '/')} | | | | |")
            continue
        images = case.batch / result.median
        spread = f"{case.batch / max(result.seconds):,.0f} to {case.batch / min(result.seconds):,.0f}"
        relative = f"{own / images:.2f}x" if own is not None else ""
        speed = rate(result, case)
        share = f"{speed / limit:.0%}" if limit else ""
        peak = f"{result.peak_bytes / 1e9:.1f}"
        lines.append(
            f"{head} {case.batch} | {images:,.0f} ({spread}) | {relative} | {speed / 1e12:.3g} | {share} | {peak} |"
        )
    return lines


def cases(arguments: Arguments, gpu: str | None) -> list[tuple[Case, bool, tuple[str, ...]]]:
    """Return the cases, whether the batch of each is halved until it fits, and the peers.

    Without a GPU, they are those of the trial.
    """
    if gpu is None:
        one = Case("inference", "ViT-Ti_16", 1, precision="bfloat16")
        return [(dataclasses.replace(one, task=task), False, _peers(one.model)) for task in arguments.tasks]
    models, sizes, small = arguments.models, arguments.sizes, _SMALL_BATCHES
    if arguments.quick:
        models, sizes, small = _QUICK, (224,), (1,)
    chosen = []
    for model in models:
        for size in dict.fromkeys(_size(model, each) for each in sizes):
            for task in arguments.tasks:
                for batch, is_largest in _batches(model, size, task, small):
                    case = Case(task, model, batch, size, "bfloat16", device="gpu")
                    peers = [peer for peer in _peers(model) if not (arguments.quick and peer == _TRANSFORMERS)]
                    chosen.append((case, is_largest, tuple(peers)))
    return chosen


def _peers(model: str) -> tuple[str, ...]:
    config = MODELS[model]
    is_plain_vit = isinstance(config, ViTConfig) and config.stem is None
    return _REFERENCE, _TIMM, *_on_tensorflow(), *((_TRANSFORMERS,) if is_plain_vit else ())


def _on_tensorflow() -> list[str]:
    """Return the peer on TensorFlow if the installed package may have CUDA."""
    return ["keras_vit"] if next(importlib.metadata.Distribution.discover(name="tensorflow"), None) else []


def _size(model: str, size: int) -> int:
    """Return the nearest smaller size that whole patches fill, such as 378 for patches of 14 and 384."""
    config = MODELS[model]
    return size - size % config.patch[0] if isinstance(config, ViTConfig) else size


def _batches(model: str, size: int, task: Task, small: Sequence[int]) -> list[tuple[int, bool]]:
    """Return the batches of a case, and whether each is halved until it fits."""
    first = max(_FIRST_BATCH[task] / flops(Case("inference", model, 1, size)), _SMALLEST_BATCH)
    return [*((batch, False) for batch in small if task == "inference"), (2 ** int(math.log2(first)), True)]


def main(arguments: Sequence[str]) -> None:
    """`--quick | --models … --output DIR`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.gpu", about=__doc__)
    output = output_folder(parsed.output)
    gpu = _gpu()
    if gpu is None:
        print("No GPU found, so ViT-Ti_16 runs with one image on the CPU; this only shows that the command works.")
    head, measured = f"{gpu or 'CPU'}, bfloat16, {time.strftime('%Y-%m-%d')}, {parsed.rounds} rounds", []
    chosen = cases(parsed, gpu)
    (product,) = compare(chosen[0][0], [LIMIT], parsed.rounds)
    limit = 0.0 if product.failure else rate(product, chosen[0][0])
    lines = [
        f"# Speed on {'the CPU' if gpu is None else 'a GPU'}\n\n{head}\n",
        f"The product of two large matrices: {limit / 1e12:.3g} TFLOP/s.\n",
        "| model | px | task | | batch | images/s, median (least to most) | relative time | TFLOP/s | of limit | GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for case, is_largest, peers in chosen:
        measure = functools.partial(largest if is_largest else fixed, case, rounds=parsed.rounds)
        results = [measure(peer) for peer in peers]
        shown = rows(results, limit)
        print("\n".join(shown), flush=True)
        lines += shown
        measured += [dataclasses.asdict(one) | {"result": dataclasses.asdict(result)} for one, result in results]
        write_results(output, {"machine": head, "cases": measured}, lines)  # after every case, for interrupted runs
    from benchmarks.input.__main__ import compare as compare_inputs  # a command of its own, which Python runs once

    cores = len(os.sched_getaffinity(0))
    lines += ["", f"The input pipeline, on {cores} cores:", "", compare_inputs(_INPUTS, 3, 32, 512, cores)]
    print("\n".join(lines[-4:]), flush=True)
    write_results(output, {"machine": head, "cases": measured}, lines)


def _gpu() -> str | None:
    """Name of the GPU, or None."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


if __name__ == "__main__":
    cli.run(main)

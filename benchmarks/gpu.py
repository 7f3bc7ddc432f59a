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
import importlib.metadata
import math
import os
import pathlib
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Literal, get_args

import benchmarks.input
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
_FULL_MEMORY = re.compile("memory|RESOURCE_EXHAUSTED|allocat", re.IGNORECASE)  # messages of JAX, XLA and torch
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


def measured(case: Case, peer: str, rounds: int, *, is_largest: bool) -> tuple[Case, Result]:
    """Measure a case; if its batch is to be the largest, halve it until it fits, or return the last failure."""
    while True:
        (result,) = compare(case, [peer], rounds)
        is_full = result.failure is not None and _FULL_MEMORY.search(result.failure)
        if not (is_largest and is_full) or case.batch // 2 < _SMALLEST_BATCH:
            return case, result
        case = dataclasses.replace(case, batch=case.batch // 2)


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
        relative, speed = f"{own / images:.2f}x" if own is not None else "", rate(result, case)
        share = f"{speed / limit:.0%}" if limit else ""
        shown = f"{case.batch} | {images:,.0f} ({spread}) | {relative} | {speed / 1e12:.3g} | {share}"
        lines.append(f"{head} {shown} | {result.peak_bytes / 1e9:.1f} |")
    return lines


def cases(arguments: Arguments, gpu: str | None) -> list[tuple[Case, bool, tuple[str, ...]]]:
    """Return the cases, or without a GPU the trial's, whether each is of the largest batch, and the peers."""
    if gpu is None:
        one = Case("inference", "ViT-Ti_16", 1, precision="bfloat16")
        return [(dataclasses.replace(one, task=task), False, _peers(one.model)) for task in arguments.tasks]
    models, sizes, small = arguments.models, arguments.sizes, _SMALL_BATCHES
    if arguments.quick:
        models, sizes, small = _QUICK, (224,), (1,)
    return [
        (Case(task, model, batch, size, "bfloat16", device="gpu"), is_largest, _peers(model, arguments.quick))
        for model in models
        for size in dict.fromkeys(_size(model, each) for each in sizes)
        for task in arguments.tasks
        for batch, is_largest in _batches(model, size, task, small)
    ]


def _peers(model: str, quick: bool = False) -> tuple[str, ...]:
    config = MODELS[model]
    transformers = (_TRANSFORMERS,) if isinstance(config, ViTConfig) and config.stem is None and not quick else ()
    has_cuda = next(importlib.metadata.Distribution.discover(name="tensorflow"), None)  # tensorflow-cpu has none
    return _REFERENCE, _TIMM, *(("keras_vit",) if has_cuda else ()), *transformers


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
    head, found = f"{gpu or 'CPU'}, bfloat16, {time.strftime('%Y-%m-%d')}, {parsed.rounds} rounds", []
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
        results = [measured(case, peer, parsed.rounds, is_largest=is_largest) for peer in peers]
        shown = rows(results, limit)
        print("\n".join(shown), flush=True)
        lines += shown
        found += [dataclasses.asdict(one) | {"result": dataclasses.asdict(result)} for one, result in results]
        write_results(output, {"machine": head, "cases": found}, lines)  # after every case, for interrupted runs
    cores = len(os.sched_getaffinity(0))
    lines += ["", f"The input pipeline, on {cores} cores:", "", benchmarks.input.compare(_INPUTS, 3, 32, 512, cores)]
    print("\n".join(lines[-4:]), flush=True)
    write_results(output, {"machine": head, "cases": found}, lines)


def _gpu() -> str | None:
    """Name of the GPU, or None."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


if __name__ == "__main__":
    cli.run(main)

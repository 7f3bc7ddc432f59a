"""Compares this project on the JAX backend with timm and transformers under torch.compile, on one GPU in bfloat16.

    KERAS_BACKEND=jax python -m benchmarks.gpu --output gpu-results

Each peer runs alone on the GPU, in its own process, with the largest batch that fits into memory, found by halving. The
product of two large matrices runs before each case. The command writes results.json and results.md. It needs JAX and
torch, each with its GPU build, timm and transformers, but no TensorFlow. On a machine without a GPU it runs one image
of a small model on the CPU, as a trial; the matrix product then takes TensorFlow.
"""

import dataclasses
import pathlib
import subprocess
import time
from collections.abc import Sequence
from typing import Literal, get_args

from benchmarks.case import Case, Task
from benchmarks.comparison import LIMIT, Result, compare, rate, write_results
from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.cli.options import Count
from keras_vit.files.remote import output_folder

_REFERENCE = "keras_vit_jax"
_PEERS = (_REFERENCE, "timm_compiled", "transformers_compiled")
# First batch of ViT-S_16 at 224 pixels. Larger models and sizes start with a smaller batch of about as many tokens x D.
_FIRST_BATCH = {"inference": 2048, "training": 1024}
_Model = Literal["ViT-S_16", "ViT-B_16", "ViT-L_16"]
_RELATIVE_SIZE: dict[_Model, int] = {"ViT-S_16": 1, "ViT-B_16": 2, "ViT-L_16": 4}
_SMALLEST_BATCH = 8


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
    output: pathlib.Path = pathlib.Path("gpu-results")
    """Directory for results.json and results.md."""


def largest(case: Case, peer: str, rounds: int) -> tuple[Case, Result]:
    """Halve the batch of the case until it does not fail. Returns the last failure if no batch fits."""
    while True:
        (result,) = compare(case, [peer], rounds)
        if result.failure is None or case.batch // 2 < _SMALLEST_BATCH:
            return case, result
        case = dataclasses.replace(case, batch=case.batch // 2)


def rows(found: Sequence[tuple[Case, Result]], limit: float) -> list[str]:
    """Markdown: one row per peer, compared with this project and with the matrix product."""
    own = next((case.batch / r.median for case, r in found if r.peer == _REFERENCE and r.failure is None), None)
    lines = []
    for case, result in found:
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


def cases(arguments: Arguments, gpu: str | None) -> list[Case]:
    """The cases with their first batches; without a GPU those of the trial."""
    if gpu is None:
        return [Case(task, "ViT-Ti_16", 1, 224, "bfloat16") for task in arguments.tasks]
    found = []
    for model in arguments.models:
        for size in arguments.sizes:
            relative = _RELATIVE_SIZE[model] * (4 if size > 224 else 1)
            for task in arguments.tasks:
                batch = max(_FIRST_BATCH[task] // relative, _SMALLEST_BATCH)
                found.append(Case(task, model, batch, size, "bfloat16", device="gpu"))
    return found


def main(arguments: Sequence[str]) -> None:
    """`--models … --output DIR`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.gpu", about=__doc__)
    output = output_folder(parsed.output)
    gpu = _gpu()
    if gpu is None:
        print("No GPU found, so ViT-Ti_16 runs with one image on the CPU; this only shows that the command works.")
    head = f"{gpu or 'CPU'}, bfloat16, {time.strftime('%Y-%m-%d')}, {parsed.rounds} rounds"
    lines = [
        f"# Speed on {'the CPU' if gpu is None else 'a GPU'}\n\n{head}\n",
        "| model | px | task | | batch | images/s, median (least to most) | relative time | TFLOP/s | of limit | GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    measured = []
    for case in cases(parsed, gpu):
        (limit,) = compare(case, [LIMIT], parsed.rounds)
        found = [largest(case, peer, parsed.rounds) for peer in _PEERS]
        shown = rows(found, 0.0 if limit.failure else rate(limit, case))
        print("\n".join(shown), flush=True)
        lines += shown
        pairs = [*found, (case, limit)]
        measured += [dataclasses.asdict(one) | {"result": dataclasses.asdict(result)} for one, result in pairs]
        write_results(output, {"machine": head, "cases": measured}, lines)  # after every case, for interrupted runs


def _gpu() -> str | None:
    """Name of the GPU, or None."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


if __name__ == "__main__":
    cli.run(main)

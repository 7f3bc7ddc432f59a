"""Compiles training and evaluation for the chips of a Cloud TPU, on a machine without one, and prints what they take.

    python -m benchmarks.tpu --recipes augreg-ti16-i21k vit-b16-i21k --output tpu-results

The compiler is that of the package libtpu (`benchmarks/requirements-tpu.txt`), so what compiles here compiles on the
chip, and the memory is the chip's. Time is not measured. Every compilation runs in its own process, which takes minutes
and several gigabytes. Results are appended to results.json; the same command continues after an interruption. It needs
TensorFlow and JAX.
"""

import dataclasses
import importlib.util
import itertools
import json
import math
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

from keras_vit import UserError, cli
from keras_vit.cli import parser
from keras_vit.cli.options import Count
from keras_vit.files.atomic import write_text
from keras_vit.files.remote import output_folder
from keras_vit.files.tables import markdown_table
from training.recipes.pretrain import find_recipe

Chip = Literal["v5e", "v6e"]
Step = Literal["training", "remat", "evaluation", "jax"]

MEMORY: dict[Chip, int] = {"v5e": 16 * 2**30, "v6e": 32 * 2**30}
_MINUTES = 30  # for a compilation
_COLUMNS = "recipe, step, chip, images, compiles, GB, largest batch, TFLOP, MB from the host, seconds"


@dataclasses.dataclass(frozen=True)
class TPUCase:
    """One program and the chip to compile it for."""

    recipe: str
    step: Step
    chip: Chip
    batch: int
    """Images per chip."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compile the steps of recipes for the chips of a Cloud TPU, without one."""

    recipes: tuple[str, ...] = (
        "augreg-ti16-i21k", "augreg-s16-i21k", "vit-b16-i21k", "vit-l16-i21k", "vit-h14-jft", "bit-m-r50x1",
        "r50-vit-b16-jft", "masked-patch",
    )  # fmt: skip
    """Recipes of training.pretrain, with their model, loss and optimizer; 1,000 classes."""
    steps: tuple[Step, ...] = ("training",)
    """training: the step of training.pretrain on TensorFlow; remat: with --remat; evaluation; jax: the training step on
    JAX."""
    chips: tuple[Chip, ...] = ("v5e",)
    """v5e has 16 GiB of memory, v6e 32."""
    batches: tuple[Count, ...] = (16, 32)
    """Images per chip. From two of them the largest batch is extrapolated."""
    output: pathlib.Path = pathlib.Path("tpu-results")
    """Directory for results.json and results.md."""

    def __post_init__(self) -> None:
        for recipe in self.recipes:
            find_recipe(recipe)


def memory(result: dict[str, Any]) -> int:
    """Bytes on the chip while the program runs. Updated variables take the place of the old ones."""
    return result["arguments"] + result["temporaries"] + result["code"]


def largest_batch(results: Sequence[dict[str, Any]], limit: int) -> int | None:
    """Images per chip whose memory, taken as linear in the batch, is within the limit; None for fewer than two."""
    points = sorted((result["batch"], memory(result)) for result in results if result["failure"] is None)
    if len(points) < 2:
        return None
    (fewer, low), (more, high) = points[0], points[-1]
    slope = (high - low) / (more - fewer)
    return max(math.floor(fewer + (limit - low) / slope), 0) if slope > 0 else None


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with one row per result."""
    rows = []
    for result in results:
        case = ("recipe", "step", "chip")
        head = [*(result[key] for key in case), str(result["batch"])]
        if result["failure"] is not None:
            figures = [f"no: {result['failure'].replace('|', '/')}", "", "", "", ""]
        else:
            alike = [other for other in results if all(other[key] == result[key] for key in case)]
            largest = largest_batch(alike, MEMORY[result["chip"]])
            size, operations = f"{memory(result) / 1e9:.3g}", f"{result['flops'] / 1e12:.3g}"
            figures = ["yes", size, str(largest or ""), operations, f"{result['host_bytes'] / 1e6:.1f}"]
        rows.append([*head, *figures, f"{result['seconds']:.0f}"])
    return markdown_table(_COLUMNS.split(", "), rows, num_text_columns=5)


def compile_case(case: TPUCase) -> dict[str, Any]:
    """Compile in another process. Returns the case, its measurements, the seconds, and the failure or None."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.tpu_compile", json.dumps(dataclasses.asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * _MINUTES)
    except subprocess.TimeoutExpired:
        result: dict[str, Any] = {"failure": f"not within {_MINUTES} minutes"}
    else:
        result = {"failure": None, **json.loads(done.stdout)} if done.returncode == 0 else {"failure": _reason(done)}
    return {**dataclasses.asdict(case), **result, "seconds": time.perf_counter() - start}


def _reason(done: subprocess.CompletedProcess) -> str:
    """The error's line in the output, or the exit code of a process that was killed."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "RESOURCE_EXHAUSTED" in line]
    return (errors or [f"exit code {done.returncode}"])[-1][:200]


def main(arguments: Sequence[str]) -> None:
    """`--recipes … --steps … --chips … --batches … --output DIR`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.tpu", about=__doc__)
    output = output_folder(parsed.output)
    if missing := [name for name in ("tensorflow", "jax", "libtpu") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{missing[0]} is not installed; run pip install -r benchmarks/requirements-tpu.txt.")
    earlier = output / "results.json"  # of an interrupted run
    results = json.loads(earlier.read_text(encoding="utf-8")) if earlier.exists() else []
    for recipe, chip, step, batch in itertools.product(
        parsed.recipes, parsed.chips, parsed.steps, sorted(parsed.batches)
    ):
        case = TPUCase(recipe, step, chip, batch)
        if any(dataclasses.asdict(case).items() <= result.items() for result in results):
            continue
        result = compile_case(case)
        print(", ".join(map(str, dataclasses.astuple(case))), result["failure"] or "compiles", sep=": ", flush=True)
        results.append(result)
        output.mkdir(parents=True, exist_ok=True)
        # After every case, for interrupted runs.
        write_text(output / "results.json", json.dumps(results, indent=1) + "\n")
        write_text(output / "results.md", table(results) + "\n")
    print(table(results))


if __name__ == "__main__":
    cli.run(main)

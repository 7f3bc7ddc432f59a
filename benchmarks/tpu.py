"""Compiles training and evaluation for the chips of a Cloud TPU, on a machine without one, and prints what they take.

    python -m benchmarks.tpu --recipes augreg-ti16-i21k vit-b16-i21k --output tpu-results

    python -m benchmarks.tpu --topology v5e:4x4 --recipes vit-g14 vit-G14 --output slices

compiles the step of `--shard-weights` on JAX, with rematerialization, for all chips of a slice.

The compiler is that of the package libtpu (`benchmarks/requirements-tpu.txt`), so what compiles here compiles on the
chip, and the memory is the chip's. Time is not measured. Every compilation runs in its own process, which takes minutes
and several gigabytes. Results are appended to results.json; the same command continues after an interruption. It needs
TensorFlow and JAX.
"""

import dataclasses
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

from benchmarks.tpu_slices import HEADER, SliceCase, slice_rows
from keras_vit import UserError, cli, run_directory
from keras_vit.cli import parser
from keras_vit.files.atomic import write_text
from keras_vit.files.tables import markdown_table
from training.recipes.pretrain import find_recipe

Chip = Literal["v5e", "v6e"]
Step = Literal["training", "remat", "evaluation", "jax"]

MEMORY: dict[Chip, int] = {"v5e": 16 * 2**30, "v6e": 32 * 2**30}
_HEADER = (
    "recipe",
    "step",
    "chip",
    "images",
    "compiles",
    "GB",
    "largest batch",
    "TFLOP",
    "MB from the host",
    "seconds",
)


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
        "augreg-ti16-i21k",
        "augreg-s16-i21k",
        "vit-b16-i21k",
        "vit-l16-i21k",
        "vit-h14-jft",
        "bit-m-r50x1",
        "r50-vit-b16-jft",
        "masked-patch",
    )
    """Recipes of training.pretrain, with their model, loss and optimizer; 1,000 classes."""
    steps: tuple[Step, ...] = ("training",)
    """training: the step of training.pretrain on TensorFlow; remat: with --remat; evaluation; jax: the training step on
    JAX."""
    chips: tuple[Chip, ...] = ("v5e",)
    """v5e has 16 GiB of memory, v6e 32."""
    topology: tuple[str, ...] = ()
    """Slices, such as v5e:4x4, v5e:16x16 or v6e:4x4, in place of steps and chips. The recipes may also be vit-g14,
    vit-G14 and vit-e14."""
    model_parallel: int = 1
    """With --topology, chips that share one model."""
    batches: tuple[int, ...] = (16, 32)
    """Images per chip. From two of them the largest batch is extrapolated."""
    minutes: float = 30.0
    """Time limit of a compilation."""
    output: pathlib.Path = pathlib.Path("tpu-results")
    """Directory for results.json and results.md."""

    def __post_init__(self) -> None:
        for recipe in self.recipes:
            for topology in self.topology:
                SliceCase(recipe, topology, 1)  # raises UserError for what there is not
            if not self.topology:
                find_recipe(recipe)
        if not self.batches or min(self.batches) < 1:
            raise UserError(f"--batches takes positive numbers, but is {' '.join(map(str, self.batches))}.")
        if not self.minutes > 0:
            raise UserError(f"--minutes must be positive, but is {self.minutes}.")

    def cases(self) -> list[TPUCase] | list[SliceCase]:
        """All cases, small batches first."""
        if self.topology:
            return [
                SliceCase(recipe, topology, batch, self.model_parallel)
                for recipe in self.recipes
                for topology in self.topology
                for batch in sorted(self.batches)
            ]
        return [
            TPUCase(recipe, step, chip, batch)
            for recipe in self.recipes
            for chip in self.chips
            for step in self.steps
            for batch in sorted(self.batches)
        ]


def memory(result: dict[str, Any]) -> int:
    """Bytes on the chip while the program runs. Updated variables take the place of the old ones."""
    return result["arguments"] + result["temporaries"] + result["code"]


def largest_batch(results: Sequence[dict[str, Any]], limit: int) -> int | None:
    """Images per chip for which the memory, taken as linear in the batch, stays within the limit.

    Args:
        results: of one recipe, step and chip.
        limit: bytes.

    Returns None if fewer than two batches compiled.
    """
    points = sorted((result["batch"], memory(result)) for result in results if result["failure"] is None)
    if len(points) < 2:
        return None
    (fewer, low), (more, high) = points[0], points[-1]
    slope = (high - low) / (more - fewer)
    return max(math.floor(fewer + (limit - low) / slope), 0) if slope > 0 else None


def rows(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row per result: strings for the columns of the table."""
    table = []
    for result in results:
        head = [result["recipe"], result["step"], result["chip"], str(result["batch"])]
        if result["failure"] is not None:
            table.append(
                [*head, f"no: {result['failure'].replace('|', '/')}", "", "", "", "", f"{result['seconds']:.0f}"]
            )
            continue
        alike = [other for other in results if all(other[key] == result[key] for key in ("recipe", "step", "chip"))]
        largest = largest_batch(alike, MEMORY[result["chip"]])
        table.append(
            [
                *head,
                "yes",
                f"{memory(result) / 1e9:.3g}",
                "" if largest is None else str(largest),
                f"{result['flops'] / 1e12:.3g}",
                f"{result['host_bytes'] / 1e6:.1f}",
                f"{result['seconds']:.0f}",
            ]
        )
    return table


def slice_table(results: Sequence[dict[str, Any]]) -> str:
    """The table of steps that were compiled for slices."""
    case = ("recipe", "topology", "model_parallel")
    alike = [[other for other in results if all(other[key] == result[key] for key in case)] for result in results]
    largest = [
        largest_batch(group, MEMORY[result["topology"][:3]]) for group, result in zip(alike, results, strict=True)
    ]
    return markdown_table(HEADER, slice_rows(results, largest), num_text_columns=4)


def compile_case(case: TPUCase | SliceCase, minutes: float) -> dict[str, Any]:
    """Compile in another process. Returns the case, its measurements, the seconds, and the failure or None."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.tpu_compile", json.dumps(dataclasses.asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * minutes)
    except subprocess.TimeoutExpired:
        found: dict[str, Any] = {"failure": f"not within {minutes:g} minutes"}
    else:
        found = {"failure": None, **json.loads(done.stdout)} if done.returncode == 0 else {"failure": _reason(done)}
    return {**dataclasses.asdict(case), **found, "seconds": time.perf_counter() - start}


def _reason(done: subprocess.CompletedProcess) -> str:
    """The error's line in the output, or the exit code of a process that was killed."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "RESOURCE_EXHAUSTED" in line]
    return (errors or [f"exit code {done.returncode}"])[-1][:200]


def main(arguments: Sequence[str]) -> None:
    """`--recipes … --steps … --chips … --batches … --output DIR`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.tpu", about=__doc__)
    output = run_directory.output_folder(parsed.output)
    if missing := [name for name in ("tensorflow", "jax", "libtpu") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{missing[0]} is not installed; run pip install -r benchmarks/requirements-tpu.txt.")
    results = _earlier(output / "results.json")
    table = slice_table if parsed.topology else _chip_table
    for case in parsed.cases():
        if any(dataclasses.asdict(case).items() <= result.items() for result in results):
            continue
        result = compile_case(case, parsed.minutes)
        print(", ".join(map(str, dataclasses.astuple(case))), result["failure"] or "compiles", sep=": ", flush=True)
        results.append(result)
        output.mkdir(parents=True, exist_ok=True)
        # After every case, for interrupted runs.
        write_text(output / "results.json", json.dumps(results, indent=1) + "\n")
        write_text(output / "results.md", table(results) + "\n")
    print(table(results))


def _chip_table(results: Sequence[dict[str, Any]]) -> str:
    return markdown_table(_HEADER, rows(results), num_text_columns=5)


def _earlier(path: pathlib.Path) -> list[dict[str, Any]]:
    """The results of an interrupted run."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(f"{path} is not a file of results; remove it, or give another --output.") from error


if __name__ == "__main__":
    cli.run(main)

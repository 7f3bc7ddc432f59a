"""Training with `--shard-weights`, compiled for all chips of a Cloud TPU slice: cases, what they send, the table."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from keras_vit import MODELS, UserError
from training.recipes.pretrain import RECIPES, find_recipe
from training.recipes.recipe import PretrainRecipe

# Of "Scaling Vision Transformers" (arXiv 2106.04560) table 2, and PaLI's ViT-e (2209.06794) in table 8: trained here as
# ViT-H/14 is, with AdamW.
_LARGE = {
    "vit-g14": MODELS["ViT-g_14"],
    "vit-G14": MODELS["ViT-G_14"],
    "vit-e14": dataclasses.replace(MODELS["ViT-G_14"], hidden_size=1792, mlp_dim=15360, num_layers=56, num_heads=16),
}


@dataclasses.dataclass(frozen=True)
class SliceCase:
    """A program and the slice to compile it for."""

    recipe: str
    topology: str
    """Kind of chip and their grid, such as v5e:4x4."""
    batch: int
    """Images per chip."""
    model_parallel: int = 1
    """Chips that share one model."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(v5e|v6e):[1-9]\d*x[1-9]\d*", self.topology):
            raise UserError(f"--topology takes v5e or v6e and a grid of chips, such as v5e:4x4, not {self.topology!r}.")
        slice_recipe(self.recipe)

    @property
    def chip(self) -> str:
        return self.topology.split(":")[0]

    @property
    def chips(self) -> int:
        rows, columns = map(int, self.topology.split(":")[1].split("x"))
        return rows * columns


def slice_recipe(name: str) -> PretrainRecipe:
    """Return the recipe of a name, also vit-g14, vit-G14 and vit-e14, which no named recipe trains."""
    if name not in _LARGE:
        return find_recipe(name, tuple(_LARGE))
    return dataclasses.replace(RECIPES["vit-h14-jft"], model=_LARGE[name])


# cloud.google.com/tpu/docs: operations per second in bfloat16, and bytes per second of all links of a chip.
_PEAK = {"v5e": 197e12, "v6e": 918e12}
_LINKS = {"v5e": 200e9, "v6e": 448e9}
HEADER = (
    "recipe",
    "slice",
    "images",
    "compiles",
    "GB",
    "largest batch",
    "TFLOP",
    "GB sent",
    "ms",
    "ms sending",
    "seconds",
)


def slice_rows(results: Sequence[dict[str, Any]], largest: Sequence[int | None]) -> list[list[str]]:
    """One row per result: strings for the columns of `HEADER`.

    Args:
        results: as compiled, with the operations and the traffic of a step on each chip.
        largest: the largest batch that fits, for each result.
    """
    table = []
    for result, most in zip(results, largest, strict=True):
        shared = f", {result['model_parallel']} share a model" if result["model_parallel"] > 1 else ""
        head = [result["recipe"], result["topology"] + shared, str(result["batch"])]
        if result["failure"] is not None:
            reason = f"no: {result['failure'].replace('|', '/')}"
            table.append([*head, reason, *[""] * 6, f"{result['seconds']:.0f}"])
            continue
        chip, sent = result["topology"].split(":")[0], sum(result["traffic"].values())
        size = result["arguments"] + result["temporaries"] + result["code"]
        table.append(
            [
                *head,
                "yes",
                f"{size / 1e9:.3g}",
                "" if most is None else str(most),
                f"{result['step_flops'] / 1e12:.3g}",
                f"{sent / 1e9:.3g}",
                f"{1e3 * result['step_flops'] / _PEAK[chip]:.0f}",
                f"{1e3 * sent / _LINKS[chip]:.0f}",
                f"{result['seconds']:.0f}",
            ]
        )
    return table


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


def traffic(program: str) -> dict[str, int]:
    """Bytes that a chip sends or receives in one run of a compiled program, by kind of collective.

    Each is computed as on a ring of n chips: of the result of an all-gather or the input of a reduce-scatter the share
    (n - 1) / n, of an all-reduce twice that. What is in a loop counts as often as the loop runs.

    Args:
        program: as text, in which loops have their known number of turns.
    """
    own: dict[str, dict[str, int]] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    entry = name = ""
    for line in program.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            entry = name if start[1] else entry
            own[name], calls[name] = {}, []
            continue
        if not name:
            continue
        if found := _COLLECTIVE.search(line):
            kind = found[1]
            own[name][kind] = own[name].get(kind, 0) + _sent(kind, line, bool(found[2]))
        trips = _TRIPS.search(line)
        calls[name] += [(called, int(trips[1]) if trips else 1) for called in _CALLED.findall(line)]
    totals: dict[str, int] = {}

    def add(name: str, times: int) -> None:
        for kind, size in own.get(name, {}).items():
            totals[kind] = totals.get(kind, 0) + times * size
        for called, trips in calls.get(name, ()):
            add(called, times * trips)

    add(entry, 1)
    return totals


def _sent(kind: str, line: str, is_start: bool) -> int:
    """Bytes of one collective."""
    result = line.split("=", 1)[1].split(f" {kind}", 1)[0]
    sizes = [_bytes(*array) for array in _ARRAY.findall(result)]
    # The result of an asynchronous one holds the operand, too.
    size = max(sizes) if is_start else sum(sizes)
    if kind == "collective-permute":
        return size
    group = _group_size(line)
    if kind == "reduce-scatter":
        size *= group
    return size * (group - 1) // group * (2 if kind == "all-reduce" else 1)


def _bytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8


def _group_size(line: str) -> int:
    """Chips that take part: replica_groups={{0,1},{2,3}}, or [groups, size]<=[...]."""
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(iota[2])
    groups = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(groups[1].split(",")) if groups else 1

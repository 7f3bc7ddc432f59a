"""Training with `--shard-weights`, compiled for all chips of a Cloud TPU slice: the cases and their table."""

import dataclasses
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

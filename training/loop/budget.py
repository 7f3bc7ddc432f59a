"""Estimate what a recipe takes on Cloud TPU: steps, operations, days and memory, before anything starts.

The operations are counted, and the memory is that of the compiled step where there is one. The days follow from the
chip's peak and the share of it that a run reaches. One is published: big_vision trains ViT-S/16 for 90 epochs of
ImageNet-1k in under 7 hours on a TPUv3-8 (arXiv 2205.01580), which is at least 26 % of its peak as counted here.
"""

import dataclasses
import re

from keras_vit import UserError
from keras_vit.models.complexity import costs
from training.data.checks import check_data
from training.loop.dry_run import Workload, estimate_memory
from training.loop.setup import open_setup
from training.options.common import Execution
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe
from training.recipes.recipe import PretrainRecipe

DATA_SETS = {"imagenet-1k": (1_281_167, 1000), "imagenet-21k": (14_197_122, 21_841), "jft-300m": (303_000_000, 18_291)}
"""Training images and classes of data sets that a budget knows by name. ImageNet-21k is that of fall 2011."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip, or a core of older ones, as the number in the name of a slice counts."""

    peak: float
    """Operations per second in bfloat16."""
    memory: int
    """Bytes."""


# cloud.google.com/tpu/docs; v3, v4 and v5p count cores, of which a chip has two.
CHIPS = {
    "v3": Chip(61.5e12, 16 * 2**30),
    "v4": Chip(137.5e12, 16 * 2**30),
    "v5e": Chip(197e12, 16 * 2**30),
    "v5p": Chip(229.5e12, 95 * 2**29),
    "v6e": Chip(918e12, 32 * 2**30),
}
# Two of (images on a chip, bytes) by recipe, chip, and training or remat: steps that were compiled in bfloat16 with
# 1,000 classes for one chip, from `python -m benchmarks.tpu`; benchmarks/logs/tpu.md has the complete table.
_COMPILED: dict[tuple[str, str, str], tuple[tuple[int, float], tuple[int, float]]] = {
    ("augreg-b16-i21k", "v5e", "training"): ((32, 3.49e9), (64, 5.71e9)),
    ("vit-b16-i21k", "v5e", "training"): ((32, 4.52e9), (64, 7.39e9)),
}
# Shares of the peak: of the published run, and of large models that are trained well.
_PUBLISHED, _GOOD = 0.26, 0.5


def slice_of(name: str) -> tuple[str, int]:
    """Return the type and number of the chips of a slice such as v5e-16. Raises UserError for other names."""
    match = re.fullmatch(rf"({'|'.join(CHIPS)})-([1-9]\d{{0,4}})", name)
    if match is None:
        raise UserError(f"--chips takes a slice such as v5e-16, of the kinds {', '.join(CHIPS)}, but is {name!r}.")
    return match[1], int(match[2])


@dataclasses.dataclass(frozen=True)
class Budget:
    """The work, time and memory of a run."""

    steps: int
    flops: float
    """Operations of all steps; with rematerialization the forward pass counts twice."""
    peak_seconds: float
    """At the peak of all chips."""
    images: int
    """Of a step on each chip."""
    memory: float
    """Bytes of a step on each chip, without micro-batches."""
    compiled: bool
    """Whether the memory is that of the compiled step; else it is an estimate."""

    def hours(self, share: float) -> float:
        """Return the hours at a share of the peak, without evaluation and waiting for data."""
        return self.peak_seconds / share / 3600


def budget(
    recipe: PretrainRecipe,
    name: str,
    chips: str,
    *,
    num_examples: int,
    num_classes: int,
    execution: Execution,
    shard_weights: bool = False,
) -> Budget:
    """Return the budget of a recipe with a target of classes.

    Args:
        name: of the recipe, for the table of compiled steps.
        chips: a slice, such as v5e-16.
        num_examples: training images.
        shard_weights: whether the chips divide weights and state.

    Raises UserError if there is no such slice, or if it cannot share a batch evenly.
    """
    chip, number = slice_of(chips)
    if recipe.batch_size % number:
        fits = max(recipe.batch_size // number, 1) * number
        shared = f"A batch of {recipe.batch_size} images cannot be shared evenly by {number} chips"
        raise UserError(f"{shared}; give --batch-size {fits}.")
    steps, images = recipe.num_steps(num_examples), recipe.batch_size // number
    cost = costs(recipe.model, recipe.image_size, num_classes=num_classes, channels=recipe.channels)
    flops = (4.0 if execution.remat else 3.0) * cost.flops * recipe.batch_size * steps
    table = _COMPILED.get((name, chip, "remat" if execution.remat else "training"))
    if table is not None and execution.precision == "bfloat16":
        (few, low), (many, high) = table  # linear between and beyond
        memory: float = low + (high - low) / (many - few) * (images - few)
    else:
        whole = dataclasses.replace(recipe, accumulation=1)
        parts = estimate_memory(Workload(recipe.model, whole, num_classes, recipe.channels, execution, number))
        state = sum(size for part, size in parts.items() if not part.startswith("activations"))
        memory = sum(parts.values()) - state + (state / number if shard_weights else state)
        table = None
    return Budget(steps, flops, flops / (number * CHIPS[chip].peak), images, memory, table is not None)


def print_budget(options: PretrainOptions, chips: str, name: str, named: PretrainRecipe) -> None:
    """Print what the recipe of the options takes on a slice. named: as it is without other options."""
    slice_of(chips)
    if name == "auto":
        raise UserError("--chips is for a named recipe, but auto depends on the data; give one such as vit-b16-i21k.")
    if options.source.data in DATA_SETS:
        examples, classes = DATA_SETS[options.source.data]
    else:
        check_data(options.source)
        source = open_setup(options).source
        examples, classes = source.train.num_examples, len(source.labels)
    recipe = options.recipe
    is_compiled = (recipe.model, recipe.image_size) == (named.model, named.image_size)
    planned = budget(
        recipe,
        name if is_compiled else "",
        chips,
        num_examples=examples,
        num_classes=classes,
        execution=options.execution,
        shard_weights=options.shard_weights,
    )
    print(describe_budget(planned, name, chips, recipe))


def describe_budget(planned: Budget, name: str, chips: str, recipe: PretrainRecipe) -> str:
    """Return the budget as text."""
    chip, number = slice_of(chips)
    limit, parts = CHIPS[chip].memory, 1
    while planned.memory / parts > limit and parts < planned.images:
        parts *= 2
    advice = "fits" if parts == 1 else f"does not fit: --accumulation {parts}, --remat or more chips"
    days = " to ".join(f"{planned.hours(share) / 24:.2g}" for share in (_GOOD, _PUBLISHED))
    known, published = "compiled" if planned.compiled else "estimated", _published_run()
    good, reached = (f"{published.hours(share):.2g} at {share:.0%}" for share in (_GOOD, _PUBLISHED))
    rows = {
        "steps": f"{planned.steps:,} of {recipe.batch_size:,} images, {planned.images:,} on each of {number}",
        "operations": f"{planned.flops:.3g}, counting the gradient as twice the forward pass",
        "at the peak": f"{planned.peak_seconds / 3600:.3g} hours of {number * CHIPS[chip].peak / 1e12:,.0f} TFLOP/s",
        "days, about": f"{days}, at {_GOOD:.0%} and {_PUBLISHED:.0%} of the peak",
        "memory of a step": f"{planned.memory / 1e9:.3g} GB of {limit / 1e9:.3g} on each ({known}): {advice}",
        "beside it": f"ViT-S/16, 90 epochs of ImageNet-1k on v3-8: published under 7 hours, {good} and {reached} of "
        "the peak",
    }
    width = max(map(len, rows)) + 2
    return "\n".join(
        [f"{name} on {chips}", *(f"  {row:{width}}{text}" for row, text in rows.items()), "", "Nothing was trained."]
    )


def _published_run() -> Budget:
    name, (examples, classes) = "vit-s16-i1k-better-plain", DATA_SETS["imagenet-1k"]
    execution = Execution(precision="bfloat16")
    return budget(find_recipe(name), name, "v3-8", num_examples=examples, num_classes=classes, execution=execution)

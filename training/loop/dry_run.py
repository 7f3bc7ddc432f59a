"""Report what a run takes, before it starts: the dry run, and the budget on Cloud TPU.

Operations are counted. The days of a budget follow from the chip's peak and the share of it that a run reaches. One is
published: big_vision trains ViT-S/16 for 90 epochs of ImageNet-1k in under 7 hours on a TPUv3-8 (arXiv 2205.01580),
which is at least 26% of its peak as counted here.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

import keras
import matplotlib.figure
import numpy as np

from keras_vit import UserError, ViTConfig, cli, config_of, preprocessing_of
from keras_vit.errors import refuse_without_effect
from keras_vit.files.atomic import atomic_write
from keras_vit.models.complexity import costs
from keras_vit.models.config import ModelConfig
from keras_vit.run import Run
from training.data.checks import check_data
from training.data.sources import DataSet
from training.loop.build import network_to_train, objective_of
from training.loop.optimizers import LearningRate
from training.loop.plan import Plan, check_shares, open_setup
from training.options.common import Execution
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe
from training.recipes.recipe import PretrainRecipe, Recipe

# Variables of the optimizer for each weight. Those few that Muon leaves to Adam have two.
_SLOTS = {"adamw": 2, "sgd": 1, "muon": 1}
_ROWS, _COLUMNS = 8, 60

DATA_SETS = {"imagenet-1k": (1_281_167, 1000), "imagenet-21k": (14_197_122, 21_841), "jft-300m": (303_000_000, 18_291)}
"""Training images and classes of data sets that a budget knows by name. ImageNet-21k is that of fall 2011."""
# Of a chip, or of a core of older ones, as the number in the name of a slice counts: operations per second in bfloat16,
# and bytes. From cloud.google.com/tpu/docs; v3, v4 and v5p count cores, of which a chip has two.
CHIPS = {
    "v3": (61.5e12, 16 * 2**30),
    "v4": (137.5e12, 16 * 2**30),
    "v5e": (197e12, 16 * 2**30),
    "v5p": (229.5e12, 95 * 2**29),
    "v6e": (918e12, 32 * 2**30),
}
# Two of (images on a chip, bytes) by recipe and chip: training steps that were compiled in bfloat16 with 1,000 classes
# for one chip, from `python -m benchmarks.tpu`; benchmarks/logs/tpu.md has the complete table.
_COMPILED: dict[tuple[str, str], tuple[tuple[int, float], tuple[int, float]]] = {
    ("augreg-b16-i21k", "v5e"): ((32, 3.49e9), (64, 5.71e9)),
    ("vit-b16-i21k", "v5e"): ((32, 4.52e9), (64, 7.39e9)),
}
# Shares of the peak: of the published run, and of large models that are trained well.
_PUBLISHED, _GOOD = 0.26, 0.5


@dataclasses.dataclass(frozen=True)
class Workload:
    """A recipe on a model, and how it is computed."""

    config: ModelConfig  # of the model, which a fine-tuning recipe does not contain
    recipe: Recipe
    num_classes: int  # of the head; 0 for training without labels
    channels: int  # of the model's input
    execution: Execution = dataclasses.field(default_factory=Execution)
    replicas: int = 1  # that share a batch
    parameters: int | None = None  # with those of adapters; default those of the config
    trained: int | None = None  # parameters that have a gradient; default all


def dry_run_report(plan: Plan, run: Run, make_model: Callable[[int], keras.Model]) -> None:
    """Print the dry run's report and plot the learning rate next to the run directory, which is not created.

    Raises UserError for whatever `run_training` refuses. See there for the arguments.
    """
    recipe, data = plan.recipe, plan.data
    run.check(plan.settings, data.labels, images=plan.images)
    network = network_to_train(
        lambda: make_model(len(data.labels)), recipe, plan.num_steps, strategy=plan.strategy, execution=plan.execution
    )
    classes, channels = len(data.labels) if recipe.uses_labels else 0, preprocessing_of(network).channels
    replicas = plan.strategy.num_replicas_in_sync
    workload = Workload(config_of(network), recipe, classes, channels, plan.execution, replicas)
    if recipe.lora or recipe.freeze:
        trained = sum(math.prod(variable.shape) for variable in network.trainable_variables)
        workload = dataclasses.replace(workload, parameters=network.count_params(), trained=trained)
    print(describe_run(workload, data))
    if cli.is_verbose():
        shown = dataclasses.asdict(dataclasses.replace(plan.options, recipe=recipe))
        del shown["dry_run"]
        settings = _flat({"recipe_name": plan.settings["recipe_name"], **shown})
        print("\n".join(["", "Settings", *(f"  {name}: {value}" for name, value in settings)]))
    run.path.parent.mkdir(parents=True, exist_ok=True)
    plot = run.path.with_name(f"{run.path.name}.lr.png")
    figure = matplotlib.figure.Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_learning_rates(recipe, plan.num_steps), color="tab:blue")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0.0, None))
    axes.grid(alpha=0.3)
    with atomic_write(plot) as temporary:
        figure.savefig(temporary, dpi=120)
    print(f"\nThe learning rate is plotted in {plot}; nothing was trained.")
    if not cli.is_verbose():
        print("To list all settings, add --verbose.")


def describe_run(workload: Workload, source: DataSet) -> str:
    """Return steps, operations, memory and learning rate as text."""
    recipe, replicas = workload.recipe, workload.replicas
    num_steps = recipe.num_steps(source.train.num_examples)
    images = num_steps * recipe.batch_size
    steps_per_epoch = max(source.train.num_examples // recipe.batch_size, 1)
    cost = costs(workload.config, recipe.image_size, num_classes=workload.num_classes, channels=workload.channels)
    parameters = workload.parameters or cost.parameters
    trained = parameters if workload.trained is None else workload.trained
    parts = estimate_memory(workload)
    passes = 2 if recipe.sharpness_radius else 1
    twice = ", and both twice for --sharpness-radius" if passes > 1 else ""
    flops = f"{_si(3 * passes * cost.flops * images)}FLOPs"
    rows = {
        "training images": f"{source.train.num_examples:,} of {len(source.labels)} classes",
        "evaluation images": f"{source.evaluation.num_examples:,}",
        "steps": f"{num_steps:,} of {recipe.batch_size:,} images, {images:,} in all",
        "epochs": f"{num_steps / steps_per_epoch:.4g} of {steps_per_epoch:,} complete batches",
        "parameters": f"{parameters:,}" + f", of which {trained:,} are trained" * (trained < parameters),
        "forward, an image": f"{_si(cost.multiply_adds + cost.normalization)} multiply-adds, {_si(cost.flops)}FLOPs",
        "training, total": f"{flops}, counting the gradient as twice the forward pass{twice}",
        "memory of a step, about" + f", on each of {replicas}" * (replicas > 1): f"{_si(sum(parts.values()))}B",
        **{f"  {name}": f"{_si(size)}B" for name, size in parts.items()},
    }
    not_counted = [*objective_of(recipe, num_steps).uncounted]
    if recipe.lora or recipe.freeze:
        not_counted.append("that frozen layers need no gradient, and none at all below the first trained layer")
    if not_counted:
        rows["not counted"] = f"\n{' ' * (max(map(len, rows)) + 4)}".join(not_counted)
    return "\n".join(["Run", *_table(rows), "", "Learning rate", *_curve(recipe, num_steps)])


def estimate_memory(workload: Workload) -> dict[str, int]:
    """Estimate the bytes of a step on each replica, by purpose.

    Fused operations need less, and the workspace of operations is not counted.
    """
    config, recipe = workload.config, workload.recipe
    head = {"num_classes": workload.num_classes, "channels": workload.channels}
    full = costs(config, recipe.image_size, **head)
    kept = full.activations
    if workload.execution.remat and isinstance(config, ViTConfig):  # every block's input, and all activations of one
        single = dataclasses.replace(config, num_layers=1)
        tokens = np.prod(config.grid(recipe.image_size)) + config.num_prefix_tokens
        kept = costs(single, recipe.image_size, **head).activations
        kept += (config.num_layers - 1) * int(tokens) * config.hidden_size
    images = recipe.batch_size // (recipe.accumulation * workload.replicas)
    gradients = 4 * (full.parameters if workload.trained is None else workload.trained)
    parts = {"weights": 4 * (workload.parameters or full.parameters)}
    parts["gradients"] = gradients * (1 + (recipe.accumulation > 1))
    parts["optimizer"] = gradients * _SLOTS[recipe.optimizer]
    if recipe.ema_decay is not None:
        parts["averaged weights"] = gradients
    if recipe.sharpness_radius:
        parts["weights uphill"] = gradients
    parts[f"activations of {images} images"] = images * kept * (4 if workload.execution.precision == "float32" else 2)
    return parts


def _learning_rates(recipe: Recipe, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a thousand steps, that of the peak among them, and their learning rates."""
    steps = np.linspace(0, num_steps - 1, 1000).round().astype(np.int64)
    steps = np.unique([*steps, min(recipe.schedule.warmup_steps, num_steps - 1)])
    rate = LearningRate(recipe.schedule, recipe.learning_rate, num_steps)
    return steps, keras.ops.convert_to_numpy(rate(steps))


def _curve(recipe: Recipe, num_steps: int) -> Iterator[str]:
    """Plot the learning rate in characters: in each column the highest of its steps."""
    steps, rates = _learning_rates(recipe, num_steps)
    heights, columns = np.zeros(_COLUMNS), min(_COLUMNS, num_steps)
    np.maximum.at(heights, steps * columns // num_steps, rates / max(rates.max(), np.finfo(np.float32).tiny) * _ROWS)
    for row in range(_ROWS, 0, -1):
        label = f"{rates.max():.3g}" if row == _ROWS else "0" if row == 1 else ""
        yield f"  {label:>8} |" + "".join("#" if height > row - 1 else " " for height in heights).rstrip()
    yield f"{'':11}+{'-' * columns}"
    yield f"{'':11} {'step 0':{max(columns - 9, 7)}}{num_steps - 1:>9,}"


def _flat(settings: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _table(rows: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, rows)) + 2
    for name, text in rows.items():
        yield f"  {name:{width}}{text}"


def _si(number: float) -> str:
    """Format with three digits and an SI prefix, E at most."""
    power = 0
    while number >= 999.5 and power < 6:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {' kMGTPE'[power].strip()}"


def slice_of(name: str) -> tuple[str, int]:
    """Return the type and number of the chips of a slice such as v5e-16. Raises UserError for other names."""
    match = re.fullmatch(rf"({'|'.join(CHIPS)})-([1-9]\d{{0,4}})", name)
    if match is None:
        raise UserError(f"--chips accepts a slice such as v5e-16, of the kinds {', '.join(CHIPS)}, but is {name!r}.")
    return match[1], int(match[2])


@dataclasses.dataclass(frozen=True)
class Budget:
    """The work, time and memory of a run."""

    steps: int
    flops: float  # operations of all steps; with rematerialization the forward pass counts twice
    peak_seconds: float  # at the peak of all chips
    images: int  # of a step on each chip
    memory: float  # bytes of a step on each chip, without micro-batches
    compiled: bool  # whether the memory is that of the compiled step; else it is an estimate

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
    """Return the budget of a recipe with a target of classes on a slice, such as v5e-16; `name` is the recipe's.

    shard_weights: whether the chips divide weights and state. Raises UserError if there is no such slice, or if it
    cannot share a batch evenly.
    """
    chip, number = slice_of(chips)
    whole = dataclasses.replace(recipe, accumulation=1)
    check_shares(whole, number)
    steps, images = recipe.num_steps(num_examples), recipe.batch_size // number
    cost = costs(recipe.model, recipe.image_size, num_classes=num_classes, channels=recipe.channels)
    flops = (4.0 if execution.remat else 3.0) * cost.flops * recipe.batch_size * steps
    is_compiled = (name, chip) in _COMPILED and execution.precision == "bfloat16" and not execution.remat
    if is_compiled:
        (few, low), (many, high) = _COMPILED[name, chip]  # linear between and beyond
        memory: float = low + (high - low) / (many - few) * (images - few)
    else:
        parts = estimate_memory(Workload(recipe.model, whole, num_classes, recipe.channels, execution, number))
        state = sum(size for part, size in parts.items() if not part.startswith("activations"))
        memory = sum(parts.values()) - state + (state / number if shard_weights else state)
    return Budget(steps, flops, flops / (number * CHIPS[chip][0]), images, memory, is_compiled)


def print_budget(options: PretrainOptions, chips: str, name: str, named: PretrainRecipe) -> None:
    """Print what the recipe of the options takes on a slice. named: as it is without other options."""
    refuse_without_effect(options, [(("chips",), name != "auto", "a named recipe such as vit-b16-i21k")])
    chip, number = slice_of(chips)
    if options.source.data in DATA_SETS:
        examples, classes = DATA_SETS[options.source.data]
    else:
        check_data(options.source)
        source = open_setup(options).source
        examples, classes = source.train.num_examples, len(source.labels)
    recipe = options.recipe
    planned = budget(
        recipe,
        name if (recipe.model, recipe.image_size) == (named.model, named.image_size) else "",
        chips,
        num_examples=examples,
        num_classes=classes,
        execution=options.execution,
        shard_weights=options.shard_weights,
    )
    (peak, limit), parts = CHIPS[chip], 1
    while planned.memory / parts > limit and parts < planned.images:
        parts *= 2
    advice = "fits" if parts == 1 else f"does not fit: --accumulation {parts}, --remat or more chips"
    known = "compiled" if planned.compiled else "estimated"
    days = " to ".join(f"{planned.hours(share) / 24:.2g}" for share in (_GOOD, _PUBLISHED))
    reference, (images, labels) = "vit-s16-i1k-better-plain", DATA_SETS["imagenet-1k"]
    execution = Execution(precision="bfloat16")
    published = budget(
        find_recipe(reference), reference, "v3-8", num_examples=images, num_classes=labels, execution=execution
    )
    good, reached = (f"{published.hours(share):.2g} at {share:.0%}" for share in (_GOOD, _PUBLISHED))
    rows = {
        "steps": f"{planned.steps:,} of {recipe.batch_size:,} images, {planned.images:,} on each of {number}",
        "operations": f"{planned.flops:.3g}, counting the gradient as twice the forward pass",
        "at the peak": f"{planned.peak_seconds / 3600:.3g} hours of {number * peak / 1e12:,.0f} TFLOP/s",
        "days, about": f"{days}, at {_GOOD:.0%} and {_PUBLISHED:.0%} of the peak",
        "memory of a step": f"{planned.memory / 1e9:.3g} GB of {limit / 1e9:.3g} on each ({known}): {advice}",
        "beside it": f"ViT-S/16, 90 epochs of ImageNet-1k on v3-8: published under 7 hours, {good} and {reached} of "
        "the peak",
    }
    print("\n".join([f"{name} on {chips}", *_table(rows), "", "Nothing was trained."]))

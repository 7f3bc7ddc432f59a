"""The dry run: a report of settings, steps, learning rate, operations and memory, without training."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator

import keras
import matplotlib.figure
import numpy as np

from keras_vit import ViTConfig, config_of, preprocessing_of
from keras_vit.files.atomic import atomic_write
from keras_vit.models.complexity import costs
from keras_vit.models.config import ModelConfig
from keras_vit.run import Run
from training.data.sources import DataSet
from training.loop.build import network_to_train
from training.loop.learning_rate import LearningRate
from training.loop.plan import Plan
from training.objectives.of_recipe import objective_of
from training.options.common import Execution
from training.recipes.recipe import Recipe

# Variables of the optimizer for each weight. Those few that Muon leaves to Adam have two.
_SLOTS = {"adamw": 2, "sgd": 1, "muon": 1}
_ROWS, _COLUMNS = 8, 60


@dataclasses.dataclass(frozen=True)
class Workload:
    """A recipe on a model, and how it is computed."""

    config: ModelConfig
    """Of the model, which a fine-tuning recipe does not contain."""
    recipe: Recipe
    num_classes: int
    """Of the head; 0 for training without labels."""
    channels: int
    """Of the model's input."""
    execution: Execution = dataclasses.field(default_factory=Execution)
    replicas: int = 1
    """Number of them that share a batch."""
    parameters: int | None = None
    """With those of adapters; default those of the config."""
    trained: int | None = None
    """Those of the parameters that have a gradient; default all."""


def dry_run_report(plan: Plan, run: Run, make_model: Callable[[int], keras.Model]) -> None:
    """Print the dry run's report and plot the learning rate next to the run directory, which is not created.

    Raises UserError for whatever `run_training` refuses. See there for the arguments.
    """
    recipe, data, options = plan.recipe, plan.data, plan.options
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
    shown = dataclasses.asdict(dataclasses.replace(options, recipe=recipe))
    shown.pop("dry_run")
    print(describe_run(workload, data, {"recipe_name": plan.settings["recipe_name"], **shown}))
    run.path.parent.mkdir(parents=True, exist_ok=True)
    plot = run.path.with_name(f"{run.path.name}.lr.png")
    with atomic_write(plot) as temporary:
        draw_learning_rate(recipe, data.train.num_examples, temporary)
    print(f"\nThe learning rate is plotted in {plot}; nothing was trained.")


def describe_run(workload: Workload, source: DataSet, settings: dict) -> str:
    """Return the report as text. settings: nested, as in config.json."""
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
    rows = [
        ("training images", f"{source.train.num_examples:,} of {len(source.labels)} classes"),
        ("evaluation images", f"{source.evaluation.num_examples:,}"),
        ("steps", f"{num_steps:,} of {recipe.batch_size:,} images, {images:,} in all"),
        ("epochs", f"{num_steps / steps_per_epoch:.4g} of {steps_per_epoch:,} complete batches"),
        ("parameters", f"{parameters:,}" + f", of which {trained:,} are trained" * (trained < parameters)),
        ("forward, an image", f"{_si(cost.multiply_adds + cost.normalization)} multiply-adds, {_si(cost.flops)}FLOPs"),
        (
            "training, total",
            f"{_si(3 * passes * cost.flops * images)}FLOPs, counting the gradient as twice the forward pass{twice}",
        ),
        ("memory of a step, about" + f", on each of {replicas}" * (replicas > 1), f"{_si(sum(parts.values()))}B"),
        *((f"  {name}", f"{_si(size)}B") for name, size in parts.items()),
    ]
    not_counted = [*objective_of(recipe, num_steps).uncounted]
    if recipe.lora or recipe.freeze:
        not_counted.append("that frozen layers need no gradient, and none at all below the first trained layer")
    rows += [("" if number else "not counted", text) for number, text in enumerate(not_counted)]
    width = max(len(name) for name, _ in rows) + 2
    lines = ["Settings", *(f"  {name}: {value}" for name, value in _flat(settings)), "", "Run"]
    lines += [f"  {name:{width}}{value}" for name, value in rows]
    return "\n".join([*lines, "", "Learning rate", *_curve(recipe, num_steps)])


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


def draw_learning_rate(recipe: Recipe, num_examples: int, path: pathlib.Path) -> None:
    """Plot the learning rate over the steps."""
    steps, rates = learning_rates(recipe, recipe.num_steps(num_examples), 1000)
    figure = matplotlib.figure.Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rates, color="tab:blue")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0.0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def learning_rates(recipe: Recipe, num_steps: int, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return evenly spaced steps and their learning rates."""
    steps = np.unique(np.linspace(0, num_steps - 1, points).round().astype(np.int64))
    rate = LearningRate(recipe.schedule, recipe.learning_rate, num_steps)
    return steps, keras.ops.convert_to_numpy(rate(steps))


def _curve(recipe: Recipe, num_steps: int) -> Iterator[str]:
    """Plot the learning rate in characters."""
    _, rates = learning_rates(recipe, num_steps, _COLUMNS)
    heights = rates / max(rates.max(), np.finfo(np.float32).tiny) * _ROWS
    for row in range(_ROWS, 0, -1):
        label = f"{rates.max():.3g}" if row == _ROWS else "0" if row == 1 else ""
        yield f"  {label:>8} |" + "".join("#" if height > row - 1 else " " for height in heights).rstrip()
    yield f"{'':11}+{'-' * len(rates)}"
    yield f"{'':11} {'step 0':{max(len(rates) - 9, 7)}}{num_steps - 1:>9,}"


def _flat(settings: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _si(number: float) -> str:
    """Format with three digits and an SI prefix, E at most."""
    power = 0
    while number >= 999.5 and power < 6:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {' kMGTPE'[power].strip()}"

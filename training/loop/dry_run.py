"""The dry run: a report of settings, steps, learning rate, operations and memory, without training."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator

import keras
import matplotlib.figure
import numpy as np

from keras_vit import ViTConfig
from keras_vit.models.complexity import costs
from keras_vit.models.config import ModelConfig
from training.input.sources import Source
from training.loop.objectives import Classification, MaskedPatches, Objective, make_objective
from training.loop.optimizers import LearningRate
from training.recipes.recipe import PretrainRecipe, Recipe

# Variables of the optimizer for each weight. Those few that Muon leaves to Adam have two.
_SLOTS = {"adamw": 2, "sgd": 1, "muon": 1}
_ROWS, _COLUMNS = 8, 60


def describe_run(
    config: ModelConfig,
    recipe: Recipe,
    source: Source,
    settings: dict,
    *,
    channels: int,
    precision: str = "float32",
    replicas: int = 1,
    remat: bool = False,
    network: keras.Model | None = None,
) -> str:
    """Return the report as text.

    Args:
        config: of the model, which a fine-tuning recipe does not contain.
        settings: nested settings, as in config.json.
        channels: of the model's input.
        precision: float32, or the 16-bit type of mixed precision.
        replicas: number of them that share a batch.
        remat: whether the activations of encoder blocks are computed again for the gradient.
        network: as it is trained; needed to count what adapters and frozen layers leave to train.
    """
    num_steps = recipe.num_steps(source.train.num_examples)
    images = num_steps * recipe.batch_size
    steps_per_epoch = max(source.train.num_examples // recipe.batch_size, 1)
    objective = make_objective(recipe)
    classes = len(source.labels) if isinstance(objective, Classification) else 0
    cost = costs(config, recipe.image_size, num_classes=classes, channels=channels)
    parameters = trained = cost.parameters
    if network is not None and (recipe.lora or recipe.freeze):
        parameters = network.count_params()
        trained = sum(math.prod(variable.shape) for variable in network.trainable_variables)
    parts = estimate_memory(config, recipe, classes, channels, precision, replicas, remat, parameters, trained)
    passes = 2 if recipe.sharpness_radius else 1
    counted = "counting the gradient as twice the forward pass" + ", and both twice for --sharpness-radius" * (
        passes > 1
    )
    rows = [
        ("training images", f"{source.train.num_examples:,} of {len(source.labels)} classes"),
        ("evaluation images", f"{source.evaluation.num_examples:,}"),
        ("steps", f"{num_steps:,} of {recipe.batch_size:,} images, {images:,} in all"),
        ("epochs", f"{num_steps / steps_per_epoch:.4g} of {steps_per_epoch:,} complete batches"),
        ("parameters", f"{parameters:,}" + f", of which {trained:,} are trained" * (trained < parameters)),
        ("forward, an image", f"{_si(cost.multiply_adds + cost.normalization)} multiply-adds, {_si(cost.flops)}FLOPs"),
        ("training, total", f"{_si(3 * passes * cost.flops * images)}FLOPs, {counted}"),
        ("memory of a step, about" + f", on each of {replicas}" * (replicas > 1), f"{_si(sum(parts.values()))}B"),
        *((f"  {name}", f"{_si(size)}B") for name, size in parts.items()),
    ]
    rows += [("" if number else "not counted", text) for number, text in enumerate(_not_counted(recipe, objective))]
    width = max(len(name) for name, _ in rows) + 2
    lines = ["Settings", *(f"  {name}: {value}" for name, value in _flat(settings)), "", "Run"]
    lines += [f"  {name:{width}}{value}" for name, value in rows]
    return "\n".join([*lines, "", "Learning rate", *_curve(recipe, num_steps)])


def _not_counted(recipe: Recipe, objective: Objective) -> Iterator[str]:
    """What makes the operations and the memory other than they are counted."""
    if isinstance(objective, MaskedPatches):
        yield f"the head of {objective.num_outputs:,} outputs for each patch"
    if isinstance(recipe, PretrainRecipe) and recipe.decoder_layers:
        yield "the decoder, and that the encoder computes only the visible patches"
    if isinstance(recipe, PretrainRecipe) and recipe.target == "self-distillation":
        crops = f"2 crops and {recipe.local_crops} small ones of each image"
        yield f"the head of {recipe.prototypes:,} prototypes, the teacher, and {crops}"
    if recipe.teacher is not None:
        yield f"the weights and the forward pass of the teacher {recipe.teacher}"
    if recipe.patch_dropout:
        yield f"that --patch-dropout leaves {recipe.patch_dropout:.4g} of the patches out, which saves about that share"
    if recipe.patch_sizes:
        sizes = ", ".join(map(str, recipe.patch_sizes))
        yield f"that --patch-sizes trains with patches of {sizes} pixels in turn: smaller ones are more tokens"
    if recipe.lora or recipe.freeze:
        yield "that frozen layers need no gradient of their weights, and none at all below the first trained layer"


def estimate_memory(
    config: ModelConfig,
    recipe: Recipe,
    num_classes: int,
    channels: int,
    precision: str = "float32",
    replicas: int = 1,
    remat: bool = False,
    parameters: int | None = None,
    trained: int | None = None,
) -> dict[str, int]:
    """Estimate the bytes of a step on each replica, by purpose.

    Fused operations need less, and the workspace of operations is not counted.

    Args:
        parameters: with those of adapters; default those of the config.
        trained: those of the parameters that have a gradient; default all.
    """
    full = costs(config, recipe.image_size, num_classes=num_classes, channels=channels)
    kept = full.activations
    if remat and isinstance(config, ViTConfig):  # the input of every block, and all activations of one
        single = dataclasses.replace(config, num_layers=1)
        tokens = np.prod(config.grid(recipe.image_size)) + config.num_prefix_tokens
        kept = costs(single, recipe.image_size, num_classes=num_classes, channels=channels).activations
        kept += (config.num_layers - 1) * int(tokens) * config.hidden_size
    images = recipe.batch_size // (recipe.accumulation * replicas)
    gradients = 4 * (full.parameters if trained is None else trained)
    parts = {"weights": 4 * (full.parameters if parameters is None else parameters)}
    parts["gradients"] = gradients * (1 + (recipe.accumulation > 1))
    parts["optimizer"] = gradients * _SLOTS[recipe.optimizer]
    if recipe.ema_decay is not None:
        parts["averaged weights"] = gradients
    if recipe.sharpness_radius:
        parts["weights uphill"] = gradients
    parts[f"activations of {images} images"] = images * kept * (4 if precision == "float32" else 2)
    return parts


def draw_learning_rate(recipe: Recipe, num_examples: int, path: pathlib.Path) -> None:
    """Plot the learning rate over the steps."""
    steps, rates = _rates(recipe, recipe.num_steps(num_examples), 1000)
    figure = matplotlib.figure.Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, rates, color="tab:blue")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0.0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _rates(recipe: Recipe, num_steps: int, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return evenly spaced steps and their learning rates."""
    steps = np.unique(np.linspace(0, num_steps - 1, points).round().astype(np.int64))
    rate = LearningRate(recipe.schedule, recipe.learning_rate, num_steps)
    return steps, keras.ops.convert_to_numpy(rate(steps))


def _curve(recipe: Recipe, num_steps: int) -> Iterator[str]:
    """Plot the learning rate in characters."""
    _, rates = _rates(recipe, num_steps, _COLUMNS)
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

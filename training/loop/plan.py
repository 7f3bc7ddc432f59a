"""The plan of a run: what options, data and devices make of it, worked out once."""

import dataclasses
import hashlib
import json
import math
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.errors import Rules, refuse_first
from keras_vit.files.labels import check_classes
from keras_vit.run import Run
from training.data.dataset import balanced, class_weights
from training.data.pipeline import steps_per_epoch
from training.data.sources import DataSet
from training.loop.setup import Setup
from training.options.common import FOR_SEVERAL_CLASSES, Execution, TrainingOptions
from training.recipes.recipe import Recipe

# Bytes that a pixel takes in a step of a small model, and what no machine holds for a step.
_BYTES_PER_PIXEL, MOST_MEMORY = 1000, 10**15


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run as it is trained."""

    options: TrainingOptions
    """Of the command. The recipe in it is that of config.json."""
    recipe: Recipe
    """The recipe that is trained, whose warm-up fits into the run."""
    data: DataSet
    """The data that are trained, with balanced classes if the recipe says so."""
    strategy: tf.distribute.Strategy
    settings: dict[str, Any]
    """Everything that changes the result, for config.json."""
    images: int
    """`DataSet.fingerprint` of the data as they were opened."""
    num_steps: int
    epoch_steps: int
    """Complete batches in an epoch of the training data."""
    class_weights: np.ndarray | None
    """(K,), see `training.objectives.classification.Classification`."""

    @property
    def execution(self) -> Execution:
        return self.options.execution

    @property
    def number(self) -> int:
        """A number that differs for other settings, classes, or options of the computation."""
        computed = dataclasses.asdict(self.execution), self.options.model_parallel, self.options.shard_weights
        text = json.dumps([self.settings, computed, self.data.labels], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def resolve(options: TrainingOptions, setup: Setup, *, command: str, recipe_name: str) -> Plan:
    """Return the plan of a run. Raises UserError if options, data and devices do not fit.

    The loss becomes multi-label where the images have several classes each, and the warm-up a tenth of a run that is
    shorter; both are printed.
    """
    data, recipe = setup.source, _with_loss_for(setup.source, options.recipe)
    options = dataclasses.replace(options, recipe=recipe)
    images = {"train": data.train.num_examples, "evaluation": data.evaluation.num_examples}
    settings = {**options.settings(command, recipe_name), "images": images}
    if recipe.balance:
        data = dataclasses.replace(data, train=balanced(data.train))
    weights = class_weights(data.train, len(data.labels)) if recipe.class_weights else None
    if recipe.teacher is not None and recipe.distillation != "features" and (known := Run.open(recipe.teacher).labels):
        advice = "give a teacher that was trained on these classes"
        check_classes(known, data.labels, f"The teacher {recipe.teacher}", advice)
    num_steps = recipe.num_steps(data.train.num_examples)
    refuse_first(_shares(recipe, setup.strategy.num_replicas_in_sync))
    epoch_steps = steps_per_epoch(data.train, recipe.batch_size)
    refuse_first(_lengths(options.execution, recipe, num_steps, epoch_steps))
    return Plan(
        options=options,
        recipe=_with_fitting_warmup(recipe, num_steps),
        data=data,
        strategy=setup.strategy,
        settings=settings,
        images=setup.source.fingerprint,
        num_steps=num_steps,
        epoch_steps=epoch_steps,
        class_weights=weights,
    )


def _with_loss_for(data: DataSet, recipe: Recipe) -> Recipe:
    if data.multi_label == (recipe.loss == "multi-label") or not recipe.uses_labels:
        return recipe
    if not data.multi_label:
        raise UserError(FOR_SEVERAL_CLASSES)
    if recipe.teacher:
        raise UserError(
            "A teacher gives probabilities that sum to 1, but these images have several classes; leave --teacher out."
        )
    print("Each image may have several classes: the loss is a sigmoid cross-entropy per class (--loss multi-label).")
    return dataclasses.replace(recipe, loss="multi-label")


def _shares(recipe: Recipe, replicas: int) -> Rules:
    parts, needed = replicas * recipe.accumulation, memory_of_step(recipe)
    batch, fits = f"{recipe.batch_size} images", max(recipe.batch_size // parts, 1) * parts
    evenly = f"be shared evenly by {replicas} replicas with {recipe.accumulation} micro-batches each"
    yield recipe.batch_size % parts, f"A batch of {batch} cannot {evenly}; give --batch-size {fits}."
    size = f"with batches of {batch} of {recipe.image_size[0]} by {recipe.image_size[1]} pixels"
    memory = f"A step would take about {needed / 1e12:,.0f} TB of memory, {size}"
    yield needed > MOST_MEMORY, f"{memory}; give a smaller --image-size or --batch-size."  # a digit too many


def _lengths(execution: Execution, recipe: Recipe, num_steps: int, epoch_steps: int) -> Rules:
    last = 0 if execution.profile_steps is None else execution.profile_steps[1]
    profiled = f"--profile-steps ends with step {last:,}, but the run has {num_steps:,} steps"
    yield last > num_steps, f"{profiled}; give earlier ones."
    epochs, every = -(-num_steps // (execution.evaluate_every or epoch_steps)), execution.inspect_every or 0
    yield every > epochs, f"--inspect-every {every} inspects none of the run's {epochs} epochs; give {epochs} or less."


def memory_of_step(recipe: Recipe) -> int:
    """Return about how many bytes a step takes with a small model."""
    return _BYTES_PER_PIXEL * recipe.batch_size * math.prod(recipe.image_size)


def _with_fitting_warmup(recipe: Recipe, num_steps: int) -> Recipe:
    schedule = recipe.schedule
    if schedule.warmup_steps >= num_steps:
        print(
            f"The warm-up of {schedule.warmup_steps:,} steps is not shorter than the run of {num_steps:,}; it takes "
            f"{num_steps // 10:,} instead."
        )
        schedule = dataclasses.replace(schedule, warmup_steps=num_steps // 10)
    left = num_steps - schedule.warmup_steps
    if schedule.cooldown_steps > left:
        fit = f"cooldown of {schedule.cooldown_steps} steps must fit into the {left} steps after the warm-up"
        raise UserError(f"The {fit}; give fewer, such as --cooldown-steps {left // 2}, or train longer.")
    return dataclasses.replace(recipe, schedule=schedule)

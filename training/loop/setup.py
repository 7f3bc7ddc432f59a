"""Set up a training run: open its devices and data, and check that they fit the options."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing, UserError, preprocessing_of
from keras_vit.errors import Rules, refuse_first
from keras_vit.files.remote import is_remote
from keras_vit.run_directory import CALIBRATION, SAMPLES, save_training_images
from keras_vit.runs import Run
from training.input.dataset import balanced, class_weights
from training.input.pipeline import save_samples, steps_per_epoch
from training.input.sources import DataSet, open_source
from training.loop.devices.jax_devices import JaxDevices
from training.loop.devices.strategies import open_strategy
from training.loop.run import RunDirectory
from training.options.checks import check_classes
from training.options.common import FOR_SEVERAL_CLASSES, Execution, TrainingOptions
from training.recipes.advice import advice
from training.recipes.recipe import Recipe
from training.workdir import run_settings

# Training images saved for the exports, which calibrate quantization ranges on them.
_CALIBRATION_IMAGES = 512
# Class names in the first lines of a log.
_SHOWN_CLASSES = 10
# Activations of a small model, and what no machine holds for a step.
_BYTES_PER_PIXEL, MOST_MEMORY = 1000, 10**15


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)
AnyOptions = TypeVar("AnyOptions", bound=TrainingOptions)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The data and devices of a run."""

    source: DataSet
    strategy: tf.distribute.Strategy


def open_setup(options: TrainingOptions, open_data: Callable[[], DataSet] | None = None) -> Setup:
    """Check the options and open the devices, then the data: reading images needs devices.

    open_data: for data that are no classes of images. Default: `open_source`.

    Raises UserError for what is wrong, and for such data on several hosts with JAX.
    """
    if not options.workdir.isprintable():
        raise UserError(
            "--workdir takes a directory or an address such as gs://bucket/run, in printable characters, "
            f"but was given {options.workdir!r}; give one such as runs/mine."
        )
    if is_remote(options.workdir):
        options.directory.mkdir(parents=True, exist_ok=True)  # raises what is wrong before all the work
    strategy = open_strategy(options.devices, options.model_parallel, shard_weights=options.shard_weights)
    if open_data is not None and isinstance(strategy, JaxDevices) and strategy.num_hosts > 1:
        raise UserError("Training with masks or boxes on JAX takes one host; start the command on one alone.")
    return Setup(
        strategy=strategy,
        source=open_data() if open_data else open_source(options.source, multi_label=True),
    )


def with_loss_for(options: AnyOptions, source: DataSet) -> AnyOptions:
    """Return the options with the loss for images of several classes each, where the data have such.

    Raises UserError if recipe and data exclude each other.
    """
    recipe = options.recipe
    if source.multi_label == (recipe.loss == "multi-label") or not recipe.uses_labels:
        return options
    refuse_first(
        [
            (not source.multi_label, FOR_SEVERAL_CLASSES),
            (
                recipe.teacher,
                "A teacher gives probabilities that sum to 1, but these images have several classes; leave --teacher "
                "out.",
            ),
        ]
    )
    print("Each image may have several classes: the loss is a sigmoid cross-entropy per class (--loss multi-label).")
    return dataclasses.replace(options, recipe=dataclasses.replace(recipe, loss="multi-label"))


def prepared(options: AnyOptions, setup: Setup) -> tuple[AnyOptions, DataSet, int]:
    """Return the options with a warm-up that fits into the run, the data as the recipe takes them, and the steps.

    Raises UserError if options, data and devices do not fit.
    """
    recipe, source = options.recipe, setup.source
    if recipe.balance:
        source = dataclasses.replace(source, train=balanced(source.train))
    if recipe.class_weights:
        class_weights(source.train, len(source.labels))  # raises UserError where the labels are not known
    if recipe.teacher is not None and recipe.distillation != "features" and (known := Run(recipe.teacher).labels):
        advice = "give a teacher that was trained on these classes"
        check_classes(known, source.labels, f"The teacher {recipe.teacher}", advice)
    num_steps = recipe.num_steps(source.train.num_examples)
    refuse_first(_rules(options.execution, recipe, source, setup.strategy, num_steps))
    recipe = _with_fitting_warmup(recipe, num_steps)
    return dataclasses.replace(options, recipe=recipe), source, num_steps


def _rules(
    execution: Execution, recipe: Recipe, source: DataSet, strategy: tf.distribute.Strategy, num_steps: int
) -> Rules:
    replicas, parts = strategy.num_replicas_in_sync, strategy.num_replicas_in_sync * recipe.accumulation
    yield (
        recipe.batch_size % parts,
        f"A batch of {recipe.batch_size} images cannot be shared evenly by {replicas} replicas with "
        f"{recipe.accumulation} micro-batches each; give --batch-size {max(recipe.batch_size // parts, 1) * parts}.",
    )
    in_epoch = steps_per_epoch(source.train, recipe.batch_size)  # raises UserError if there is none
    needed = memory_of_step(recipe)
    yield (  # a digit too many in an option
        needed > MOST_MEMORY,
        f"A step would take about {needed / 1e12:,.0f} TB of memory, with batches of {recipe.batch_size} images of "
        f"{recipe.image_size[0]} by {recipe.image_size[1]} pixels; give a smaller --image-size or --batch-size.",
    )
    last = 0 if execution.profile_steps is None else execution.profile_steps[1]
    yield (
        last > num_steps,
        f"--profile-steps ends with step {last:,}, but the run has {num_steps:,} steps; give earlier ones.",
    )
    epochs, every = -(-num_steps // (execution.evaluate_every or in_epoch)), execution.inspect_every or 0
    yield (
        every > epochs,
        f"--inspect-every {every} inspects none of the run's {epochs} epochs; give {epochs} or less.",
    )


def save_input(
    run: RunDirectory, network: keras.Model, source: DataSet, options: TrainingOptions, settings: dict
) -> None:
    """Print what will be trained on what, and save what a run directory keeps of its images."""
    recipe, num_steps = options.recipe, options.recipe.num_steps(source.train.num_examples)
    print(
        f"{settings['recipe_name']}: {network.count_params():,} parameters, "
        f"{source.train.num_examples:,} training images of {len(source.labels)} classes, "
        f"{source.evaluation.num_examples:,} evaluation images, {num_steps:,} steps of {recipe.batch_size}."
    )
    print(f"Classes: {_some(source.labels)}.")
    if recipe.teacher is not None and recipe.distillation == "soft" and recipe.label_smoothing:
        print(f"The recipe's label smoothing of {recipe.label_smoothing} has no effect with a soft teacher.")
    own_folder = options.source.data.startswith(("folder:", "csv:"))
    if recipe.class_weights:
        weights = class_weights(source.train, len(source.labels))
        least, most = int(weights.argmin()), int(weights.argmax())
        print(
            f"Class weights: {weights[least]:.2f} ({source.labels[least]}) to {weights[most]:.2f} "
            f"({source.labels[most]}), 1 on average over the images."
        )
    is_evened = recipe.balance or recipe.class_weights
    if own_folder and source.train.labels is not None and not is_evened and recipe.uses_labels:
        counts = np.bincount(source.train.labels)
        for sentence in advice(counts.tolist(), from_scratch=settings["command"] == "pretrain"):
            print(sentence)
    save_images(run, source, preprocessing_of(network))


def save_images(run: RunDirectory, source: DataSet, preprocessing: Preprocessing) -> None:
    """Save what a run keeps of its images: before the model, which marks the run as finished."""
    if source.train.digests is not None:
        save_training_images(run.path, source.train.digests)
    save_samples(source.evaluation, preprocessing, run.path / SAMPLES)
    save_samples(source.train, preprocessing, run.path / CALIBRATION, most=_CALIBRATION_IMAGES)


def memory_of_step(recipe: Recipe) -> int:
    """Bytes that a step takes about, of a small model."""
    return _BYTES_PER_PIXEL * recipe.batch_size * math.prod(recipe.image_size)


def _with_fitting_warmup(recipe: AnyRecipe, num_steps: int) -> AnyRecipe:
    """The recipe, with a tenth of the steps as its warm-up if it is not shorter than the run, which is printed."""
    schedule = recipe.schedule
    if schedule.warmup_steps >= num_steps:
        print(
            f"The warm-up of {schedule.warmup_steps:,} steps is not shorter than the run of {num_steps:,}; it takes "
            f"{num_steps // 10:,} instead."
        )
        schedule = dataclasses.replace(schedule, warmup_steps=num_steps // 10)
    left = num_steps - schedule.warmup_steps
    if schedule.cooldown_steps > left:
        raise UserError(
            f"The cooldown of {schedule.cooldown_steps} steps must fit into the {left} steps after the warm-up; give "
            f"fewer, such as --cooldown-steps {left // 2}, or train longer."
        )
    return dataclasses.replace(recipe, schedule=schedule)


def _some(labels: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(label[:60] for label in labels[:_SHOWN_CLASSES])
    return shown if len(labels) <= _SHOWN_CLASSES else f"{shown} and {len(labels) - _SHOWN_CLASSES:,} more"


def settings_of(options: TrainingOptions, command: str, recipe_name: str, source: DataSet) -> dict:
    """Everything that changes the result of the run."""
    images = {"train": source.train.num_examples, "evaluation": source.evaluation.num_examples}
    return {**run_settings(options, command, recipe_name), "images": images}


def number_of_settings(settings: dict, options: TrainingOptions, source: DataSet) -> int:
    """A number that tells settings, classes, and options of the computation apart."""
    computed = dataclasses.asdict(options.execution), options.model_parallel, options.shard_weights
    text = json.dumps([settings, computed, source.labels], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

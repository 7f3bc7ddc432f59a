"""The plan of a run: what options, opened data and devices make of it, worked out once."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.labels import check_classes
from keras_vit.files.remote import is_remote
from keras_vit.run import Run
from training.data.dataset import balanced, check_several_classes, class_weights
from training.data.pipeline import steps_per_epoch
from training.data.sources import DataSet, open_source
from training.loop.devices.jax_devices import JaxDevices
from training.loop.devices.strategies import is_chief, open_strategy
from training.options.common import FOR_SEVERAL_CLASSES, Execution, TrainingOptions
from training.recipes.auto import advice
from training.recipes.recipe import Recipe

# Class names in the first lines of a log.
_SHOWN_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Setup:
    """The data and devices of a run."""

    source: DataSet
    strategy: tf.distribute.Strategy


def open_setup(
    options: TrainingOptions, open_data: Callable[[], DataSet] | None = None, source: DataSet | None = None
) -> Setup:
    """Open the devices, then the data: reading images needs devices.

    open_data: for data that are no classes of images. Default: `open_source`. source: the data, if they are open.
    Raises UserError for what is wrong, and for data of another kind on several hosts with JAX.
    """
    if is_remote(options.workdir):
        options.directory.mkdir(parents=True, exist_ok=True)  # raises what is wrong before all the work
    strategy = open_strategy(options.devices, options.model_parallel, shard_weights=options.shard_weights)
    if open_data is not None and isinstance(strategy, JaxDevices) and strategy.num_hosts > 1:
        raise UserError("Training with masks or boxes on JAX takes one host; start the command on one alone.")
    if source is None:
        source = open_data() if open_data else open_source(options.source, multi_label=True)
    return Setup(source, strategy)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run as it is trained."""

    options: TrainingOptions  # of the command; the recipe in it is that of config.json
    recipe: Recipe  # that is trained, whose schedule fits into the run
    data: DataSet  # that are trained, with balanced classes if the recipe says so
    strategy: tf.distribute.Strategy
    settings: dict[str, Any]  # everything that changes the result, for config.json
    images: int  # `DataSet.fingerprint` of the data as they were opened
    num_steps: int
    epoch_steps: int  # complete batches in an epoch of the training data
    class_weights: np.ndarray | None  # (K,), see `training.objectives.objective.Classification`

    @property
    def execution(self) -> Execution:
        return self.options.execution

    @property
    def writes(self) -> bool:
        """Whether this process writes the files of the run."""
        return is_chief(self.strategy)

    @property
    def number(self) -> int:
        """A number that differs for other settings, classes, or options of the computation."""
        computed = dataclasses.asdict(self.execution), self.options.model_parallel, self.options.shard_weights
        text = json.dumps([self.settings, computed, self.data.labels], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def resolve(options: TrainingOptions, setup: Setup, *, command: str, recipe_name: str) -> Plan:
    """Return the plan of a run. Raises UserError if options, data and devices do not fit.

    The loss becomes multi-label where the images have several classes each, and warm-up and cooldown a tenth of a run
    that is not longer; both are printed.
    """
    data, recipe = setup.source, _with_loss_for(setup.source, options.recipe)
    if recipe.uses_labels and not data.train.target:
        check_several_classes(data)
    options = dataclasses.replace(options, recipe=recipe)
    images = {"train": data.train.num_examples, "evaluation": data.evaluation.num_examples}
    settings = {**options.settings(command, recipe_name), "images": images}
    if recipe.balance:
        data = dataclasses.replace(data, train=balanced(data.train))
    weights = class_weights(data.train, len(data.labels)) if recipe.class_weights else None
    if recipe.teacher is not None and recipe.distillation != "features" and (known := Run.open(recipe.teacher).labels):
        advice = "give a teacher that was trained on these classes"
        check_classes(known, data.labels, f"The teacher {recipe.teacher}", advice)
    num_steps, epoch_steps = recipe.num_steps(data.train.num_examples), steps_per_epoch(data.train, recipe.batch_size)
    check_shares(recipe, setup.strategy.num_replicas_in_sync)
    _check_lengths(options.execution, num_steps, epoch_steps)
    return Plan(
        options=options,
        recipe=_with_fitting_schedule(recipe, num_steps),
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
    print("Each image may have several classes: the loss is a sigmoid cross-entropy per class (--loss multi-label).")
    return dataclasses.replace(recipe, loss="multi-label")


def check_shares(recipe: Recipe, replicas: int) -> None:
    """Raise UserError if the replicas cannot share a batch evenly."""
    parts = replicas * recipe.accumulation
    if recipe.batch_size % parts:
        raise UserError(
            f"A batch of {recipe.batch_size} images cannot be shared evenly by {replicas} replicas with "
            f"{recipe.accumulation} micro-batches each; give --batch-size {max(recipe.batch_size // parts, 1) * parts}."
        )


def _check_lengths(execution: Execution, num_steps: int, epoch_steps: int) -> None:
    """Raise UserError for options about a part of the run that it does not reach."""
    last, every = (execution.profile_steps or (0, 0))[1], execution.inspect_every or 0
    epochs = -(-num_steps // (execution.evaluate_every or epoch_steps))
    for option, needed, there in (("--profile-steps", last, num_steps), ("--inspect-every", every, epochs)):
        if needed > there:
            raise UserError(f"{option} needs {needed:,}, but the run has {there:,} of these; give less.")


def _with_fitting_schedule(recipe: Recipe, num_steps: int) -> Recipe:
    schedule = recipe.schedule
    for name, part in {"warm-up": "warmup_steps", "cooldown": "cooldown_steps"}.items():
        steps = getattr(schedule, part)
        if steps >= num_steps:
            shorter = f"so it is shortened to {num_steps // 10:,}"
            print(f"The {name} of {steps:,} steps is not shorter than the run of {num_steps:,}, {shorter}.")
            fewer: dict[str, Any] = {part: num_steps // 10}
            schedule = dataclasses.replace(schedule, **fewer)
    return dataclasses.replace(recipe, schedule=schedule)


def print_summary(plan: Plan, network: keras.Model) -> None:
    """Print what will be trained on what, and advice where images are few or classes uneven."""
    recipe, data, labels = plan.recipe, plan.data, plan.data.labels
    print(
        f"{plan.settings['recipe_name']}: {network.count_params():,} parameters, {data.train.num_examples:,} training "
        f"images of {len(labels)} class{'es' * (len(labels) > 1)}, {data.evaluation.num_examples:,} evaluation images, "
        f"{plan.num_steps:,} steps of {recipe.batch_size}."
    )
    shown, more = ", ".join(label[:60] for label in labels[:_SHOWN_CLASSES]), len(labels) - _SHOWN_CLASSES
    print(f"Classes: {shown}{f' and {more:,} more' if more > 0 else ''}.")
    if recipe.teacher is not None and recipe.distillation == "soft" and recipe.label_smoothing:
        print(f"The recipe's label smoothing of {recipe.label_smoothing} has no effect with a soft teacher.")
    if (weights := plan.class_weights) is not None:
        least, most = int(weights.argmin()), int(weights.argmax())
        ends = f"{weights[least]:.2f} ({labels[least]}) to {weights[most]:.2f} ({labels[most]})"
        print(f"Class weights: {ends}; the mean over all images is 1.")
    is_own_folder = plan.options.source.data.startswith(("folder:", "csv:"))
    is_evened = recipe.balance or recipe.class_weights
    if is_own_folder and data.train.labels is not None and not is_evened and recipe.uses_labels:
        counts = np.bincount(data.train.labels).tolist()
        for sentence in advice(counts, from_scratch=plan.settings["command"] == "pretrain"):
            print(sentence)

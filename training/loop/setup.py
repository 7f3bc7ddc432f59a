"""Set up a training run: from the options of a command to a finished run directory."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError, cli, config_of, preprocessing_of
from keras_vit.files.atomic import atomic_write
from keras_vit.files.remote import is_remote, to_path
from keras_vit.run_directory import CALIBRATION, SAMPLES, save_training_images
from training.devices.strategies import CONTINUE_LATER, check_equal_on_workers, is_chief, open_strategy
from training.input.dataset import balanced
from training.input.pipeline import save_samples, steps_per_epoch
from training.input.sources import Source, open_source
from training.loop.callbacks import TrainingInterrupted
from training.loop.dry_run import describe_run, draw_learning_rate
from training.loop.fit import build_trainer, checked_model, train
from training.loop.objectives import Classification, make_objective
from training.loop.run import Run
from training.options.common import Execution, TrainingOptions
from training.options.workdir import locked, run_settings
from training.recipes.advice import advice
from training.recipes.recipe import Recipe
from training.techniques.distillation import check_teacher_classes

# Training images saved for the exports, which calibrate quantization ranges on them.
_CALIBRATION_IMAGES = 512
# Class names in the first lines of a log.
_SHOWN_CLASSES = 10
# Activations of a small model, and what no machine holds for a step.
_BYTES_PER_PIXEL, _MOST_BYTES = 1000, 10**15


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The data and devices of a run."""

    source: Source
    strategy: tf.distribute.Strategy


def open_setup(options: TrainingOptions) -> Setup:
    """Check the options and open the devices, then the data: reading images needs devices."""
    if not options.workdir.isprintable():
        raise UserError(
            "--workdir takes a directory or an address such as gs://bucket/run, in printable characters, "
            f"but was given {options.workdir!r}; give one such as runs/mine."
        )
    if is_remote(options.workdir):
        to_path(options.workdir).mkdir(parents=True, exist_ok=True)  # raises what is wrong before all the work
    return Setup(
        strategy=open_strategy(options.devices, options.model_parallel),
        source=open_source(options.source, multi_label=True),
    )


def with_loss_for(recipe: AnyRecipe, source: Source) -> AnyRecipe:
    """Return the recipe with the loss for images of several classes each, where the data have such.

    Raises UserError if recipe and data exclude each other.
    """
    if source.multi_label == (recipe.loss == "multi-label") or not _uses_labels(recipe):
        return recipe
    if not source.multi_label:
        raise UserError(
            "--loss multi-label is for images of several classes each, from --data csv:FILE with a column labels; "
            "leave it out."
        )
    if recipe.teacher is not None:
        raise UserError(
            "A teacher gives probabilities that sum to 1, but these images have several classes; leave --teacher out."
        )
    print("Each image may have several classes: the loss is a sigmoid cross-entropy per class (--loss multi-label).")
    return dataclasses.replace(recipe, loss="multi-label")


def _uses_labels(recipe: Recipe) -> bool:
    return isinstance(make_objective(recipe), Classification)


def run_training(
    options: TrainingOptions,
    recipe: Recipe,
    setup: Setup,
    make_model: Callable[[int], keras.Model],
    *,
    command: str,
    recipe_name: str,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    weights: dict | None = None,
) -> Run:
    """Train, or resume, or do nothing if the run is finished; return the finished run.

    Args:
        options: of the command.
        recipe: how to train.
        setup: data and devices.
        make_model: number of classes -> model; called once, under the strategy, before any file is written.
        command: for config.json.
        recipe_name: for config.json and messages.
        callbacks: see `training.loop.fit.train`.
        weights: see `Run.start`.
    """
    run = Run(to_path(options.workdir))
    settings = _settings(options, command, recipe_name, setup.source)
    writes = is_chief(setup.strategy) and not run.model_file.is_file()
    with locked(run.path) if writes else contextlib.nullcontext():
        return _train_locked(options, recipe, setup, make_model, run, settings, callbacks, weights)


def _train_locked(
    options: TrainingOptions,
    recipe: Recipe,
    setup: Setup,
    make_model: Callable[[int], keras.Model],
    run: Run,
    settings: dict,
    callbacks: Sequence[keras.callbacks.Callback],
    weights: dict | None,
) -> Run:
    (source, recipe), strategy = _checked_data(recipe, setup), setup.strategy
    num_steps = recipe.num_steps(source.train.num_examples)
    check_equal_on_workers(
        strategy,
        {
            "their settings or data": _fingerprint(settings, source),
            "the images of their data, by its files or by the index of its records": source.fingerprint,
        },
    )
    if run.model_file.is_file():
        run.start(settings, source.labels, images=setup.source.fingerprint)
        print(f"{run.path} is finished: nothing to do.")
        return run

    _check_reached(options.execution, recipe, source, num_steps)
    keras.utils.set_random_seed(options.seed)
    if options.deterministic:
        tf.config.experimental.enable_op_determinism()
    trainer = build_trainer(
        lambda: make_model(len(source.labels)),
        recipe,
        num_steps,
        strategy=strategy,
        execution=options.execution,
        seed=options.seed,
        deterministic=options.deterministic,
    )
    if is_chief(strategy):
        run.start(settings, source.labels, weights, images=setup.source.fingerprint)
        if source.train.digests is not None:
            save_training_images(run.path, source.train.digests)
        print(
            f"{settings['recipe_name']}: {trainer.network.count_params():,} parameters, "
            f"{source.train.num_examples:,} training images of {len(source.labels)} classes, "
            f"{source.evaluation.num_examples:,} evaluation images, {num_steps:,} steps of {recipe.batch_size}."
        )
        print(f"Classes: {_some(source.labels)}.")
        if recipe.teacher is not None and recipe.distillation == "soft" and recipe.label_smoothing:
            print(f"The recipe's label smoothing of {recipe.label_smoothing} has no effect with a soft teacher.")
        own_folder = options.source.data.startswith(("folder:", "csv:"))
        if own_folder and source.train.labels is not None and not recipe.balance and _uses_labels(recipe):
            counts = np.bincount(source.train.labels)
            for sentence in advice(counts.tolist(), from_scratch=settings["command"] == "pretrain"):
                print(sentence)
        # Before the training: model.keras, which the training writes, marks the run as finished.
        preprocessing = preprocessing_of(trainer.network)
        save_samples(source.evaluation, preprocessing, run.path / SAMPLES)
        save_samples(source.train, preprocessing, run.path / CALIBRATION, most=_CALIBRATION_IMAGES)
    train(trainer, recipe, source, run, seed=options.seed, execution=options.execution, callbacks=callbacks)
    if is_chief(strategy):
        last = sorted(run.metrics()[-1].items())
        metrics = ", ".join(f"{name[4:]} {value:.4f}" for name, value in last if name.startswith("val_"))
        print(f"Trained: {metrics} on the evaluation images; see {run.path}.")
    return run


def _checked_data(recipe: AnyRecipe, setup: Setup) -> tuple[Source, AnyRecipe]:
    """The source with the training examples of a recipe, and the recipe with a warm-up that fits into the run.

    Raises UserError if data and recipe do not fit.
    """
    source = dataclasses.replace(setup.source, train=balanced(setup.source.train)) if recipe.balance else setup.source
    _check_batch(recipe, setup.strategy)
    if recipe.teacher is not None:
        check_teacher_classes(recipe.teacher, source.labels)
    steps_per_epoch(source.train, recipe.batch_size)  # raises UserError if there is none
    _check_memory(recipe)
    return source, _with_fitting_warmup(recipe, recipe.num_steps(source.train.num_examples))


def _check_memory(recipe: Recipe) -> None:
    """Raise UserError for sizes that no machine holds, before the model is built: a digit too many in an option."""
    needed = _BYTES_PER_PIXEL * recipe.batch_size * math.prod(recipe.image_size)
    if needed > _MOST_BYTES:
        raise UserError(
            f"A step would take about {needed / 1e12:,.0f} TB of memory, with batches of {recipe.batch_size} images of "
            f"{recipe.image_size[0]} by {recipe.image_size[1]} pixels; give a smaller --image-size or --batch-size."
        )


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


def _check_batch(recipe: Recipe, strategy: tf.distribute.Strategy) -> None:
    """Raises UserError if a batch cannot be divided evenly among the replicas and their micro-batches."""
    parts = strategy.num_replicas_in_sync * recipe.accumulation
    if recipe.batch_size % parts:
        raise UserError(
            f"A batch of {recipe.batch_size} images cannot be shared evenly by {strategy.num_replicas_in_sync} "
            f"replicas with {recipe.accumulation} micro-batches each; give --batch-size "
            f"{max(recipe.batch_size // parts, 1) * parts}."
        )


def dry_run_report(
    options: TrainingOptions,
    recipe: Recipe,
    setup: Setup,
    make_model: Callable[[int], keras.Model],
    *,
    command: str,
    recipe_name: str,
) -> None:
    """Print the dry run's report and plot the learning rate next to the workdir, which is not created.

    Raises UserError for whatever `run_training` refuses. See there for the arguments.
    """
    source, recipe = _checked_data(recipe, setup)
    num_steps = recipe.num_steps(source.train.num_examples)
    _check_reached(options.execution, recipe, source, num_steps)
    workdir = to_path(options.workdir)
    stored = _settings(options, command, recipe_name, setup.source)
    Run(workdir).check(stored, source.labels, images=setup.source.fingerprint)
    model = checked_model(
        lambda: make_model(len(source.labels)),
        recipe,
        num_steps,
        strategy=setup.strategy,
        execution=options.execution,
        deterministic=options.deterministic,
    )
    settings = {name: value for name, value in dataclasses.asdict(options).items() if name != "dry_run"}
    text = describe_run(
        config_of(model),
        recipe,
        source,
        {"recipe_name": recipe_name, **settings},
        channels=preprocessing_of(model).channels,
        precision=options.execution.precision,
        replicas=setup.strategy.num_replicas_in_sync,
        remat=options.execution.remat,
        network=model,
    )
    print(text)
    workdir.parent.mkdir(parents=True, exist_ok=True)
    plot = workdir.with_name(f"{workdir.name}.lr.png")
    with atomic_write(plot) as temporary:
        draw_learning_rate(recipe, source.train.num_examples, temporary)
    print(f"\nThe learning rate is plotted in {plot}; nothing was trained.")


def _check_reached(execution: Execution, recipe: Recipe, source: Source, num_steps: int) -> None:
    """Raise UserError if the run ends before the steps to profile, or before its first inspection."""
    if execution.profile_steps is not None and execution.profile_steps[1] > num_steps:
        raise UserError(
            f"--profile-steps ends with step {execution.profile_steps[1]:,}, but the run has {num_steps:,} steps; "
            "give earlier ones."
        )
    epochs = -(-num_steps // (execution.evaluate_every or steps_per_epoch(source.train, recipe.batch_size)))
    if execution.inspect_every is not None and execution.inspect_every > epochs:
        raise UserError(
            f"--inspect-every {execution.inspect_every} inspects none of the run's {epochs} epochs; give {epochs} or "
            "less."
        )


def _some(labels: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(label[:60] for label in labels[:_SHOWN_CLASSES])
    return shown if len(labels) <= _SHOWN_CLASSES else f"{shown} and {len(labels) - _SHOWN_CLASSES:,} more"


def _settings(options: TrainingOptions, command: str, recipe_name: str, source: Source) -> dict:
    """Everything that changes the result of the run."""
    images = {"train": source.train.num_examples, "evaluation": source.evaluation.num_examples}
    return {**run_settings(options, command, recipe_name), "images": images}


def _fingerprint(settings: dict, source: Source) -> int:
    text = json.dumps([settings, source.labels], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@contextlib.contextmanager
def report_interruption() -> Iterator[None]:
    """Exit with CONTINUE_LATER and one sentence when training was interrupted."""
    try:
        yield
    except TrainingInterrupted:
        everywhere = " on every worker" if "TF_CONFIG" in os.environ else ""
        command = cli.command_line()
        print(
            f"Training was interrupted and its checkpoint is saved; the same command{everywhere} continues: {command}",
            file=sys.stderr,
        )
        sys.exit(CONTINUE_LATER)

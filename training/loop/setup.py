"""What the commands that train have in common: the way from their arguments to a finished run."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from keras_vit import UserError, preprocessing_of
from keras_vit.models.config import ModelConfig
from keras_vit.run_directory import CALIBRATION, SAMPLES
from training.devices.strategies import CONTINUE_LATER, check_equal_on_workers, is_chief, open_strategy
from training.input.pipeline import save_samples
from training.input.sources import Source, open_source
from training.loop.callbacks import TrainingInterrupted
from training.loop.dry_run import describe_run, draw_learning_rate
from training.loop.fit import build_trainer, check_batch, total_steps, train
from training.loop.run import Run, locked
from training.options.common import TrainingOptions
from training.recipes.recipe import Recipe

# What may change when a run continues: where and how it is computed, not what.
_CHANGEABLE = ("workdir", "devices", "execution", "dry_run")
# Training images that are kept for the exports, which fix the ranges of small numbers on them.
_CALIBRATION_IMAGES = 512


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a training command has opened before it knows its model."""

    source: Source
    strategy: tf.distribute.Strategy


def open_setup(arguments: TrainingOptions) -> Setup:
    """Check the arguments, open the devices and then, since reading images needs devices, the data."""
    if "://" in arguments.workdir or not arguments.workdir.isprintable():
        raise UserError(
            "--workdir takes a directory of this machine, in printable characters, "
            f"but was given {arguments.workdir!r}; give one such as runs/mine."
        )
    if not 0 <= arguments.seed < 2**32:
        raise UserError(
            f"The seed must be a number from 0 to {2**32 - 1}, but is {arguments.seed}; give --seed 0 or so."
        )
    return Setup(strategy=open_strategy(arguments.devices), source=open_source(arguments.source))


def run_training(
    arguments: TrainingOptions,
    recipe: Recipe,
    setting: Setup,
    make_model: Callable[[int], keras.Model],
    *,
    command: str,
    recipe_name: str,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Run:
    """Train and return the run, finished.

    Args:
        arguments: of the command.
        recipe: how to train.
        setting: data and devices.
        make_model: number of classes -> model; called once, under the strategy, before anything is written.
        command, recipe_name: for config.json.
        callbacks: of the caller, as `training.loop.fit.train` takes them.
    """
    run, strategy = Run(pathlib.Path(arguments.workdir)), setting.strategy
    writes = is_chief(strategy) and not run.model_file.is_file()
    with locked(run.path) if writes else contextlib.nullcontext():
        return _trained(
            arguments, recipe, setting, make_model, run, callbacks, command=command, recipe_name=recipe_name
        )


def _trained(
    arguments: TrainingOptions,
    recipe: Recipe,
    setting: Setup,
    make_model: Callable[[int], keras.Model],
    run: Run,
    callbacks: Sequence[keras.callbacks.Callback],
    *,
    command: str,
    recipe_name: str,
) -> Run:
    source, strategy = setting.source, setting.strategy
    check_batch(recipe, strategy)
    num_steps = total_steps(recipe, source)
    settings = _settings(arguments, command, recipe_name, source)
    check_equal_on_workers(strategy, {"what they were told to do": _fingerprint(settings, source)})
    if run.model_file.is_file():
        run.start(settings, source.labels)
        print(f"{run.path} is finished: nothing to do.")
        return run

    keras.utils.set_random_seed(arguments.seed)
    if arguments.deterministic:
        tf.config.experimental.enable_op_determinism()
    trainer = build_trainer(
        lambda: make_model(len(source.labels)),
        recipe,
        num_steps,
        strategy=strategy,
        execution=arguments.execution,
        seed=arguments.seed,
        deterministic=arguments.deterministic,
    )
    if is_chief(strategy):
        run.start(settings, source.labels)
        print(
            f"{recipe_name}: {trainer.network.count_params():,} parameters, {source.train.num_examples:,} training "
            f"images of {len(source.labels)} classes, {source.evaluation.num_examples:,} to evaluate on, "
            f"{num_steps:,} steps of {recipe.batch_size}."
        )
        # Before the training, for with its model a run is finished.
        preprocessing = preprocessing_of(trainer.network)
        save_samples(source.evaluation, preprocessing, run.path / SAMPLES)
        save_samples(source.train, preprocessing, run.path / CALIBRATION, most=_CALIBRATION_IMAGES)
    train(trainer, recipe, source, run, seed=arguments.seed, execution=arguments.execution, callbacks=callbacks)
    if is_chief(strategy):
        last = sorted(run.metrics()[-1].items())
        reached = ", ".join(f"{name[4:]} {value:.4f}" for name, value in last if name.startswith("val_"))
        print(f"Trained: {reached} on the evaluation images; see {run.path}.")
    return run


def dry_run_report(
    arguments: TrainingOptions, recipe: Recipe, setting: Setup, config: ModelConfig, channels: int, name: str
) -> None:
    """Print what the run would be, and draw its learning rate beside the workdir, which stays new."""
    check_batch(recipe, setting.strategy)
    total_steps(recipe, setting.source)
    text = describe_run(
        config,
        recipe,
        setting.source,
        {"recipe_name": name, **_options(arguments)},
        channels=channels,
        precision=arguments.execution.precision,
        replicas=setting.strategy.num_replicas_in_sync,
        remat=arguments.execution.remat,
    )
    print(text)
    workdir = pathlib.Path(arguments.workdir)
    workdir.parent.mkdir(parents=True, exist_ok=True)
    picture = workdir.with_name(f"{workdir.name}.lr.png")
    draw_learning_rate(recipe, setting.source.train.num_examples, picture)
    print(f"\nThe learning rate is drawn in {picture}; nothing was trained.")


def _options(arguments: TrainingOptions) -> dict:
    return {name: value for name, value in dataclasses.asdict(arguments).items() if name != "dry_run"}


def _settings(arguments: TrainingOptions, command: str, recipe_name: str, source: Source) -> dict:
    """What decides the numbers of the run."""
    settings = {name: value for name, value in dataclasses.asdict(arguments).items() if name not in _CHANGEABLE}
    images = {"train": source.train.num_examples, "evaluation": source.evaluation.num_examples}
    precision = arguments.execution.precision
    return {"command": command, "recipe_name": recipe_name, "images": images, "precision": precision, **settings}


def _fingerprint(settings: dict, source: Source) -> int:
    text = json.dumps([settings, source.labels], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@contextlib.contextmanager
def report_interruption() -> Iterator[None]:
    """Ends the command with CONTINUE_LATER and one sentence when its run was stopped before its end."""
    try:
        yield
    except TrainingInterrupted:
        everywhere = " on every worker" if "TF_CONFIG" in os.environ else ""
        command = shlex.join(sys.orig_argv)
        print(f"Stopped, with the state saved; the same command{everywhere} continues: {command}", file=sys.stderr)
        sys.exit(CONTINUE_LATER)

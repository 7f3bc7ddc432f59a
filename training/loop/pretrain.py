"""A model trained from scratch by a recipe."""

import pathlib
from collections.abc import Sequence

import keras

from training.loop.run import Run
from training.loop.setup import Setup, dry_run_report, open_setup, run_training
from training.options.train import PretrainOptions


def pretrain(
    arguments: PretrainOptions,
    recipe_name: str,
    setting: Setup | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Run:
    """Train a model and return its run, or tell the plan of it.

    Args:
        arguments: of the command.
        recipe_name: for config.json and what is printed.
        setting: data and devices; default those that the arguments name.
        callbacks: of the caller, as `training.loop.fit.train` takes them.
    """
    recipe, setting = arguments.recipe, setting or open_setup(arguments)
    if arguments.dry_run:
        dry_run_report(arguments, recipe, setting, recipe.model, recipe.channels, recipe_name)
        return Run(pathlib.Path(arguments.workdir))
    return run_training(
        arguments, recipe, setting, recipe.build, command="pretrain", recipe_name=recipe_name, callbacks=callbacks
    )

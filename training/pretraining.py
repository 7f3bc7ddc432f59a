"""A model trained from scratch by a recipe."""

import pathlib
from collections.abc import Sequence

import keras

from training.command import Setting, open_setting, run_training, tell_plan
from training.pretrain import Arguments
from training.run import Run


def pretrain(
    arguments: Arguments,
    recipe_name: str,
    setting: Setting | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Run:
    """Train a model and return its run, or tell the plan of it.

    Args:
        arguments: of the command.
        recipe_name: for config.json and what is printed.
        setting: data and devices; default those that the arguments name.
        callbacks: of the caller, as `training.fit.train` takes them.
    """
    recipe, setting = arguments.recipe, setting or open_setting(arguments)
    if arguments.dry_run:
        tell_plan(arguments, recipe, setting, recipe.model, recipe.channels, recipe_name)
        return Run(pathlib.Path(arguments.workdir))
    return run_training(
        arguments, recipe, setting, recipe.build, command="pretrain", recipe_name=recipe_name, callbacks=callbacks
    )

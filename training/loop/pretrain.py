"""Train a model from scratch by a recipe."""

from collections.abc import Sequence

import keras

from keras_vit.files.remote import to_path
from training.loop.dry_run import dry_run_report
from training.loop.run import RunDirectory
from training.loop.setup import Setup, open_setup, with_loss_for
from training.loop.train import run_training
from training.options.train import PretrainOptions


def pretrain(
    options: PretrainOptions,
    recipe_name: str,
    setup: Setup | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> RunDirectory:
    """Train a model and return its run; with `options.dry_run` only print the report.

    Args:
        options: of the command.
        recipe_name: for config.json and messages.
        setup: data and devices; by default those of the options.
        callbacks: see `training.loop.train.run_training`.
    """
    setup = setup or open_setup(options)
    options = with_loss_for(options, setup.source)
    build = options.recipe.build
    if options.dry_run:
        dry_run_report(options, setup, build, command="pretrain", recipe_name=recipe_name)
        return RunDirectory(to_path(options.workdir))
    return run_training(options, setup, build, command="pretrain", recipe_name=recipe_name, callbacks=callbacks)

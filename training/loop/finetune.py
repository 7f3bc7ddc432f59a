"""A model trained further: the checkpoint with a new head, at the recipe's resolution."""

import dataclasses
import pathlib
from collections.abc import Sequence

import keras

import keras_vit
from keras_vit import MODELS, UserError, ViTConfig, run_directory
from keras_vit.checkpoints.download import find_checkpoint
from keras_vit.errors import nearest
from training.loop.fit import rebuilt
from training.loop.run import Run
from training.loop.setup import Setup, dry_run_report, run_training
from training.options.train import FinetuneOptions

# Models whose ImageNet-21k checkpoint is among AugReg's, under a name of its own.
_AUGREG_NAMES = {
    "ViT-Ti_16": "Ti_16",
    "ViT-S_16": "S_16",
    "ViT-S_32": "S_32",
    "R+ViT-Ti_16": "R_Ti_16",
    "R26+ViT-S_32": "R26_S_32",
}


def finetune(
    arguments: FinetuneOptions,
    recipe_name: str,
    setting: Setup,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Run:
    """Train a checkpoint further and return its run, or tell the plan of it.

    Args:
        arguments: of the command.
        recipe_name: for config.json and what is printed.
        setting: data and devices.
        callbacks: of the caller, as `training.loop.fit.train` takes them.
    """
    recipe = arguments.recipe
    path = _checkpoint(arguments)

    def make_model(num_classes: int) -> keras.Model:
        model = _loaded(path, arguments, num_classes)
        known = keras_vit.preprocessing_of(model)
        config = keras_vit.config_of(model)
        rates = {"dropout_rate": arguments.dropout_rate, "stochastic_depth_rate": arguments.stochastic_depth_rate}
        if isinstance(config, ViTConfig):
            config = dataclasses.replace(config, **rates)
        elif any(rates.values()):
            raise UserError("A ResNet has no dropout; leave --dropout-rate and --stochastic-depth-rate out.")
        return rebuilt(model, config, recipe.preprocessing(known.channels, known.value_range))

    if arguments.dry_run:
        model = make_model(len(setting.source.labels))
        channels = keras_vit.preprocessing_of(model).channels
        dry_run_report(arguments, recipe, setting, keras_vit.config_of(model), channels, recipe_name)
        return Run(pathlib.Path(arguments.workdir))
    return run_training(
        arguments, recipe, setting, make_model, command="finetune", recipe_name=recipe_name, callbacks=callbacks
    )


def _checkpoint(arguments: FinetuneOptions) -> pathlib.Path:
    """The local path of what to start from."""
    if (arguments.checkpoint is None) == (arguments.model is None):
        raise UserError("Give either --checkpoint, a file, folder, address or name, or --model, an official model.")
    return find_checkpoint(arguments.checkpoint or official_checkpoint(arguments.model))


def official_checkpoint(model: str) -> str:
    """The name of the ImageNet-21k checkpoint of an official model."""
    if model not in MODELS:
        raise UserError(f"There is no official model {model!r}; the nearest names are {nearest(model, MODELS)}.")
    if model.startswith("BiT-"):
        return f"bit:BiT-M-{model.removeprefix('BiT-')}"
    return f"augreg:{_AUGREG_NAMES[model]}" if model in _AUGREG_NAMES else f"imagenet21k/{model}"


def _loaded(path: pathlib.Path, arguments: FinetuneOptions, num_classes: int) -> keras.Model:
    """The checkpoint's model for the recipe's image size, with a new head."""
    changes = {"image_size": arguments.recipe.image_size, "num_classes": num_classes, "channels": arguments.channels}
    if path.suffix != ".keras" and not (path / run_directory.MODEL).is_file():
        return keras_vit.from_checkpoint(path, num_heads=arguments.num_heads, **changes)
    if arguments.num_heads is not None:
        raise UserError("A model of ours tells its number of heads; leave --num-heads out.")
    return keras_vit.adapt(run_directory.load_model(path), **changes)

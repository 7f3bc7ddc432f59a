"""Train a model by a recipe: from scratch, or without labels from a checkpoint."""

from collections.abc import Sequence

import keras

import keras_vit
from keras_vit import preprocessing_of
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.load import weights_by_key
from keras_vit.run import Run
from training.loop.plan import Setup, open_setup
from training.loop.train import run_training
from training.options.train import PretrainOptions


def pretrain(
    options: PretrainOptions,
    recipe_name: str,
    setup: Setup | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Run:
    """Train a model and return its run; with `options.dry_run` only print the report.

    With a checkpoint, the recipe's model is that of the checkpoint. The other arguments are those of `run_training`.
    """
    recipe = options.recipe

    def make_model(num_classes: int) -> keras.Model:
        classes = num_classes if recipe.uses_labels else None
        if options.checkpoint is None:
            return recipe.build(classes)
        path, size = find_checkpoint(options.checkpoint), recipe.image_size
        start = keras_vit.from_checkpoint(path, image_size=size, num_classes=0, channels=recipe.channels)
        model = recipe.build(classes, preprocessing_of(start))
        _fill(model, start, options.checkpoint)
        return model

    return run_training(
        options,
        setup or open_setup(options),
        make_model,
        command="pretrain",
        recipe_name=recipe_name,
        callbacks=callbacks,
        checkpoint=options.checkpoint,
    )


def _fill(model: keras.Model, start: keras.Model, name: str) -> None:
    """Copy all weights that the models share; mask tokens, decoder and heads stay new, which is printed."""
    values, new = weights_by_key(start), []
    for key, variable in weights_by_key(model).items():
        if key in values:
            variable.assign(values[key])
        elif variable.trainable:
            new.append(key.rpartition("/")[0])
    layers = list(dict.fromkeys(new))
    more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    print(f"Starts from the {len(values)} arrays of {name}; new layers: {', '.join(layers[:4]) or 'none'}{more}.")

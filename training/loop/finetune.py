"""Fine-tune a checkpoint: load it with a head for the classes of the data, at the recipe's resolution, and train."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import keras_vit
from keras_vit import UserError, ViTConfig
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.checkpoints.layouts import HEADS
from keras_vit.checkpoints.load import weights_by_key
from keras_vit.files.keras_model import KERAS_WEIGHTS
from keras_vit.run import Run
from keras_vit.text.classes import classes_of_labels
from training.data.dataset import typical_image
from training.data.known_images import warn_of_known_images, warn_of_training_images
from training.loop.build import rebuilt
from training.loop.devices.jax_devices import whole
from training.loop.devices.strategies import on_this_host
from training.loop.plan import Setup
from training.loop.train import run_training
from training.options.train import FinetuneOptions
from training.recipes.recipe import NO_BLOCKS


def finetune(
    options: FinetuneOptions, recipe_name: str, setup: Setup, callbacks: Sequence[keras.callbacks.Callback] = ()
) -> Run:
    """Fine-tune a checkpoint and return the run; with `options.dry_run` only print the report.

    See `training.loop.train.run_training` for the arguments.
    """
    recipe, data, checkpoint = options.recipe, setup.source, options.start
    path = find_checkpoint(checkpoint)
    upstream = Run.open(path)
    if not warn_of_training_images(upstream, data.evaluation.digests, data.evaluation.name) and data.held_out:
        warn_of_known_images(upstream, options.source, data)
    rates = {"dropout_rate": options.dropout_rate, "stochastic_depth_rate": options.stochastic_depth_rate}
    average = AveragedWithStart(options.wise_ft) if options.wise_ft < 1.0 else None

    def make_model(_: int) -> keras.Model:
        with on_this_host(setup.strategy):
            model = _load(path, options, data.labels)
        preprocessing = keras_vit.preprocessing_of(model)
        if preprocessing.channels == 1 and typical_image(data.train)[1] == 3:
            print("The checkpoint takes grayscale images, so the colors of the training images are not used.")
        if recipe.layer_decay != 1.0 and not isinstance(keras_vit.config_of(model), ViTConfig):
            raise UserError(NO_BLOCKS)
        start = rebuilt(model, recipe.preprocessing(preprocessing.channels, preprocessing), rates=rates)
        if average is not None:
            average.remember(start)
        return start

    return run_training(
        options,
        setup,
        make_model,
        command="finetune",
        recipe_name=recipe_name,
        checkpoint=checkpoint,
        callbacks=callbacks if average is None else (*callbacks, average),
    )


def patch_and_side(options: FinetuneOptions) -> tuple[int, int | None]:
    """Return the number of pixels of which the sides of a checkpoint's images must be multiples, and their longer side.

    That is of the images a Vision Transformer was trained on, None if it is not known or the model is a ResNet.
    """
    path = find_checkpoint(options.start)
    if path.name.endswith(KERAS_WEIGHTS):
        fields: dict[str, Any] = dataclasses.asdict(keras_vit.MODELS[options.model or ""])
        trained_at = None
    else:
        description = keras_vit.describe(path)
        fields, trained_at = dict(description.fields), description.image_size
    patch = fields.get("patch_size", 1)
    multiple = 1 if fields.get("stem") is not None else math.lcm(*((patch,) if isinstance(patch, int) else patch))
    return multiple, max(trained_at) if trained_at is not None and "patch_size" in fields else None


def _load(path: pathlib.Path, options: FinetuneOptions, labels: Sequence[str]) -> keras.Model:
    """Load the checkpoint's model at the recipe's image size, with a head for the classes of the data."""
    size, number = options.recipe.image_size, len(labels)
    if options.zero_shot_head:
        texts = classes_of_labels(labels, options.templates)
        classes = dict(zip(texts.labels, texts.texts, strict=True))
        return keras_vit.zero_shot(options.start, classes, texts.templates, size)
    if path.name.endswith(KERAS_WEIGHTS):
        channels = options.channels or 3
        model = keras_vit.build(options.model or "", image_size=size, num_classes=number, channels=channels)
        keras_vit.load_checkpoint(model, path, drop=(*HEADS, "pre_logits/"), keep=HEADS)
        return model
    head: dict[str, Any] = {"num_classes": number} if options.new_head else {"classes": labels}
    return keras_vit.from_checkpoint(
        path, image_size=size, channels=options.channels, num_heads=options.num_heads, **head
    )


class AveragedWithStart(keras.callbacks.Callback):
    """At the end of training, replace the weights by their mean with those that the training began with.

    WiSE-FT ("Robust fine-tuning of zero-shot models", arXiv 2109.01903, equation 1): it keeps more of what the
    checkpoint knew. A share of 0.5 of the trained weights is the paper's choice where nothing else is known. It changes
    no checkpoint, so a run that continues behind its last step averages once, too.
    """

    def __init__(self, share: float):
        super().__init__()
        self.share = share
        self._start: dict[str, np.ndarray] = {}

    def remember(self, model: keras.Model) -> None:
        """Keep the weights of a model before its training."""
        self._start = {key: whole(variable) for key, variable in weights_by_key(model).items()}

    def on_train_end(self, logs=None):
        network, averages = self.model.network, self.model.ema
        averaged = {id(weight): average for weight, average in zip(network.trainable_variables, averages, strict=False)}
        for key, variable in weights_by_key(network).items():
            trained = averaged.get(id(variable), variable)
            trained.assign(self.share * whole(trained) + (1.0 - self.share) * self._start[key])

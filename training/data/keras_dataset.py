"""A data set for `model.fit` and `model.evaluate`: the images and labels that the commands read."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras
import tensorflow as tf

import keras_vit
from keras_vit import UserError
from keras_vit.checkpoints.checkpoint import rows_of
from keras_vit.errors import check_choice
from training.data.dataset import Split, without_autograph
from training.data.pipeline import evaluation_batches, steps_per_epoch, training_batches
from training.data.sources import open_source
from training.options.common import DataOptions
from training.recipes.recipe import Recipe

# An epoch of a data set draws its number below this one, so that every epoch has another order and other changes.
_EPOCHS = 2**20


def dataset(
    data: str | DataOptions,
    model: keras.Model,
    *,
    split: Literal["train", "evaluation"] = "train",
    batch_size: int = 32,
    augment: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> tf.data.Dataset:
    """Read images as `keras-vit finetune` and `keras-vit evaluate` do.

    Args:
        data: as `--data` of the commands takes it, such as "folder:images" or "tfds:NAME", or `DataOptions`.
        model: built by keras_vit, whose preprocessing is applied.
        split: "train" is shuffled in each epoch, and images that fill no batch are left out; "evaluation" has every
            image once, in order. The splits are those of the commands.
        batch_size: images per batch.
        augment: for "train", options of the commands by the names of their fields, such as {"flip": True, "mixup":
            0.2}. Default: the images as evaluation and exports see them.
        seed: of the order and the changes.

    Returns:
        Batches of images (B, height, width, C) float32 in the model's range, and labels (B, K) float32, one-hot or
        mixed, for `keras.losses.CategoricalCrossentropy(from_logits=True)`. Its attribute `class_names` has the names
        of the K classes: in the order of the model's classes if they are the same, else in that of the data.
    """
    check_choice("split", split, ("train", "evaluation"))
    if augment is not None and split == "evaluation":
        raise UserError("Images for evaluation are not changed; leave augment out, or give split='train'.")
    source = open_source(DataOptions(data) if isinstance(data, str) else data, multi_label=True)
    preprocessing, count = keras_vit.preprocessing_of(model), len(source.labels)
    names = keras_vit.classes_of(model) or ()
    order = [row for row in rows_of(names, source.labels) if row is not None]
    is_same = len(order) == len(names) == count
    part: Split = source.train if split == "train" else source.evaluation
    if split == "train":
        steps = steps_per_epoch(part, batch_size)
        recipe = _recipe(augment, preprocessing.image_size, batch_size)
        make = functools.partial(training_batches, part, recipe, preprocessing, num_classes=count, seed=seed)
        batches = _any_epoch(make, steps, seed)
    else:
        steps = -(-part.num_examples // batch_size)
        batches = evaluation_batches(part, preprocessing, num_classes=count, batch_size=batch_size)
        batches = batches.map(without_autograph(_without_padding))
    if is_same:
        batches = batches.map(without_autograph(lambda images, labels: (images, tf.gather(labels, order, axis=-1))))
    batches = batches.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(tf.data.AUTOTUNE)
    batches.class_names = names if is_same else source.labels
    return batches


def _any_epoch(make: Callable[..., tf.data.Dataset], steps: int, seed: int) -> tf.data.Dataset:
    """Return batches of an epoch of `training_batches` whose number is drawn anew in each iteration."""

    def epoch(number: tf.Tensor) -> tf.data.Dataset:
        return make(first_step=number % _EPOCHS * steps, num_steps=steps)

    number = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    return number.flat_map(without_autograph(epoch))


def _without_padding(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    count = tf.cast(tf.reduce_sum(weights), tf.int32)
    return images[:count], labels[:count]


def _recipe(augment: Mapping[str, Any] | None, image_size: tuple[int, int], batch_size: int) -> Recipe:
    """Return a recipe of which only the images matter."""
    plain = Recipe(image_size=image_size, batch_size=batch_size, learning_rate=1.0, epochs=1)
    return dataclasses.replace(plain, **(augment or {}))

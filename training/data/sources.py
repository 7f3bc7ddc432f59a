"""Data sources: whatever `--data` names becomes examples that can be read by number, or a data set for `model.fit`.

Each source gives a training and an evaluation split. A split is a function from an index to one image and its label, so
that the order of training can be computed from seed and epoch, and continued anywhere.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

import keras_vit
from keras_vit import UserError
from keras_vit.checkpoints.checkpoint import rows_of
from keras_vit.errors import check_choice
from training.data.checks import kind_and_path
from training.data.dataset import (
    DataSet,
    Split,
    array_split,
    bad_examples_reported,
    warn_about_images,
    without_autograph,
)
from training.data.image_folder import csv_list, folder
from training.data.pipeline import evaluation_batches, steps_per_epoch, training_batches
from training.data.tar import tar
from training.data.tfds import tfds_source
from training.data.tfrecord import tfrecord
from training.options.common import DataOptions
from training.recipes.recipe import Recipe

__all__ = ["DataOptions", "DataSet", "Split", "array_split", "bad_examples_reported", "digits", "open_source"]

# An epoch of a data set draws its number below this one, so that every epoch has another order and other changes.
_EPOCHS = 2**20


def open_source(options: DataOptions, *, multi_label: bool = False) -> DataSet:
    """Open what `--data` names. Raises UserError when there is no such thing or it cannot be used.

    multi_label: whether the caller can use images of several classes each.
    """
    kind, rest = kind_and_path(options)
    match kind:
        case "digits":
            source = digits()
        case "folder":
            source = folder(options)
        case "csv":
            source = csv_list(options)
        case "tfds":
            source = tfds_source(rest, options.data_dir, options.train_split, options.eval_split)
        case "tar":
            source = tar(rest, options.on_bad_image, options.group)
        case _:
            source = tfrecord(rest, options.on_bad_image)
    if kind in ("tfds", "tfrecord", "tar"):  # of a folder all files are looked at
        warn_about_images(source.train, source.evaluation)
    _warn_of_similar_names(source.labels)
    if source.multi_label and not multi_label:
        raise UserError(
            f"The images of {options.data} have several classes each, which pretrain, finetune, evaluate and predict "
            "can use, but not this command; give images of one class each."
        )
    return source


def _warn_of_similar_names(labels: tuple[str, ...]) -> None:
    """Name the classes that differ only in case or in outer spaces, as a table that was typed by hand has them."""
    of_name: dict[str, list[str]] = {}
    for label in labels:
        of_name.setdefault(label.strip().casefold(), []).append(label)
    for names in of_name.values():
        if len(names) > 1:
            reason = "spaces" if len({name.strip() for name in names}) == 1 else "upper and lower case"
            shown = " and ".join(map(repr, names) if reason == "spaces" else names)
            print(f"Warning: {shown} are different classes, because {reason} count.")


def digits() -> DataSet:
    """Return the 1,797 handwritten digits of scikit-learn, 8x8 gray: four fifths to train on, the rest to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # 0..16 as stored
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    names = tuple(str(digit) for digit in range(10))
    return DataSet(names, array_split(train_x, train_y, names), array_split(test_x, test_y, names))


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
        plain = Recipe(image_size=preprocessing.image_size, batch_size=batch_size, learning_rate=1.0, epochs=1)
        recipe = dataclasses.replace(plain, **(augment or {}))  # of which only the images matter
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

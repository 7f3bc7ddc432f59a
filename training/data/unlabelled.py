"""Images without labels, beside labeled ones in every batch, and as examples with shares of classes."""

import dataclasses
import functools
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing
from training.data.dataset import DataSet, Split, decoded
from training.data.pipeline import training_batches
from training.recipes.recipe import PseudoLabelRecipe, Recipe

# Fields without which only crops, shifts and flips are left.
_WEAK: dict[str, Any] = {"autoaugment": False, "randaugment_layers": 0, "randaugment_magnitude": 0.0}
_WEAK |= {"random_erasing": 0.0, "three_augment": False, "color_jitter": 0.0, "mixup": 0.0, "cutmix": 0.0}
# Strong changes where a recipe has none: those of Semi-ViT's code (rand-m9, two operations, reprob 0.25).
_STRONG: dict[str, Any] = {"randaugment_layers": 2, "randaugment_magnitude": 9.0, "random_erasing": 0.25}


def strong(recipe: Recipe) -> Recipe:
    """Return the recipe with strong changes of each image, its own if it has RandAugment or AutoAugment."""
    return recipe if recipe.randaugment_layers or recipe.autoaugment else dataclasses.replace(recipe, **_STRONG)


def semi_supervised_batches(
    unlabelled: Split,
    split: Split,
    recipe: PseudoLabelRecipe,
    preprocessing: Preprocessing,
    *,
    num_classes: int,
    seed: int,
    first_step: int,
    num_steps: int | None = None,
    part: tuple[int, int] = (0, 1),
) -> tf.data.Dataset:
    """As `training_batches`, with a tuple of images: labeled (B, h, w, C); and the same crops of images without
    labels, weakly and strongly changed, each (B, n, h, w, C) with n of them for each labeled image.
    """
    per_image, size = recipe.unlabelled_per_image, recipe.batch_size * recipe.unlabelled_per_image
    batches = functools.partial(training_batches, first_step=first_step, num_steps=num_steps, part=part)
    labeled = batches(split, recipe, preprocessing, num_classes=num_classes, seed=seed)
    plain = dataclasses.replace(recipe, batch_size=size, accumulation=1, mixup=0.0, cutmix=0.0)
    # Another seed, so that the order is not that of the labeled images; the same for both, so that the crops are equal.
    views = [
        batches(unlabelled, changed, preprocessing, num_classes=num_classes, seed=(seed + 1) % 2**32)
        for changed in (dataclasses.replace(plain, **_WEAK), strong(plain))
    ]

    def grouped(images: tf.Tensor) -> tf.Tensor:
        return tf.reshape(images, (-1, per_image, *images.shape[1:]))

    def together(labeled_batch: tuple, weak_batch: tuple, strong_batch: tuple) -> tuple:
        images, labels = labeled_batch
        return (images, grouped(weak_batch[0]), grouped(strong_batch[0])), labels

    return tf.data.Dataset.zip((labeled, *views)).map(together).prefetch(tf.data.AUTOTUNE)


def with_pseudo_labels(source: DataSet, unlabelled: Split, kept: np.ndarray, shares: np.ndarray, times: int) -> DataSet:
    """Return the data set with images without labels among those to train on, which have the shares of the classes.

    Args:
        source: labeled.
        unlabelled: images.
        kept: (n,) numbers of those to learn from.
        shares: (n, K) probability of each class.
        times: the labeled images are repeated as often as 1 in 1 + `times` examples is labeled, or once.
    """
    train = source.train
    repeats = max(len(kept) // (times * train.num_examples), 1)
    count, num_classes = repeats * train.num_examples, len(source.labels)
    numbers, targets = tf.constant(kept, tf.int64), tf.constant(shares, tf.float32)
    known = train.read(tf.constant(0, tf.int64))[0].dtype == unlabelled.read(tf.constant(0, tf.int64))[0].dtype

    def stored(split: Split, index: tf.Tensor) -> tf.Tensor:
        image = split.read(index)[0]
        return image if known else decoded(image)  # arrays in memory beside files

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.cond(
            index < count,
            lambda: stored(train, index % train.num_examples),
            lambda: stored(unlabelled, numbers[tf.maximum(index - count, 0)]),
        )
        return image, tf.constant(-1)

    def labeled_target(index: tf.Tensor) -> tf.Tensor:
        return train.target(index) if train.target else tf.one_hot(train.read(index)[1], num_classes)

    def target(index: tf.Tensor) -> tf.Tensor:
        return tf.cond(
            index < count,
            lambda: labeled_target(index % train.num_examples),
            lambda: targets[tf.maximum(index - count, 0)],
        )

    def name(index: int) -> str:
        return train.name(index % train.num_examples) if index < count else unlabelled.name(int(kept[index - count]))

    mixed = Split(
        count + len(kept),
        read,
        name,
        fingerprint=zlib.crc32(np.round(shares, 3).tobytes(), zlib.crc32(np.asarray(kept, np.int64).tobytes())),
        target=target,
    )
    return dataclasses.replace(source, train=mixed)

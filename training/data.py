"""Splits -> tf.data: which example comes when, what is done to it, and in which order. All of it is here.

Training order is addressed by step: example number p of the run belongs to epoch p // examples_per_epoch and is the
image that a pseudo-random permutation, keyed by seed and epoch, puts at its place; its augmentation is seeded by
(seed, p). So any step of any run can be made again without making those before it.
"""

import os

import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing, UserError
from keras_vit.preprocess import to_channels
from keras_vit.run_directory import Samples
from training import augment
from training.recipes import Recipe
from training.sources import Split

# Rounds of the index permutation's cipher; at TensorFlow's default of 4, neighbours stay correlated.
_SHUFFLE_ROUNDS = 16
# Of the images kept beside a model: largest side in sides of its input, and bytes of all together.
_LARGEST_SAMPLE, _SAMPLE_BYTES = 4, 64 * 2**20


def steps_per_epoch(split: Split, batch_size: int) -> int:
    """Whole batches in an epoch; the rest of the permutation is left out, another rest in every epoch."""
    steps = split.num_examples // batch_size
    if steps == 0:
        raise UserError(
            f"A batch of {batch_size} is larger than the training set of {split.num_examples} images; "
            f"give --batch-size {split.num_examples} or less."
        )
    return steps


def training_batches(
    split: Split, recipe: Recipe, preprocessing: Preprocessing, *, num_classes: int, seed: int, first_step: int
) -> tf.data.Dataset:
    """Endless batches from `first_step` on: images (B, H, W, C) in the model's range, one-hot labels (B, K)."""
    per_epoch = steps_per_epoch(split, recipe.batch_size) * recipe.batch_size

    def example(position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        epoch, place = position // per_epoch, position % per_epoch
        index = tf.raw_ops.RandomIndexShuffle(
            index=place, seed=tf.stack([seed, epoch, 0]), max_index=split.num_examples - 1, rounds=_SHUFFLE_ROUNDS
        )
        image, label = split.example(index)
        return _augmented(image, tf.stack([seed, position]), recipe, preprocessing), label

    def batch(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return preprocessing.normalize(images), tf.one_hot(labels, num_classes)

    positions = tf.data.Dataset.range(first_step * recipe.batch_size, tf.int64.max)
    data = positions.map(example, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    data = data.batch(recipe.batch_size, drop_remainder=True).map(batch)
    return data.prefetch(tf.data.AUTOTUNE)


def _augmented(image: tf.Tensor, seed: tf.Tensor, recipe: Recipe, preprocessing: Preprocessing) -> tf.Tensor:
    """One decoded image -> the training image, (height, width, channels), 0..255."""
    crop_seed, shift_seed, flip_seed = tf.unstack(tf.random.split(seed, 3))
    if recipe.inception_crop:
        window = to_channels(augment.inception_crop(image, crop_seed), preprocessing.channels)
        image = tf.image.resize(window, preprocessing.image_size, antialias=preprocessing.resize == "crop")
    else:
        image = preprocessing.fit(image)
    if recipe.shift:
        image = augment.random_shift(image, shift_seed, recipe.shift)
    return augment.random_flip(image, flip_seed) if recipe.flip else image


def evaluation_batches(
    split: Split, preprocessing: Preprocessing, *, num_classes: int, batch_size: int
) -> tf.data.Dataset:
    """Every example once, in order, the last batch smaller: images (B, H, W, C), one-hot labels (B, K)."""

    def example(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = split.example(index)
        return preprocessing(image), tf.one_hot(label, num_classes)

    data = tf.data.Dataset.range(split.num_examples)
    data = data.map(example, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return data.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def save_samples(split: Split, preprocessing: Preprocessing, path: str | os.PathLike) -> None:
    """Keep evaluation images beside a model, as PNG in an evenly mixed order, up to 64 MB of them.

    Pictures far larger than the model's input are reduced first, so that every data set gives enough of them.
    """
    limit = tuple(_LARGEST_SAMPLE * side for side in preprocessing.image_size)
    encoded, labels, total = [], [], 0
    for index in np.random.default_rng(0).permutation(split.num_examples):
        image, label = split.example(tf.constant(index, tf.int64))
        if image.shape[0] > limit[0] and image.shape[1] > limit[1]:
            image = tf.image.resize(image, limit, preserve_aspect_ratio=True, antialias=True)
            image = tf.saturate_cast(tf.round(image), tf.uint8)
        encoded.append(tf.io.encode_png(image).numpy())
        labels.append(int(label))
        total += len(encoded[-1])
        if total >= _SAMPLE_BYTES:
            break
    Samples(tuple(encoded), np.array(labels)).save(path)

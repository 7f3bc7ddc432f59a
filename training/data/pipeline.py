"""Splits -> tf.data: which example comes when, what is done to it, and in which order. All of it is here.

Training order is addressed by step: example number p of the run belongs to epoch p // examples_per_epoch and is the
image that a pseudo-random permutation, keyed by seed and epoch, puts at its place; its augmentation is seeded by
(seed, p), that of the batch by (seed, step). So any step of any run can be made again without making those before it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing, UserError
from keras_vit.images import graph
from training.data import augment, randaugment
from training.data.dataset import DataSet, Split, decoded, without_autograph
from training.recipes.recipe import PretrainRecipe, Recipe

# Rounds of the index permutation's cipher; at TensorFlow's default of 4, neighbors stay correlated.
_SHUFFLE_ROUNDS = 16
_OF_THE_BATCH = 1  # what a batch's seed is folded with, so that it is not that of an example
# What the seed of an image is folded with for its first crop, if it has several; the next crops take the next numbers.
_OF_THE_CROPS = 16
# Share of the image's area in the large and small crops of self-distillation.
_LARGE_CROP_AREA, _SMALL_CROP_AREA = (0.4, 1.0), (0.05, 0.4)
_HELD_BYTES = 2**29  # bytes up to which the resized images of a split are held in memory
# Images whose colors are changed together, whatever the batch: enough for vectorized operations, few enough for memory.
_COLOR_ROWS = 32


def steps_per_epoch(split: Split, batch_size: int) -> int:
    """Return whole batches in an epoch; the rest of the permutation is left out, another rest in every epoch."""
    if batch_size > split.num_examples:
        raise UserError(
            f"A step takes {batch_size} images, but there are {split.num_examples} to take them from; give a smaller "
            "--batch-size."
        )
    return split.num_examples // batch_size


def training_batches(
    split: Split,
    recipe: Recipe,
    preprocessing: Preprocessing,
    *,
    num_classes: int,
    seed: int,
    first_step: int,
    num_steps: int | None = None,
    part: tuple[int, int] = (0, 1),
) -> tf.data.Dataset:
    """Return batches from `first_step` on, `num_steps` of them or endless.

    Images (B, h, w, C) in the model's range, labels (B, K) that sum to 1, or are 1 for each of several classes. For
    self-distillation the images are large crops (B, 2, height, width, C), or a tuple of them and of small ones (B, n,
    h, w, C). With `part` (i, n) only rows i * B / n to (i + 1) * B / n of the very same batches, for worker i of n.
    """
    rows, partners = _rows_to_read(recipe, part)
    shuffled = training_order(split, recipe.batch_size, rows, seed)
    crops = recipe if _has_several_crops(recipe) else None
    is_recolored = crops is None and bool(recipe.color_jitter or recipe.three_augment)

    @without_autograph
    def stored(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        index, position = shuffled(number)
        image, label = split.read(index)
        return image, split.target(index) if split.target else label, position

    @without_autograph
    def example(image: tf.Tensor, label: tf.Tensor, position: tf.Tensor) -> tuple:
        example_seed = tf.stack([seed, position])
        if crops is not None:
            return _multi_crop(image, example_seed, crops, preprocessing), label
        image = _training_image(image, example_seed, recipe, preprocessing)
        return (image, label, augment.color_draws(example_seed)) if is_recolored else (image, label)

    @without_autograph
    def batch(step: tf.Tensor, examples: tuple) -> tuple:
        images, labels = tf.nest.map_structure(preprocessing.normalize, examples[0]), examples[1]
        labels = labels if split.target else tf.one_hot(labels, num_classes)
        return _mixed(images, labels, partners, tf.stack([seed, step]), recipe)

    data, make = example_numbers(len(rows), first_step, num_steps), example
    if split.parallel_reads:
        data = data.map(stored, num_parallel_calls=split.parallel_reads, deterministic=True)
    else:
        make = without_autograph(lambda number: example(*stored(number)))
    data = data.map(make, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    group = data.batch
    if is_recolored:
        recolor = without_autograph(lambda images, labels, draws: (recolored(images, draws, recipe), labels))
        data = data.batch(_COLOR_ROWS).map(recolor, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        group = data.rebatch
    return group(len(rows), drop_remainder=True).enumerate(first_step).map(batch).prefetch(tf.data.AUTOTUNE)


def recolored(images: tf.Tensor, draws: tf.Tensor, recipe: Recipe) -> tf.Tensor:
    """Return images (B, h, w, C) with the changes of colors that a recipe has, by draws (B, 5)."""
    if not (recipe.color_jitter or recipe.three_augment):
        return images
    return augment.augment_colors(images, draws, jitter=recipe.color_jitter, three=recipe.three_augment)


def _has_several_crops(recipe: Recipe) -> TypeGuard[PretrainRecipe]:
    return isinstance(recipe, PretrainRecipe) and recipe.target == "self-distillation"


def training_order(split: Split, batch_size: int, rows: np.ndarray, seed: int) -> Callable:
    """Number among the examples of these rows of every batch -> (index in the split, number in the run), int64."""
    per_epoch = steps_per_epoch(split, batch_size) * batch_size

    def shuffled(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        position = number // len(rows) * batch_size + tf.constant(rows)[number % len(rows)]
        epoch, place = position // per_epoch, position % per_epoch  # repeated for ever
        index = tf.raw_ops.RandomIndexShuffle(
            index=place, seed=tf.stack([seed, epoch, 0]), max_index=split.num_examples - 1, rounds=_SHUFFLE_ROUNDS
        )
        return index, position

    return shuffled


def example_numbers(num_rows: int, first_step: int, num_steps: int | None) -> tf.data.Dataset:
    """The numbers that a function of `training_order` takes, from a step on, for a number of steps or without end."""
    end = tf.int64.max if num_steps is None else (first_step + num_steps) * num_rows
    return tf.data.Dataset.range(first_step * num_rows, end)


def rows_of_part(batch_size: int, part: tuple[int, int]) -> np.ndarray:
    """Return rows of every batch that one part gives."""
    assert batch_size % part[1] == 0  # see `training.loop.plan.check_shares`
    rows = batch_size // part[1]
    return np.arange(part[0] * rows, (part[0] + 1) * rows)


def _rows_to_read(recipe: Recipe, part: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of every batch that one part needs, its own first; and where among them the partner of each own row is.

    Images are mixed with others of the whole batch, so that the batch is the same whatever the number of parts.
    """
    own = rows_of_part(recipe.batch_size, part)
    if not (recipe.mixup or recipe.cutmix):
        return own, own - own[0]
    partners = (own - 1) % recipe.batch_size if recipe.mixup_partner == "next" else recipe.batch_size - 1 - own
    rows = np.concatenate([own, np.setdiff1d(partners, own)])
    return rows, np.argmax(rows[None] == partners[:, None], axis=1)


def _training_image(data: tf.Tensor, seed: tf.Tensor, recipe: Recipe, preprocessing: Preprocessing) -> tf.Tensor:
    """Return an image, decoded or not, as it is shown in training: (height, width, channels), 0..255.

    It is rounded to uint8 only for operations on bytes. So without augmentation, training sees what evaluation sees.
    """
    crop_seed, *seeds = tf.unstack(tf.random.split(seed, 5))
    return _augmented(_cropped(data, crop_seed, recipe, preprocessing), seeds, recipe, preprocessing)


def _multi_crop(data: tf.Tensor, seed: tf.Tensor, recipe: PretrainRecipe, preprocessing: Preprocessing):
    """Return the crops of an image, decoded or not, for self-distillation, each augmented for itself, 0..255.

    Large crops (2, height, width, C), or these and small crops (n, h, w, C).

    The areas are the defaults of facebookresearch/dino `main_dino.py` (global_crops_scale, local_crops_scale).
    """
    image = preprocessing.to_channels(decoded(data, preprocessing))
    numbers = itertools.count(_OF_THE_CROPS)

    def crop(size: tuple[int, int], area: tuple[float, float]) -> tf.Tensor:
        crop_seed, *seeds = tf.unstack(tf.random.split(tf.random.fold_in(seed, next(numbers)), 5))
        window = augment.inception_crop(image, crop_seed, area)
        window = _window_resized(window, dataclasses.replace(preprocessing, antialias=True), size)
        window = _augmented(window, seeds, recipe, preprocessing)
        return recolored(window[None], augment.color_draws(crop_seed)[None], recipe)[0]

    large = tf.stack([crop(recipe.image_size, _LARGE_CROP_AREA) for _ in range(2)])
    if not recipe.local_crops:
        return large
    size = (recipe.local_size, recipe.local_size)
    return large, tf.stack([crop(size, _SMALL_CROP_AREA) for _ in range(recipe.local_crops)])


def _augmented(image: tf.Tensor, seeds: Sequence[tf.Tensor], recipe: Recipe, preprocessing: Preprocessing) -> tf.Tensor:
    """Return a crop with all changes but those of colors."""
    shift_seed, flip_seed, policy_seed, erasing_seed = seeds
    erased_or_colored = recipe.random_erasing or recipe.color_jitter or recipe.three_augment
    on_bytes = recipe.autoaugment or recipe.randaugment_layers or erased_or_colored
    if image.dtype != tf.uint8 and on_bytes:
        image = tf.saturate_cast(tf.round(image), tf.uint8)
    if recipe.shift:
        # White beside the padding of the resize, which is white.
        fill = 255 if preprocessing.resize == "pad" else 0
        image = augment.random_shift(image, shift_seed, recipe.shift, fill)
    if recipe.flip:
        image = augment.random_flip(image, flip_seed)
    if recipe.autoaugment:
        image = randaugment.autoaugment(image, policy_seed)
    if recipe.randaugment_layers:
        image = randaugment.randaugment(image, policy_seed, recipe.randaugment_layers, recipe.randaugment_magnitude)
    if recipe.random_erasing:
        image = augment.random_erasing(image, erasing_seed, recipe.random_erasing)
    return image


def _cropped(data: tf.Tensor, seed: tf.Tensor, recipe: Recipe, preprocessing: Preprocessing) -> tf.Tensor:
    """Return the part of an image that training shows, (height, width, C), 0..255; float32 has been resized already."""
    if data.dtype == tf.float32:
        return data if recipe.crop_from is None else augment.random_crop(data, seed, preprocessing.image_size)
    encoded = data.dtype == tf.string
    if recipe.inception_crop:
        if encoded:
            window = augment.decode_and_inception_crop(data, seed, preprocessing)
        else:
            window = preprocessing.to_channels(augment.inception_crop(data, seed))
        return _window_resized(window, preprocessing, preprocessing.image_size)
    if recipe.crop_from is None:
        return preprocessing.read(data) if encoded else preprocessing.resized(data)
    image = decoded(data, preprocessing)
    if recipe.resize == "resize-small":
        image = augment.resize_small(preprocessing.to_channels(image), recipe.crop_from, preprocessing)
    else:
        image = _stretched(image, recipe.crop_from, preprocessing)
    return augment.random_crop(image, seed, preprocessing.image_size)


def _window_resized(window: tf.Tensor, preprocessing: Preprocessing, size: tuple[int, int]) -> tf.Tensor:
    """Return a random window of an image at a size, with the filter of the model."""
    if preprocessing.resize == "pad":  # so that training too shows no stretched shapes, and the background
        return dataclasses.replace(preprocessing, image_size=size, crop_from=None).resized(window)
    if preprocessing.interpolation == "area":  # big_vision averages areas in evaluation alone
        preprocessing = dataclasses.replace(preprocessing, interpolation="bilinear")
    return graph.resize(window, size, preprocessing)


def _stretched(image: tf.Tensor, side: int, preprocessing: Preprocessing) -> tf.Tensor:
    return graph.resize(preprocessing.to_channels(image), (side, side), preprocessing)


def resized_once(
    source: DataSet, recipe: Recipe, preprocessing: Preprocessing, *, epochs: float, evaluations: int
) -> DataSet:
    """Return a source with the same batches, of which files are decoded and resized once instead of in every epoch.

    Each split stays as it is where that saves nothing or needs more than 512 MB, and that of training where each epoch
    decodes other windows of the images; so does a source with `batches` of its own.

    Args:
        epochs: of training that are left.
        evaluations: that are left.
    """
    if source.batches is not None:
        return source
    cropped = recipe.inception_crop or (recipe.crop_from is not None and recipe.resize == "resize-small")
    train, evaluation = source.train, source.evaluation
    if epochs >= 2 and not cropped and not _has_several_crops(recipe):
        train = _in_memory(train, preprocessing, recipe.crop_from)
    unlabelled = source.unlabelled
    if unlabelled is not None and recipe.crop_from is None and not cropped:
        unlabelled = _in_memory(unlabelled, preprocessing)
    if evaluations >= 2:
        evaluation = _in_memory(evaluation, preprocessing)
    return dataclasses.replace(source, train=train, evaluation=evaluation, unlabelled=unlabelled)


def _in_memory(split: Split, preprocessing: Preprocessing, side: int | None = None) -> Split:
    """The split with its images as float32 of one size, unless it has no files or they are many.

    side: height and width to which they are stretched; by default they are resized as the model sees them.
    """
    numbers = tf.data.Dataset.range(split.num_examples)
    size = preprocessing.image_size if side is None else (side, side)
    shape = (split.num_examples, *size, preprocessing.channels)
    if numbers.map(split.read).element_spec[0].dtype != tf.string or 4 * np.prod(shape, dtype=float) > _HELD_BYTES:
        return split

    @without_autograph
    def resized(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = split.read(number)
        image = preprocessing.decode(image)
        image = preprocessing.resized(image) if side is None else _stretched(image, side, preprocessing)
        return tf.cast(image, tf.float32), label

    calls = split.parallel_reads or tf.data.AUTOTUNE
    with tf.device("CPU"):
        images, labels = np.empty(shape, np.float32), np.empty(split.num_examples, np.int32)
        for number, (image, label) in enumerate(numbers.map(resized, num_parallel_calls=calls).as_numpy_iterator()):
            images[number], labels[number] = image, label
        held = tf.constant(images), tf.constant(labels)
    return dataclasses.replace(split, read=lambda index: (held[0][index], held[1][index]), parallel_reads=None)


def _mixed(
    images: tf.Tensor, labels: tf.Tensor, partners: np.ndarray, seed: tf.Tensor, recipe: Recipe
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the own rows of what was read, mixed with their partners."""
    if not (recipe.mixup or recipe.cutmix):
        return images, labels
    own = images[: len(partners)], labels[: len(partners)]
    pairs = own, (tf.gather(images, partners), tf.gather(labels, partners))
    choice, seed = tf.unstack(tf.random.split(tf.random.fold_in(seed, _OF_THE_BATCH)))
    mostly_own = recipe.mixup_partner == "next"
    mixup = functools.partial(augment.mixup, pairs, seed, recipe.mixup, mostly_own=mostly_own)
    cutmix = functools.partial(augment.cutmix, pairs, seed, recipe.cutmix)
    if recipe.mixup and recipe.cutmix:
        return tf.cond(tf.random.stateless_uniform((), choice) < 0.5, mixup, cutmix)
    return mixup() if recipe.mixup else cutmix()


def evaluation_batches(
    split: Split, preprocessing: Preprocessing, *, num_classes: int, batch_size: int, part: tuple[int, int] = (0, 1)
) -> tf.data.Dataset:
    """Return every example once, in order: images (B, h, w, C), labels (B, K) as in training, weights (B,) float32.

    Every batch has its full size: behind the last example come black images of weight 0 and without a label. With
    `part` (i, n) only rows i * B / n to (i + 1) * B / n of the very same batches, equally many in every part.
    """

    def example(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        def real() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            image, label = split.read(index)
            target = split.target(index) if split.target else tf.one_hot(label, num_classes)
            if image.dtype == tf.string:
                fitted = preprocessing.read(image)
            else:
                fitted = image if image.dtype == tf.float32 else preprocessing.resized(image)  # as in `_cropped`
            return preprocessing.normalize(fitted), target, tf.constant(1.0)

        def padding() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            shape = (*preprocessing.image_size, preprocessing.channels)
            return tf.zeros(shape), tf.zeros((num_classes,)), tf.constant(0.0)

        return tf.cond(index < split.num_examples, real, padding)

    return batches_in_order(split, example, batch_size, part)


def batches_in_order(split: Split, example: Callable, batch_size: int, part: tuple[int, int]) -> tf.data.Dataset:
    """Return batches of what a function makes of each index, to the end of the last batch; see `evaluation_batches`."""
    rows = rows_of_part(batch_size, part)

    @without_autograph
    def of_number(number: tf.Tensor) -> tuple:
        return example(number // len(rows) * batch_size + tf.constant(rows)[number % len(rows)])

    data = tf.data.Dataset.range(-(-split.num_examples // batch_size) * len(rows))
    data = data.map(of_number, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return data.batch(len(rows), drop_remainder=True).prefetch(tf.data.AUTOTUNE)

"""Images with masks or boxes -> tf.data. One random transform of the places moves image, masks and boxes alike.

The order of the examples is that of `training/data/pipeline.py`, and so is their randomness: the transform of an
example is drawn from the run's seed and the number of the example in the run.

What `Split.target` gives for an index, of an image (h, w), seen upright: "labels" (n,) int32, the classes of its
targets; "segments" (h, w) int32, the number of the target that each pixel belongs to, negative for none; or "boxes"
(n, 4) float32: left, top, right and bottom in pixels. The targets of a batch: "labels" (B, T), -1 for none;
"segments" (B, height, width); or "boxes" (B, T, 4): center x and y, width and height as shares of the model's input.
"""

import dataclasses
import functools
from typing import NamedTuple

import tensorflow as tf

from keras_vit import Preprocessing
from keras_vit.images import graph
from training.data import augment
from training.data.dataset import Split, decoded, without_autograph
from training.data.pipeline import batches_in_order, example_numbers, recolored, rows_of_part, training_order
from training.recipes.dense import DenseRecipe, DetectRecipe

_LEAST_VISIBLE = 0.25  # share of a box that must stay visible in a window for it to remain a target
TILES = 2  # rows and columns of a mosaic

Example = tuple[tf.Tensor, dict[str, tf.Tensor]]  # an image and its target


class Geometry(NamedTuple):
    """Where the pixels of an image go in the model's input: a window is resized, perhaps flipped, and placed."""

    window: tf.Tensor  # (4,) int32: top, left, height and width in the image
    size: tf.Tensor  # (2,) int32: height and width of the resized window
    corner: tf.Tensor  # (2,) int32: its first row and column in the input
    flip: tf.Tensor  # bool: whether left and right of the window are exchanged


@dataclasses.dataclass(frozen=True)
class DenseBatches:
    """Batches of images with masks or boxes; see `training.data.dataset.Batches`."""

    num_targets: int  # T, to which the targets of each image are filled up

    def training(
        self,
        split: Split,
        recipe: DenseRecipe,
        preprocessing: Preprocessing,
        *,
        seed: int,
        first_step: int,
        num_steps: int | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> tf.data.Dataset:
        """Images (B, height, width, C) in the model's range and targets; see `training_batches` for the arguments."""
        rows = rows_of_part(recipe.batch_size, part)
        shuffled = training_order(split, recipe.batch_size, rows, seed)

        @without_autograph
        def example(number: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
            index, position = shuffled(number)
            example_seed = tf.stack([seed, position])
            image, target = self.example(split, recipe, preprocessing, index, example_seed)
            return image, self.filled(target), augment.color_draws(example_seed)

        @without_autograph
        def batch(images: tf.Tensor, targets: dict[str, tf.Tensor], draws: tf.Tensor) -> tuple:
            return preprocessing.normalize(recolored(images, draws, recipe)), targets

        data = example_numbers(len(rows), first_step, num_steps)
        data = data.map(example, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return data.batch(len(rows), drop_remainder=True).map(batch).prefetch(tf.data.AUTOTUNE)

    def example(
        self, split: Split, recipe: DenseRecipe, preprocessing: Preprocessing, index: tf.Tensor, seed: tf.Tensor
    ) -> Example:
        """Return one augmented example: (height, width, C) float32, 0..255, and its target, not filled up."""
        assert split.target is not None
        image = preprocessing.to_channels(decoded(split.read(index)[0], preprocessing))
        geometry = random_geometry(tf.shape(image)[:2], seed, recipe)
        moved = moved_image(image, geometry, preprocessing)
        return moved, moved_target(split.target(index), geometry, preprocessing.image_size)

    def evaluation(
        self, split: Split, preprocessing: Preprocessing, *, batch_size: int, part: tuple[int, int] = (0, 1)
    ) -> tf.data.Dataset:
        """Images, targets and weights (B,); see `evaluation_batches`, whose order and filling-up this is."""
        assert split.target is not None
        target_of = split.target

        def example(index: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor], tf.Tensor]:
            is_real = index < split.num_examples
            index = tf.minimum(index, split.num_examples - 1)
            image = decoded(split.read(index)[0], preprocessing)
            geometry = model_geometry(tf.shape(image)[:2], preprocessing)
            target = self.filled(moved_target(target_of(index), geometry, preprocessing.image_size))
            target["labels"] = tf.where(is_real, target["labels"], -1)
            fitted = tf.ensure_shape(preprocessing.resized(image), (*preprocessing.image_size, preprocessing.channels))
            return preprocessing.normalize(fitted), target, tf.cast(is_real, tf.float32)

        return batches_in_order(split, example, batch_size, part)

    def filled(self, target: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the targets of an example, as many as each has."""
        missing = self.num_targets - tf.shape(target["labels"])[0]
        labels = tf.pad(target["labels"], [[0, missing]], constant_values=-1)
        filled = {**target, "labels": tf.ensure_shape(labels, (self.num_targets,))}
        if "boxes" in target:
            boxes = tf.pad(target["boxes"], [[0, missing], [0, 0]])
            filled["boxes"] = tf.ensure_shape(boxes, (self.num_targets, 4))
        return filled


@dataclasses.dataclass(frozen=True)
class SceneBatches(DenseBatches):
    """Batches of images with segments."""

    stuff: tuple[int, ...] = ()  # classes that have no objects


@dataclasses.dataclass(frozen=True)
class BoxBatches(DenseBatches):
    """Batches of images with boxes, some of them mosaics."""

    of_image: int  # boxes of one image at most; `num_targets` is as many as four can have

    def example(
        self, split: Split, recipe: DenseRecipe, preprocessing: Preprocessing, index: tf.Tensor, seed: tf.Tensor
    ) -> Example:
        """One augmented image or, with the probability of the recipe, four of them; see `DenseBatches.example`."""
        single = functools.partial(super().example, split, recipe, preprocessing, index, seed)
        if not isinstance(recipe, DetectRecipe) or not recipe.mosaic:
            return single()

        def alone() -> Example:
            image, target = single()
            return image, self.filled(target)

        own, drawn = tf.unstack(tf.random.split(tf.random.experimental.stateless_fold_in(seed, 1)))
        return tf.cond(
            tf.random.stateless_uniform((), own) < recipe.mosaic,
            lambda: self._mosaic(split, recipe, preprocessing, index, drawn),
            alone,
        )

    def _mosaic(
        self, split: Split, recipe: DenseRecipe, preprocessing: Preprocessing, index: tf.Tensor, seed: tf.Tensor
    ) -> Example:
        """Return the image of the index and three by chance, each in a quarter."""
        count, full = TILES**2, preprocessing.image_size
        height, width = (side // TILES for side in full)
        small = dataclasses.replace(recipe, image_size=(height, width))
        small_input = dataclasses.replace(preprocessing, image_size=(height, width))
        of_one, alone = DenseBatches(self.of_image), super().example
        seeds = tf.random.split(seed, count + 1)
        others = tf.random.stateless_uniform((count - 1,), seeds[-1], maxval=split.num_examples, dtype=tf.int64)

        def tile(inputs: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            image, target = alone(split, small, small_input, *inputs)
            target = of_one.filled(target)
            return image, target["labels"], target["boxes"]

        images, labels, boxes = tf.map_fn(  # one after the other, so that the graph decodes in one place
            tile,
            (tf.concat([index[None], others], axis=0), seeds[:count]),
            fn_output_signature=(
                tf.TensorSpec((height, width, preprocessing.channels), tf.float32),
                tf.TensorSpec((self.of_image,), tf.int32),
                tf.TensorSpec((self.of_image, 4), tf.float32),
            ),
        )
        rows = [tf.concat(tf.unstack(images[begin : begin + TILES]), axis=1) for begin in range(0, count, TILES)]
        # Of an odd side, a line is left.
        left = [[0, side - TILES * part] for side, part in zip(full, (height, width), strict=True)]
        image = tf.pad(tf.concat(rows, axis=0), [*left, [0, 0]], constant_values=preprocessing.fill()[0])
        part = tf.constant([width / full[1], height / full[0]], tf.float32)
        corners = tf.constant([divmod(number, TILES)[::-1] for number in range(count)], tf.float32) * part
        moved = boxes * tf.tile(part, [2]) + tf.pad(corners, [[0, 0], [0, 2]])[:, None]
        flat = {"labels": tf.reshape(labels, [-1]), "boxes": tf.reshape(moved, (-1, 4))}
        return tf.ensure_shape(image, (*full, preprocessing.channels)), flat


def random_geometry(original_size: tf.Tensor, seed: tf.Tensor, recipe: DenseRecipe) -> Geometry:
    """Large-scale jitter of (h, w) ("Simple Copy-Paste", arXiv 2012.07177), a random window of it, and a flip."""
    scale_seed, place_seed, flip_seed = tf.unstack(tf.random.split(seed, 3))
    original, target = tf.cast(original_size, tf.float32), tf.constant(recipe.image_size, tf.float32)
    low, high = recipe.scale_jitter
    scale = tf.reduce_min(target / original) * tf.random.stateless_uniform((), scale_seed, low, high)
    size = tf.maximum(tf.round(tf.minimum(original * scale, target)), 1.0)
    window = tf.clip_by_value(tf.round(size / scale), 1.0, original)
    place = tf.random.stateless_uniform((2,), place_seed)
    begin = tf.floor(place * (original - window + 1.0))
    flip = tf.random.stateless_uniform((), flip_seed) < 0.5 if recipe.flip else tf.constant(False)
    where = tf.cast(tf.concat([begin, window], axis=0), tf.int32)
    return Geometry(where, tf.cast(size, tf.int32), tf.zeros(2, tf.int32), flip)


def model_geometry(original_size: tf.Tensor, preprocessing: Preprocessing) -> Geometry:
    """Return the geometry of a model's preprocessing: the part of the image that its input shows, and where."""
    sides = tf.unstack(tf.cast(original_size, tf.float64))
    rows, columns = preprocessing.placements(sides, tf)
    (height, width), axes = preprocessing.image_size, (rows, columns)
    lengths = [tf.minimum(p.resized - p.begin, float(n)) for p, n in ((rows, height), (columns, width))]
    # The pixels of the image behind the crop of the resized window.
    firsts = [tf.round(p.first + p.begin * p.window / p.resized) for p in axes]
    windows = [tf.round(n * p.window / p.resized) for p, n in zip(axes, lengths, strict=True)]
    window = tf.cast(tf.stack([*firsts, *windows]), tf.int32)
    corner = tf.cast(tf.stack([rows.before, columns.before]), tf.int32)
    return Geometry(window, tf.cast(tf.stack(lengths), tf.int32), corner, tf.constant(False))


def moved_image(image: tf.Tensor, geometry: Geometry, preprocessing: Preprocessing) -> tf.Tensor:
    """An image (h, w, C), 0..255 -> (height, width, C) float32, 0..255, beside it the fill of the preprocessing."""
    top, left, height, width = tf.unstack(geometry.window)
    window = image[top : top + height, left : left + width]
    resized = tf.cast(graph.resize(window, geometry.size, preprocessing), tf.float32)
    fill = tf.constant(preprocessing.fill(), tf.float32)
    placed = _placed(resized - fill, geometry, preprocessing.image_size, 0.0) + fill
    return tf.ensure_shape(placed, (*preprocessing.image_size, preprocessing.channels))


def moved_target(target: dict[str, tf.Tensor], geometry: Geometry, size: tuple[int, int]) -> dict[str, tf.Tensor]:
    """Return the target of an image -> that of the model's input of a size.

    Of segments that it does not show, none is left; boxes that it does not show have label -1.
    """
    labels = target["labels"]
    if "segments" in target:
        top, left, height, width = tf.unstack(geometry.window)
        window = target["segments"][top : top + height, left : left + width, None]
        segments = tf.maximum(tf.image.resize(window, geometry.size, "nearest"), -1)
        segments = tf.ensure_shape(_placed(segments, geometry, size, -1)[..., 0], size)
        counts = tf.math.bincount(tf.reshape(segments, [-1]) + 1, minlength=tf.shape(labels)[0] + 1)
        seen = counts[1:] > 0
        numbers = tf.concat([[-1], tf.cumsum(tf.cast(seen, tf.int32)) - 1], axis=0)
        return {"labels": labels[seen], "segments": tf.gather(numbers, segments + 1)}
    return _moved_boxes(labels, target["boxes"], geometry, size)


def _moved_boxes(labels: tf.Tensor, boxes: tf.Tensor, geometry: Geometry, size: tuple[int, int]):
    window, resized = tf.cast(geometry.window, tf.float32), tf.cast(geometry.size, tf.float32)
    origin, scale = tf.reverse(window[:2], [0]), tf.reverse(resized / window[2:], [0])  # of x and y
    moved = (tf.reshape(boxes, (-1, 2, 2)) - origin) * scale  # (n, corner, x and y)
    x = moved[..., 0]
    x = tf.where(geometry.flip, resized[1] - tf.reverse(x, [1]), x)
    moved = tf.stack([x, moved[..., 1]], axis=-1)
    seen = tf.clip_by_value(moved, 0.0, tf.reverse(resized, [0]))
    area, seen_area = (tf.reduce_prod(box[:, 1] - box[:, 0], axis=-1) for box in (moved, seen))
    visible = seen_area > _LEAST_VISIBLE * area
    seen += tf.cast(tf.reverse(geometry.corner, [0]), tf.float32)
    shares = seen / tf.constant(size[::-1], tf.float32)
    boxes = tf.concat([(shares[:, 0] + shares[:, 1]) / 2.0, shares[:, 1] - shares[:, 0]], axis=-1)
    return {"labels": tf.where(visible, labels, -1), "boxes": tf.where(visible[:, None], boxes, 0.0)}


def _placed(window: tf.Tensor, geometry: Geometry, size: tuple[int, int], fill) -> tf.Tensor:
    """Return a resized window (h, w, C), flipped and filled up to (height, width, C)."""
    window = tf.cond(geometry.flip, lambda: tf.reverse(window, [1]), lambda: window)
    after = tf.constant(size) - geometry.corner - geometry.size
    paddings = tf.concat([tf.stack([geometry.corner, after], axis=1), [[0, 0]]], axis=0)
    return tf.pad(window, paddings, constant_values=tf.cast(fill, window.dtype))

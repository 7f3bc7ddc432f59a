"""Pictures with boxes as the data set of a training run, and mosaics of them."""

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing, UserError
from training.data.annotations.boxes import BoxData, Picture
from training.data.dataset import DataSet, Split, decoding_problem, problems_of, summarize_problems
from training.data.dense import DenseBatches
from training.recipes.dense import DenseRecipe, DetectRecipe

# Rows and columns of a mosaic.
_TILES = 2


def box_data_set(data: BoxData) -> DataSet:
    """The data set of pictures with boxes; `DenseBatches` describes their targets.

    Every picture is decoded once. Raises UserError for those that cannot be.
    """
    files = [str(picture.file) for picture in data.all]
    if bad := problems_of(files, lambda file: decoding_problem(tf.io.read_file(file))):
        raise UserError(
            f"{len(bad)} of {len(files)} pictures cannot be read: {summarize_problems(bad)}; repair them, or remove "
            "them and their boxes."
        )
    most = max(1, *(len(picture.classes) for picture in data.all))
    train, evaluation = _split(data.train), _split(data.evaluation)
    batches = BoxBatches(most * _TILES**2, most)
    return DataSet(data.labels, train, evaluation, held_out=not data.has_split, batches=batches)


def _split(pictures: Sequence[Picture]) -> Split:
    files = tf.constant([str(picture.file) for picture in pictures])
    corners = tf.constant(np.concatenate([picture.corners for picture in pictures]))
    classes = tf.constant(np.concatenate([picture.classes for picture in pictures]))
    ends = tf.constant(np.cumsum([0, *(len(picture.classes) for picture in pictures)]))

    def target(index: tf.Tensor) -> dict[str, tf.Tensor]:
        begin, end = ends[index], ends[index + 1]
        return {"labels": classes[begin:end], "boxes": corners[begin:end]}

    return Split(
        len(pictures),
        lambda index: (tf.io.read_file(files[index]), tf.constant(-1)),
        lambda index: str(pictures[index].file),
        fingerprint=_fingerprint(pictures),
        target=target,
    )


def _fingerprint(pictures: Sequence[Picture]) -> int:
    found = 0
    for picture in pictures:
        parts = (picture.file.name.encode(), picture.corners.tobytes(), picture.classes.tobytes())
        found = zlib.crc32(b"|".join(parts), found)
    return found


@dataclasses.dataclass(frozen=True)
class BoxBatches(DenseBatches):
    """Batches of pictures with boxes, some of them mosaics."""

    of_picture: int
    """Boxes of one picture at most; `num_targets` is as many as four can have."""

    def example(
        self, split: Split, recipe: DenseRecipe, preprocessing: Preprocessing, index: tf.Tensor, seed: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """One augmented picture or, with the probability of the recipe, four of them; see `DenseBatches.example`."""
        single = super().example
        if not isinstance(recipe, DetectRecipe) or not recipe.mosaic:
            return single(split, recipe, preprocessing, index, seed)
        own, drawn = tf.unstack(tf.random.split(tf.random.experimental.stateless_fold_in(seed, 1)))
        return tf.cond(
            tf.random.stateless_uniform((), own) < recipe.mosaic,
            lambda: self._mosaic(split, recipe, preprocessing, index, drawn),
            lambda: self._alone(single(split, recipe, preprocessing, index, seed)),
        )

    def _alone(self, example: tuple[tf.Tensor, dict[str, tf.Tensor]]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        return example[0], self.filled(example[1])

    def _mosaic(
        self, split: Split, recipe: DenseRecipe, preprocessing: Preprocessing, index: tf.Tensor, seed: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """The picture of the index and three by chance, each in a quarter."""
        count, full = _TILES**2, preprocessing.image_size
        height, width = (side // _TILES for side in full)
        small = dataclasses.replace(recipe, image_size=(height, width))
        small_input = dataclasses.replace(preprocessing, image_size=(height, width))
        of_one, alone = DenseBatches(self.of_picture), super().example
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
                tf.TensorSpec((self.of_picture,), tf.int32),
                tf.TensorSpec((self.of_picture, 4), tf.float32),
            ),
        )
        rows = [tf.concat(tf.unstack(images[begin : begin + _TILES]), axis=1) for begin in range(0, count, _TILES)]
        # Of an odd side, a line is left.
        left = [[0, side - _TILES * part] for side, part in zip(full, (height, width), strict=True)]
        image = tf.pad(tf.concat(rows, axis=0), [*left, [0, 0]], constant_values=preprocessing.fill()[0])
        part = tf.constant([width / full[1], height / full[0]], tf.float32)
        corners = tf.constant([divmod(number, _TILES)[::-1] for number in range(count)], tf.float32) * part
        moved = boxes * tf.tile(part, [2]) + tf.pad(corners, [[0, 0], [0, 2]])[:, None]
        flat = {"labels": tf.reshape(labels, [-1]), "boxes": tf.reshape(moved, (-1, 4))}
        return tf.ensure_shape(image, (*full, preprocessing.channels)), flat

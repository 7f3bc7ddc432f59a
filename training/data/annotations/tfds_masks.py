"""Data sets of TensorFlow Datasets with images and masks."""

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from training.data.annotations.masks import IGNORED, segments_of_values, two_values
from training.data.annotations.segments import UNCOUNTED, Segments, ignored_sentence
from training.data.dataset import Split
from training.data.sources import tfds_builder, tfds_eval_split, tfds_records
from training.options.segment import SceneOptions


def tfds_scenes(options: SceneOptions) -> tuple[tuple[str, ...], tuple[Split, Split], int]:
    """The names of the classes, the training and evaluation images of a data set, and the classes of an image at most.

    The segments are the classes.

    The image is the feature with three channels, or the one named image, and the mask the only one with one channel.
    All masks are read once, for their values: the classes are named by the data set or, if it has no names, by their
    numbers, and 255 is ignored beside other classes.

    Raises UserError if the data set has no such features, or a mask that does not fit its image.
    """
    name = options.data.partition(":")[2]
    builder = tfds_builder(name, options.data_dir)
    keys = _keys(builder)
    names = options.train_split, options.eval_split or tfds_eval_split(builder)
    counts = [np.stack(_value_counts(builder, split, *keys)) for split in names]
    given, both = getattr(builder.info.features[keys[1]], "names", None) or (), np.concatenate(counts)
    seen = np.flatnonzero(both.any(axis=0)).tolist()
    value = two_values({UNCOUNTED if each == IGNORED else each for each in seen}, len(given))
    one = IGNORED if value == UNCOUNTED else value
    if one is not None:
        print(f"The masks of {name} have the values 0 and {one}, read as 0 and 1.")
    classes = [each for each in seen if each != IGNORED or one == IGNORED]
    most = int(np.count_nonzero(both[:, classes], axis=1).max())
    largest = 1 if one is not None else max(classes, default=-1)
    labels = tuple(given or map(str, range(largest + 1)))
    if largest >= len(labels):
        raise UserError(
            f"The masks of {name} have the value {largest}, but it names {len(labels)} classes from 0 on; choose "
            "another data set."
        )
    if len(labels) < 2:
        raise UserError(
            f"The masks of {name} have one class at most (255 is not counted), and two are needed; choose others."
        )
    train, evaluation = (_split(builder, split, *keys, len(labels), one) for split in names)
    for split, rows in zip(names, [] if one == IGNORED else counts, strict=False):
        if sentence := ignored_sentence(np.array([rows.sum(), 0, rows[:, IGNORED].sum()]), split):
            print(sentence)
    return labels, (train, evaluation), most


def _keys(builder) -> tuple[str, str]:
    """Return the names of the features of image and mask."""
    import tensorflow_datasets as tfds

    pictures = {key: f.shape[-1] for key, f in builder.info.features.items() if isinstance(f, tfds.features.Image)}
    images = [key for key, channels in pictures.items() if channels == 3 or key == "image"]
    masks = [key for key, channels in pictures.items() if channels == 1 and key != "image"]
    if len(images) != 1 or len(masks) != 1:
        found = ", ".join(f"{key} of {channels} channels" for key, channels in pictures.items()) or "none"
        raise UserError(
            f"The data set {builder.name} should have one image and one mask, which has one channel, but has the "
            f"pictures {found}; save images and masks in folders, and give --data that folder."
        )
    return images[0], masks[0]


def _split(builder, split: str, image_key: str, mask_key: str, num_classes: int, one: int | None) -> Split:
    records, features = tfds_records(builder, split), builder.info.features

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(features.deserialize_example(records.read(index))[image_key], tf.uint8), tf.constant(-1)

    def values(index: tf.Tensor) -> tf.Tensor:
        mask = tf.cast(features.deserialize_example(records.read(index))[mask_key][..., 0], tf.int32)
        return mask if one is None else tf.where(mask == one, 1, mask)

    def target(index: tf.Tensor) -> dict[str, tf.Tensor]:
        mask = values(index)
        segments = tf.where(mask == IGNORED, UNCOUNTED, mask)
        return {"labels": tf.constant(np.arange(num_classes, dtype=np.int32)), "segments": segments}

    def truth(index: int) -> Segments:
        return segments_of_values(values(tf.constant(index, tf.int64)).numpy().astype(np.uint8))

    names = records.name, records.explain_damage, records.fingerprint
    return Split(len(records), read, *names, target=target, truth=truth)


def _value_counts(builder, split: str, image_key: str, mask_key: str) -> list[np.ndarray]:
    """How many pixels of each mask of a split have each value, (256,)."""
    records, features = tfds_records(builder, split), builder.info.features

    def count(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        decoded = features.deserialize_example(records.read(index))
        image, mask = decoded[image_key], tf.cast(decoded[mask_key], tf.int32)
        same = tf.reduce_all(tf.shape(image)[:2] == tf.shape(mask)[:2])
        counts = tf.math.bincount(tf.reshape(mask, [-1]), minlength=IGNORED + 1, maxlength=IGNORED + 1)
        return same, tf.reduce_max(mask), counts

    rows = []
    counted = tf.data.Dataset.range(len(records)).map(count, tf.data.AUTOTUNE)
    for number, (same, largest, counts) in enumerate(counted.as_numpy_iterator()):
        if not same or largest > IGNORED:
            found = f"has {largest}" if same else "has another size"
            raise UserError(
                f"The mask of {records.name(number)} should have the size of its image and class numbers from 0 to "
                f"254, but {found}; choose splits without it."
            )
        rows.append(counts)
    return rows

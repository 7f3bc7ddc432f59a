"""Images with masks, read by number: batches for training, single ones for the evaluation."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from keras_vit import Preprocessing

# The pixels of a mask with this value are not counted.
IGNORED = 255


@dataclasses.dataclass(frozen=True)
class Scenes:
    """Images and their masks."""

    num_examples: int
    read: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    """int64 index -> (image uint8 (h, w, C), mask uint8 (h, w)), of one size; in a graph."""
    name: Callable[[int], str]
    """What to call an image in a message."""
    held_out: bool = False
    """Whether a rule chose these images among all of a folder, so that a new image may change which they are."""

    def in_order(self) -> tf.data.Dataset:
        """Return each image with its mask once."""
        return tf.data.Dataset.range(self.num_examples).map(self.read, tf.data.AUTOTUNE, deterministic=True)

    def batches(self, preprocessing: Preprocessing, batch_size: int, seed: int) -> tf.data.Dataset:
        """Return endless training batches: images (B, h, w, C) in the model's range, classes (B, h, w), weights."""
        numbers = tf.data.Dataset.range(self.num_examples).shuffle(self.num_examples, seed=seed).repeat()

        def example(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            image, mask = self.read(number)
            classes = tf.image.resize(mask[..., None], preprocessing.image_size, "nearest")[..., 0]  # (h, w)
            counted = tf.cast(classes != IGNORED, tf.float32)
            return (
                as_input(image, preprocessing),
                tf.where(classes == IGNORED, tf.zeros_like(classes), classes),
                counted,
            )

        data = numbers.map(example, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return data.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def as_input(image: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """Return an image as the model takes it: (h, w, C)."""
    return tf.ensure_shape(preprocessing(image), (*preprocessing.image_size, preprocessing.channels))

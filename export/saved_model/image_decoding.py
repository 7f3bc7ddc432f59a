"""Decodes batches of image files inside a served graph: reports invalid images by index, and limits their memory.

The error of a decoder does not name the element of the batch. So each file is an element of a tf.data pipeline: those
that fail are missing from the result, and the error of the request lists their indices.
"""

import tensorflow as tf

from keras_vit import Preprocessing
from keras_vit.images.formats import LARGEST_SERVED, format_list


def decode_batch(image_bytes: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """Decode image files (B,) in parallel to (B, height, width, channels) float32 in the value range of the model.

    An element of another format, or with more than LARGEST_SERVED pixels, is INVALID_ARGUMENT with its index.
    """
    shape = (*preprocessing.image_size, preprocessing.channels)
    count = tf.size(image_bytes, out_type=tf.int64)

    @tf.autograph.experimental.do_not_convert  # the rewriting takes longer than the tracing
    def decode(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return index, tf.ensure_shape(
            tf.cast(preprocessing.read(image_bytes[index], most_pixels=LARGEST_SERVED), tf.float32), shape
        )

    images = tf.data.Dataset.range(count).map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    images = images.ignore_errors()
    end = tf.data.Dataset.from_tensors((tf.constant(-1, tf.int64), tf.zeros(shape)))  # for an empty batch
    indices, pixels = images.concatenate(end).batch(count + 1).get_single_element()
    missing = tf.sets.difference(tf.range(count)[None], indices[None, :-1]).values
    limit = f"no whole {format_list()} of at most {LARGEST_SERVED // 10**6} megapixels"
    message = tf.strings.format(f"image_bytes{{}}: {limit}", missing)  # image_bytes[3 5]: no whole …
    with tf.control_dependencies([tf.debugging.Assert(tf.size(missing) == 0, [message])]):
        return preprocessing.normalize(tf.ensure_shape(tf.identity(pixels[:-1]), (None, *shape)))

"""Random changes to training images, each a pure function of an image and a seed: the same seed, the same change.

Axes: H W C. Images are uint8 or float32 with values 0..255; seeds are two integers, as tf.random.stateless_* takes.
"""

import tensorflow as tf

# The area and aspect of Inception crops, as vit_jax and big_vision draw them.
_CROP_AREA = (0.05, 1.0)
_CROP_ASPECT = (3 / 4, 4 / 3)


def inception_crop(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """A random window of 5 to 100 % of the area and aspect 3/4 to 4/3: (H, W, C) -> (h, w, C)."""
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros((0, 0, 4)),
        seed,
        min_object_covered=0.0,
        area_range=_CROP_AREA,
        aspect_ratio_range=_CROP_ASPECT,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.slice(image, begin, size)
    window.set_shape((None, None, image.shape[-1]))
    return window


def random_flip(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Left and right exchanged with probability 1/2."""
    return tf.image.stateless_random_flip_left_right(image, seed)


def random_shift(image: tf.Tensor, seed: tf.Tensor, pixels: int) -> tf.Tensor:
    """Moved by up to `pixels` in each direction, evenly over all offsets; what enters is 0. Shape unchanged."""
    padded = tf.pad(image, [[pixels, pixels], [pixels, pixels], [0, 0]])
    offset = tf.random.stateless_uniform((2,), seed, 0, 2 * pixels + 1, tf.int32)
    height, width, channels = image.shape
    return tf.slice(padded, [offset[0], offset[1], 0], [height, width, channels])

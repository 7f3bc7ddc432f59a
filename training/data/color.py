"""Color augmentation of batches: keras-cv's vectorized layers with amounts that are drawn from the seed of each image.

3-Augment: "DeiT III" (arXiv 2204.07118) and facebookresearch/deit `augment.py`: grayscale, solarization or Gaussian
blur, then color jitter. The amounts come in as tensors through `augment_images(images, transformations)`, so that
nothing is drawn from the state of a layer.

The layers compute some things differently from torchvision, so the images are not those of DeiT III bit for bit:

* Brightness is added, not multiplied. The addition is the one that moves the mean of the image as the factor would.
* Contrast is stretched about the mean of each channel, not about the mean of the grayscale image.
* Saturation is that of HSV, not a blend with the grayscale image.
* The order is always brightness, contrast, saturation; torchvision shuffles it. Neither changes the hue.

Grayscale and solarization are those of PIL but for rounding. The blur is a true Gaussian, which PIL approximates with
boxes.

Axes: B batch, h rows, w columns, C channels. Images are 0..255 with 1 or 3 channels; draws are uniform in [0, 1).
"""

import functools
import types
from collections.abc import Callable

import tensorflow as tf

# Independent draws for an image: operation of 3-Augment, blur, brightness, contrast, saturation.
_NUM_DRAWS = 5
# What the seed of an image is folded with, so that these draws are not those of the other augmentations. 1 is taken by
# the batches (`pipeline.py`).
_COLORS = 2
# DeiT III: PIL's default threshold of solarization, and the smallest and largest sigma of the blur in pixels.
_SOLARIZE_THRESHOLD, _BLUR_SIGMA = 128.0, (0.1, 2.0)
# Three of the largest sigmas to each side.
_BLUR_RADIUS = 6


def color_draws(seed: tf.Tensor) -> tf.Tensor:
    """All that is random about the colors of one image: seed (2,) -> (5,) float32."""
    return tf.random.stateless_uniform((_NUM_DRAWS,), tf.random.fold_in(seed, _COLORS))


def augment_colors(images: tf.Tensor, draws: tf.Tensor, *, jitter: float, three: bool) -> tf.Tensor:
    """3-Augment, if `three`, then color jitter up to `jitter`: (B, h, w, C) and (B, 5) -> (B, h, w, C) uint8.

    The result for an image does not depend on the other images of the batch.
    """
    images = tf.cast(images, tf.float32)
    if three:
        images = three_augment(images, draws[:, 0], draws[:, 1])
    if jitter:
        images = color_jitter(images, draws[:, 2:], jitter)
    return tf.saturate_cast(tf.round(images), tf.uint8)


def color_jitter(images: tf.Tensor, draws: tf.Tensor, amount: float) -> tf.Tensor:
    """Brightness, contrast and saturation times factors between 1 - amount and 1 + amount: float32, draws (B, 3).

    Grayscale images have no saturation.
    """
    layers = _layers()
    factors = 1.0 + amount * (2.0 * draws - 1.0)
    brightness, contrast, saturation = tf.unstack(factors, axis=1)
    means = tf.reduce_mean(images, axis=(1, 2, 3))
    images = layers.brightness.augment_images(images, ((brightness - 1.0) * means)[:, None, None, None])
    images = layers.contrast.augment_images(images, contrast[:, None, None, None])
    if images.shape[-1] == 3:  # the layer multiplies by x / (1 - x)
        images = layers.saturation.augment_images(images, saturation / (1.0 + saturation))
    return images


def three_augment(images: tf.Tensor, choice_draws: tf.Tensor, blur_draws: tf.Tensor) -> tf.Tensor:
    """One of grayscale, solarization and Gaussian blur for each image, all as likely: float32, draws (B,).

    Grayscale images may stay as they are, since the first operation does nothing to them.
    """
    operations: tuple[Callable[[tf.Tensor, tf.Tensor], tf.Tensor], ...] = (grayscale, solarize, gaussian_blur)
    choices = tf.cast(choice_draws * len(operations), tf.int32)
    # Not by tf.dynamic_partition: TensorFlow 2.21 mixed up the shapes of its parts in an optimized graph.
    rows = [tf.cast(tf.where(choices == number)[:, 0], tf.int32) for number in range(len(operations))]
    changed = [
        operation(tf.gather(images, part), tf.gather(blur_draws, part))
        for operation, part in zip(operations, rows, strict=True)
    ]
    result = tf.dynamic_stitch(rows, changed)
    result.set_shape(images.shape)
    return result


def grayscale(images: tf.Tensor, _: tf.Tensor | None = None) -> tf.Tensor:
    """The luma in every channel."""
    return images if images.shape[-1] == 1 else _layers().grayscale.augment_images(images)


def solarize(images: tf.Tensor, _: tf.Tensor | None = None) -> tf.Tensor:
    """Values from 128 on inverted."""
    return _layers().solarization.augment_images(images, {"additions": 0.0, "thresholds": _SOLARIZE_THRESHOLD})


def gaussian_blur(images: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    """Blurred with a sigma between 0.1 and 2 pixels; beyond the border the outermost pixels are repeated, as in PIL.

    The layer pads with zeros, takes one image at a time, and makes its kernels from a number.
    """
    layer, size = _layers().blur, 2 * _BLUR_RADIUS + 1
    low, high = _BLUR_SIGMA

    def blurred(image_and_sigma: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        image, sigma = image_and_sigma
        kernel = layer.get_kernel(sigma, size)
        kernels = tf.reshape(kernel, (size, 1, 1, 1)), tf.reshape(kernel, (1, size, 1, 1))
        return layer.augment_image(image, kernels)

    padded = images
    for axis in (1, 2):
        last = images.shape[axis] - 1
        places = tf.clip_by_value(tf.range(-_BLUR_RADIUS, last + 1 + _BLUR_RADIUS), 0, last)
        padded = tf.gather(padded, places, axis=axis)
    spec = tf.TensorSpec(padded.shape[1:], tf.float32)
    padded = tf.map_fn(blurred, (padded, low + draws * (high - low)), fn_output_signature=spec)
    return padded[:, _BLUR_RADIUS:-_BLUR_RADIUS, _BLUR_RADIUS:-_BLUR_RADIUS]


@functools.cache
def _layers() -> types.SimpleNamespace:
    """The layers of keras-cv, of which only `augment_images` is used.

    Each makes a random generator that is never drawn from. It is created outside of graphs, and from a seed, because
    TensorFlow refuses one without a seed where operations have to be deterministic. The constructors also require
    factors, which are not used. The dtype is fixed because mixed precision must not reach the images.
    """
    # Imported here alone and only by the runs that use it: the import takes a second more, because it loads all of
    # keras-cv's models and TensorFlow Datasets.
    from keras_cv import layers

    common = {"seed": 1, "dtype": "float32"}
    with tf.init_scope():
        return types.SimpleNamespace(
            brightness=layers.RandomBrightness(0.0, value_range=(0, 255), **common),
            contrast=layers.RandomContrast((0, 255), 0.0, **common),
            saturation=layers.RandomSaturation(0.5, **common),
            grayscale=layers.Grayscale(output_channels=3, **common),
            solarization=layers.Solarization((0, 255), **common),
            blur=layers.RandomGaussianBlur(2 * _BLUR_RADIUS + 1, 0.0, **common),
        )

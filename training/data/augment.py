"""Random changes to training images, each a pure function of them and a seed: the same seed, the same change.

Axes: B batch, h rows, w columns, C channels. Single images are uint8 or float32 with values
0..255; seeds are two integers, as tf.random.stateless_* takes. keras-cv's MixUp and CutMix draw a weight and a partner
for each image from the state of the layer; here they come from the seed, and are those of big_vision and BiT.
"""

import functools
import types
from collections.abc import Callable

import tensorflow as tf

from keras_vit import Preprocessing
from keras_vit.images import graph
from training.data import randaugment

# The area and aspect of Inception crops, as vit_jax and big_vision draw them.
_CROP_AREA = (0.05, 1.0)
_CROP_ASPECT = (0.75, 1.33)
# Of random erasing (arXiv 1708.04896): area, aspect, and windows tried until one fits.
_ERASED_AREA, _ERASED_ASPECT, _ERASING_TRIALS = (0.02, 0.4), (0.3, 1 / 0.3), 10
_NUM_DRAWS = 5  # independent draws for an image: operation of 3-Augment, blur, brightness, contrast, saturation
# What the seed of an image is folded with, so that these draws are not those of the other augmentations. 1 is taken by
# the batches (`pipeline.py`).
_COLORS = 2
# DeiT III: PIL's default threshold of solarization, and the smallest and largest sigma of the blur in pixels.
_SOLARIZE_THRESHOLD, _BLUR_SIGMA = 128.0, (0.1, 2.0)
_BLUR_RADIUS = 6  # three of the largest sigmas to each side


def inception_window(
    shape: tf.Tensor, seed: tf.Tensor, area: tuple[float, float] = _CROP_AREA
) -> tuple[tf.Tensor, tf.Tensor]:
    """Corner and size, (y, x, 0) and (h, w, C), of a random window of an image of `shape` with a share of its area."""
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        tf.zeros((0, 0, 4)),
        seed,
        min_object_covered=0.0,
        area_range=area,
        aspect_ratio_range=_CROP_ASPECT,
        use_image_if_no_bounding_boxes=True,
    )
    return begin, size


def inception_crop(image: tf.Tensor, seed: tf.Tensor, area: tuple[float, float] = _CROP_AREA) -> tf.Tensor:
    """A random window of aspect 0.75 to 1.33 and 5 to 100% of the area, or `area`: (height, width, C) -> (h, w, C)."""
    window = tf.slice(image, *inception_window(tf.shape(image), seed, area))
    window.set_shape((None, None, image.shape[-1]))
    return window


def decode_and_inception_crop(data: tf.Tensor, seed: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """Return the same window of the image in a file: of a JPEG nothing else is decoded, which takes half the time.

    Colors at the window's edges may be a few values off, for JPEGs store them at half the resolution.
    """

    def from_jpeg() -> tf.Tensor:
        jpeg = graph.checked_jpeg(data)
        begin, size = inception_window(tf.io.extract_jpeg_shape(jpeg), seed)
        window = tf.concat([begin[:2], size[:2]], axis=0)
        method = graph.dct_method(accurate=preprocessing.library != "tensorflow")
        # libjpeg repeats gray as we do, at no cost; its gray of colors is not quite ours.
        if preprocessing.channels == 3:
            return tf.io.decode_and_crop_jpeg(jpeg, window, channels=3, dct_method=method)
        return preprocessing.to_channels(tf.io.decode_and_crop_jpeg(jpeg, window, dct_method=method))

    def from_any() -> tf.Tensor:
        return preprocessing.to_channels(inception_crop(preprocessing.decode(data), seed))

    plain = tf.io.is_jpeg(data)
    if preprocessing.exif_orientation:  # a turned photograph has another shape than its file
        plain = tf.cond(plain, lambda: tf.equal(graph.orientation(data), 1), lambda: tf.constant(False))
    window = tf.cond(plain, from_jpeg, from_any)
    window.set_shape((None, None, preprocessing.channels))
    return window


def random_crop(image: tf.Tensor, seed: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """Return a window of `size` at a uniformly random place: (height, width, C) -> (h, w, C)."""
    return tf.image.stateless_random_crop(image, (*size, image.shape[-1]), seed)


def resize_small(image: tf.Tensor, side: int, preprocessing: Preprocessing) -> tf.Tensor:
    """The smaller side to `side` with the filter of the model, the aspect kept: (height, width, C) -> (h, w, C)."""
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    size = tf.cast(tf.round(shape * (side / tf.reduce_min(shape))), tf.int32)
    return graph.resize(image, size, preprocessing)


def random_flip(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Left and right exchanged with probability 1/2."""
    return tf.image.stateless_random_flip_left_right(image, seed)


def random_shift(image: tf.Tensor, seed: tf.Tensor, pixels: int, fill: int = 0) -> tf.Tensor:
    """Moved by up to `pixels` in each direction, uniformly; pixels from outside are `fill`. Shape unchanged."""
    padded = tf.pad(image, [[pixels, pixels], [pixels, pixels], [0, 0]], constant_values=tf.cast(fill, image.dtype))
    offset = tf.random.stateless_uniform((2,), seed, 0, 2 * pixels + 1, tf.int32)
    height, width, channels = image.shape
    return tf.slice(padded, [offset[0], offset[1], 0], [height, width, channels])


def random_erasing(image: tf.Tensor, seed: tf.Tensor, probability: float) -> tf.Tensor:
    """With `probability` noise in the place of a window of 2 to 40% of the area; (h, w, C) uint8."""
    chance, area, aspect, corner, noise = tf.unstack(tf.random.split(seed, 5))
    height, width, _ = image.shape
    areas = tf.random.stateless_uniform((_ERASING_TRIALS,), area, *_ERASED_AREA) * height * width
    logarithms = tf.math.log(tf.constant(_ERASED_ASPECT))
    aspects = tf.exp(tf.random.stateless_uniform((_ERASING_TRIALS,), aspect, logarithms[0], logarithms[1]))
    sizes = tf.cast(tf.round(tf.stack([tf.sqrt(areas * aspects), tf.sqrt(areas / aspects)], axis=1)), tf.int32)
    fits = tf.reduce_all(sizes < (height, width), axis=1)
    size = sizes[tf.argmax(fits)]  # the first that fits
    place = tf.random.stateless_uniform((2,), corner)
    begin = tf.cast(place * tf.cast((height, width) - size + 1, tf.float32), tf.int32)
    erased = tf.reduce_any(fits) & (tf.random.stateless_uniform((), chance) < probability)
    window = _window(begin, begin + size, height, width) & erased
    random = tf.cast(tf.random.stateless_uniform(image.shape, noise, 0, 256, tf.int32), tf.uint8)
    return tf.where(window, random, image)


def _window(begin: tf.Tensor, end: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Whether a pixel lies in a window: (h, w, 1) bool."""
    rows, columns = (
        (tf.range(side) >= begin[axis]) & (tf.range(side) < end[axis]) for axis, side in enumerate((height, width))
    )
    return (rows[:, None] & columns[None, :])[:, :, None]


def beta(seed: tf.Tensor, p: float) -> tf.Tensor:
    """Return a draw from Beta(p, p). In float64: of small p, both gammas may be nothing in float32."""
    gammas = tf.random.stateless_gamma((2,), seed, tf.constant(p, tf.float64), dtype=tf.float64)
    return tf.cast(gammas[0] / tf.reduce_sum(gammas), tf.float32)


def mixup(pairs: tuple, seed: tf.Tensor, p: float, *, mostly_own: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Return images and labels mixed with those of their partners, the whole batch with one weight of Beta(p, p).

    Args:
        pairs: (images (B, h, w, C), labels (B, K)) of the batch, and the same of the partners; floats.
        mostly_own: take the larger of the weight and the rest for each image itself (big_vision), or the weight (BiT).
    """
    weight = beta(seed, p)
    if mostly_own:
        weight = tf.maximum(weight, 1.0 - weight)
    return tuple(own * weight + other * (1.0 - weight) for own, other in zip(*pairs, strict=True))


def cutmix(pairs: tuple, seed: tf.Tensor, p: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a window of the partner in each image, the same for the whole batch, and the labels by the areas.

    arXiv 1905.04899: about 1 - Beta(p, p) of the area, about a center anywhere, as far as it is inside. Arguments as of
    `mixup`.
    """
    (images, labels), (other_images, other_labels) = pairs
    weight_seed, center_seed = tf.unstack(tf.random.split(seed))
    _, height, width, _ = images.shape
    sides = tf.constant((height, width))
    size = tf.cast(tf.cast(sides, tf.float32) * tf.sqrt(1.0 - beta(weight_seed, p)), tf.int32)
    center = tf.cast(tf.random.stateless_uniform((2,), center_seed) * tf.cast(sides, tf.float32), tf.int32)
    begin = tf.maximum(center - size // 2, 0)
    end = tf.minimum(center + size // 2, sides)
    window = _window(begin, end, height, width)
    weight = 1.0 - tf.reduce_mean(tf.cast(window, tf.float32))
    return tf.where(window, other_images, images), labels * weight + other_labels * (1.0 - weight)


def color_draws(seed: tf.Tensor) -> tf.Tensor:
    """Return all that is random about the colors of one image: seed (2,) -> (5,) float32."""
    return tf.random.stateless_uniform((_NUM_DRAWS,), tf.random.fold_in(seed, _COLORS))


def augment_colors(images: tf.Tensor, draws: tf.Tensor, *, jitter: float, three: bool) -> tf.Tensor:
    """3-Augment, if `three`, then color jitter up to `jitter`: (B, h, w, C), 0..255, and (B, 5) -> (B, h, w, C) uint8.

    The result for an image does not depend on the other images of the batch. 3-Augment is that of "DeiT III" (arXiv
    2204.07118) and facebookresearch/deit `augment.py`: grayscale, solarization or Gaussian blur, then color jitter. The
    vectorized layers of keras-cv take the amounts as tensors, so that nothing is drawn from the state of a layer. They
    compute some things differently from torchvision, so the images are not those of DeiT III bit for bit:

    * Brightness is added, not multiplied. The addition is the one that moves the mean of the image as the factor would.
    * Contrast is stretched about the mean of each channel, not about the mean of the grayscale image.
    * Saturation is that of HSV, not a blend with the grayscale image.
    * The order is always brightness, contrast, saturation; torchvision shuffles it. Neither changes the hue.

    Grayscale and solarization are those of PIL but for rounding; the blur is a true Gaussian, which PIL approximates.
    """
    images = tf.cast(images, tf.float32)
    if three:
        images = three_augment(images, draws[:, 0], draws[:, 1])
    if jitter:
        images = color_jitter(images, draws[:, 2:], jitter)
    return tf.saturate_cast(tf.round(images), tf.uint8)


def color_jitter(images: tf.Tensor, draws: tf.Tensor, amount: float) -> tf.Tensor:
    """Brightness, contrast and, of RGB, saturation times factors of 1 - amount to 1 + amount: float32, draws (B, 3)."""
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
    """Return one of grayscale, solarization and Gaussian blur for each image, all as likely: float32, draws (B,).

    Grayscale images may stay as they are, since the first operation does nothing to them.
    """
    operations: tuple[Callable[[tf.Tensor, tf.Tensor], tf.Tensor], ...] = (grayscale, solarize, gaussian_blur)
    choices = tf.cast(choice_draws * len(operations), tf.int32)
    # Not by tf.dynamic_partition: TensorFlow 2.21 mixed up the shapes of its parts in an optimized graph.
    rows = [tf.cast(tf.where(choices == number)[:, 0], tf.int32) for number in range(len(operations))]
    parts = ((tf.gather(images, part), tf.gather(blur_draws, part)) for part in rows)
    result = tf.dynamic_stitch(rows, [operation(*part) for operation, part in zip(operations, parts, strict=True)])
    result.set_shape(images.shape)
    return result


def grayscale(images: tf.Tensor, _: tf.Tensor | None = None) -> tf.Tensor:
    """Return the luma in every channel."""
    return images if images.shape[-1] == 1 else tf.image.grayscale_to_rgb(tf.image.rgb_to_grayscale(images))


def solarize(images: tf.Tensor, _: tf.Tensor | None = None) -> tf.Tensor:
    """Values from 128 on inverted."""
    return randaugment.solarize(images, _SOLARIZE_THRESHOLD)


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
    """Return the layers of keras-cv, of which only `augment_images` is used.

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
            blur=layers.RandomGaussianBlur(2 * _BLUR_RADIUS + 1, 0.0, **common),
        )

"""Random changes to training images, each a pure function of them and a seed: the same seed, the same change.

Axes: B batch, h rows, w columns, C channels. Single images are uint8 or float32 with values
0..255; seeds are two integers, as tf.random.stateless_* takes. keras-cv's MixUp and CutMix draw a weight and a partner
for each image from the state of the layer; here they come from the seed, and are those of big_vision and BiT.
"""

import tensorflow as tf

from keras_vit import Preprocessing
from keras_vit.images import graph

# The area and aspect of Inception crops, as vit_jax and big_vision draw them.
_CROP_AREA = (0.05, 1.0)
_CROP_ASPECT = (0.75, 1.33)
# Of random erasing (arXiv 1708.04896): area, aspect, and windows tried until one fits.
_ERASED_AREA, _ERASED_ASPECT, _ERASING_TRIALS = (0.02, 0.4), (0.3, 1 / 0.3), 10


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
    """A random window of aspect 0.75 to 1.33 and 5 to 100 % of the area, or `area`: (height, width, C) -> (h, w, C)."""
    window = tf.slice(image, *inception_window(tf.shape(image), seed, area))
    window.set_shape((None, None, image.shape[-1]))
    return window


def decode_and_inception_crop(data: tf.Tensor, seed: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """The same window of the image in a file: of a JPEG nothing else is decoded, which takes half the time.

    Colors at the window's edges may be a few values off, for JPEGs store them at half the resolution.
    """

    def from_jpeg() -> tf.Tensor:
        begin, size = inception_window(tf.io.extract_jpeg_shape(data), seed)
        window = tf.concat([begin[:2], size[:2]], axis=0)
        method = graph.dct_method(accurate=preprocessing.library != "tensorflow")
        # libjpeg repeats gray as we do, at no cost; its gray of colors is not quite ours.
        if preprocessing.channels == 3:
            return tf.io.decode_and_crop_jpeg(data, window, channels=3, dct_method=method)
        return preprocessing.to_channels(tf.io.decode_and_crop_jpeg(data, window, dct_method=method))

    def from_any() -> tf.Tensor:
        return preprocessing.to_channels(inception_crop(preprocessing.decode(data), seed))

    plain = tf.io.is_jpeg(data)
    if preprocessing.exif_orientation:  # a turned photograph has another shape than its file
        plain = tf.cond(plain, lambda: tf.equal(graph.orientation(data), 1), lambda: tf.constant(False))
    window = tf.cond(plain, from_jpeg, from_any)
    window.set_shape((None, None, preprocessing.channels))
    return window


def random_crop(image: tf.Tensor, seed: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """A window of `size` at a uniformly random place: (height, width, C) -> (h, w, C)."""
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
    """With `probability` noise in the place of a window of 2 to 40 % of the area; (h, w, C) uint8."""
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
    """A draw from Beta(p, p). In float64: of small p, both gammas may be nothing in float32."""
    gammas = tf.random.stateless_gamma((2,), seed, tf.constant(p, tf.float64), dtype=tf.float64)
    return tf.cast(gammas[0] / tf.reduce_sum(gammas), tf.float32)


def mixup(pairs: tuple, seed: tf.Tensor, p: float, *, mostly_own: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Images and labels mixed with those of their partners, the whole batch with one weight of Beta(p, p).

    Args:
        pairs: (images (B, h, w, C), labels (B, K)) of the batch, and the same of the partners; floats.
        mostly_own: take the larger of the weight and the rest for each image itself (big_vision), or the weight (BiT).
    """
    weight = beta(seed, p)
    if mostly_own:
        weight = tf.maximum(weight, 1.0 - weight)
    return tuple(own * weight + other * (1.0 - weight) for own, other in zip(*pairs, strict=True))


def cutmix(pairs: tuple, seed: tf.Tensor, p: float) -> tuple[tf.Tensor, tf.Tensor]:
    """A window of the partner in each image, the same for the whole batch, and the labels by the areas.

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

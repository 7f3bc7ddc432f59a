"""RandAugment and AutoAugment as their authors wrote them in TensorFlow, with every choice drawn from a seed.

Papers: "RandAugment" (arXiv 1909.13719), "AutoAugment" (1805.09501). Operations, their scales and their rounding are
those of tensorflow/tpu `efficientnet/autoaugment.py`, which big_vision's `pp/archive/autoaugment.py` keeps. Contrast
alone is PIL's, about the mean of the image, where that code takes the number of pixels / 256 by mistake. keras-cv has
another list (no rotation, posterizing, inversion, sharpness, cutout), other scales, bilinear reflections for gray
borders, and draws from the state of its layers, so that an image could not be made again from its number.

Axes: h rows, w columns, C channels, 1 or 3 of them; images are uint8, 0..255; a level is a strength where 10 is the
scale's nominal end; seeds are two integers.
"""

import functools
import math
from collections.abc import Callable

import tensorflow as tf

_GREY = 128
# Pixels of translation and cutout at level 10, in images of 224: (translation, half the side of a cutout).
_SIDE, _RANDAUGMENT_PIXELS, _AUTOAUGMENT_PIXELS = 224, (100, 40), (250, 100)
_SMOOTH = ((1, 1, 1), (1, 5, 1), (1, 1, 1))  # PIL's SMOOTH filter, to be divided by its sum


def randaugment(image: tf.Tensor, seed: tf.Tensor, layers: int, level: float) -> tf.Tensor:
    """`layers` operations one after the other, each drawn evenly from the sixteen."""
    amounts = tf.constant([_amount(name, level, _RANDAUGMENT_PIXELS, image.shape) for name in OPERATIONS])
    for layer_seed in tf.unstack(tf.random.split(seed, layers)):
        choice_seed, operation_seed = tf.unstack(tf.random.split(layer_seed))
        choice = tf.random.stateless_uniform((), choice_seed, 0, len(OPERATIONS), tf.int32)
        image = _operate(image, choice, amounts[choice], operation_seed)
    return image


def autoaugment(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Return one of the 25 pairs of operations found for ImageNet, each of them applied with its probability."""
    names, probabilities, levels = zip(*(single for pair in _POLICIES for single in pair), strict=True)
    pairs = zip(names, levels, strict=True)
    amounts = tf.constant([_amount(name, level, _AUTOAUGMENT_PIXELS, image.shape) for name, level in pairs])
    choices = tf.constant([list(OPERATIONS).index(name) for name in names])
    policy_seed, *seeds = tf.unstack(tf.random.split(seed, 3))
    policy = tf.random.stateless_uniform((), policy_seed, 0, len(_POLICIES), tf.int32)
    for place, place_seed in enumerate(seeds):
        chance_seed, operation_seed = tf.unstack(tf.random.split(place_seed))
        number = 2 * policy + place
        applied = tf.random.stateless_uniform((), chance_seed) < tf.constant(probabilities)[number]
        choice = tf.where(applied, choices[number], len(OPERATIONS))
        image = _operate(image, choice, amounts[number], operation_seed)
    return image


def _amount(name: str, level: float, pixels: tuple[int, int], shape: tf.TensorShape) -> float:
    """Return the magnitude of an operation at a level, in its own unit."""
    share, (translation, cutout_half) = level / 10.0, pixels
    if name in ("Color", "Contrast", "Brightness", "Sharpness"):
        return share * 1.8 + 0.1
    return {
        "Rotate": share * 30.0,  # degrees
        "Posterize": int(share * 4),  # bits
        "Solarize": int(share * 256) % 256,  # the original's threshold is a byte: 0 at level 10, which inverts all
        "SolarizeAdd": int(share * 110),
        "ShearX": share * 0.3,
        "ShearY": share * 0.3,
        "TranslateX": share * translation * shape[1] / _SIDE,
        "TranslateY": share * translation * shape[0] / _SIDE,
        "Cutout": int(share * cutout_half * min(shape[:2]) / _SIDE),
    }.get(name, 0.0)


@tf.function(autograph=False)  # traced once for each shape, not for each use
def _operate(image: tf.Tensor, choice: tf.Tensor, amount: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Return the operation of that number, in a random direction or place; none for the number after the last."""
    sign_seed, place_seed = tf.unstack(tf.random.split(seed))
    sign = tf.where(tf.random.stateless_uniform((), sign_seed) < 0.5, -1.0, 1.0)

    def operation(name: str) -> tf.Tensor:
        if name == "Cutout":
            return cutout(image, amount, place_seed)
        return OPERATIONS[name](image, sign * amount if name in _SIGNED else amount)

    branches = [functools.partial(operation, name) for name in OPERATIONS]
    changed = tf.switch_case(choice, [*branches, functools.partial(tf.identity, image)])
    changed.set_shape(image.shape)
    return changed


def blend(degenerate: tf.Tensor, image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Image + (factor - 1) * (image - degenerate), cut to 0..255 and to whole numbers: beyond 1 it exaggerates."""
    start = tf.cast(degenerate, tf.float32)
    mixed = start + factor * (tf.cast(image, tf.float32) - start)
    return tf.cast(tf.clip_by_value(mixed, 0.0, 255.0), tf.uint8)


def auto_contrast(image: tf.Tensor) -> tf.Tensor:
    """Each channel stretched to 0..255; unchanged where it has one value."""
    pixels = tf.cast(image, tf.float32)
    low, high = (reduce(pixels, axis=(0, 1)) for reduce in (tf.reduce_min, tf.reduce_max))
    scale = 255.0 / (high - low)
    stretched = tf.clip_by_value(pixels * scale - low * scale, 0.0, 255.0)
    return tf.where(high > low, tf.cast(stretched, tf.uint8), image)


def equalize(image: tf.Tensor) -> tf.Tensor:
    """Each channel through the table that makes its histogram flat, as PIL does."""
    channels = image.shape[-1]
    places = tf.cast(image, tf.int32) + 256 * tf.range(channels)  # a table of its own for each channel
    histogram = tf.reshape(tf.math.bincount(tf.reshape(places, (-1,)), minlength=256 * channels), (channels, 256))
    last = 255 - tf.argmax(tf.reverse(tf.sign(histogram), [1]), axis=1, output_type=tf.int32)
    step = (tf.reduce_sum(histogram, axis=1) - tf.gather(histogram, last, batch_dims=1)) // 255  # (C,)
    whole = tf.maximum(step, 1)[:, None]
    table = (tf.cumsum(histogram, axis=1, exclusive=True) + whole // 2) // whole
    table = tf.where(tf.range(256) == 0, 0, tf.clip_by_value(table, 0, 255))
    table = tf.where(step[:, None] == 0, tf.range(256), table)  # (C, 256)
    return tf.cast(tf.gather(tf.reshape(table, (-1,)), places), tf.uint8)


def posterize(image: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Return the highest bits alone, at least one; of more than all one too, for the original's shift is a byte."""
    shift = tf.cast(tf.minimum((8 - tf.cast(bits, tf.int32)) % 256, 7), tf.uint8)
    return tf.bitwise.left_shift(tf.bitwise.right_shift(image, shift), shift)


def solarize(image: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Values from the threshold on inverted."""
    return tf.where(tf.cast(image, tf.float32) < threshold, image, 255 - image)


def solarize_add(image: tf.Tensor, addition: tf.Tensor) -> tf.Tensor:
    """Dark values, below 128, made lighter."""
    lighter = tf.cast(tf.minimum(tf.cast(image, tf.float32) + addition, 255.0), tf.uint8)
    return tf.where(image < 128, lighter, image)


def gray(image: tf.Tensor) -> tf.Tensor:
    """Return the luma, with one channel."""
    return tf.image.rgb_to_grayscale(image) if image.shape[-1] == 3 else image


def contrast(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Away from the mean of the luma, or towards it."""
    mean = tf.cast(tf.reduce_mean(tf.cast(gray(image), tf.float32)), tf.uint8)
    return blend(tf.fill(tf.shape(image), mean), image, factor)


def sharpness(image: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Away from the image smoothed by PIL's filter, or towards it; the outermost pixels stay."""
    kernel = tf.constant(_SMOOTH, tf.float32)[:, :, None, None] / 13.0
    kernel = tf.tile(kernel, (1, 1, image.shape[-1], 1))
    smooth = tf.nn.depthwise_conv2d(tf.cast(image, tf.float32)[None], kernel, (1, 1, 1, 1), "VALID")[0]
    smooth = tf.pad(tf.cast(tf.clip_by_value(smooth, 0.0, 255.0), tf.uint8), ((1, 1), (1, 1), (0, 0)))
    inside = tf.pad(tf.ones((image.shape[0] - 2, image.shape[1] - 2, 1), tf.bool), ((1, 1), (1, 1), (0, 0)))
    return blend(tf.where(inside, smooth, image), image, factor)


def transform(image: tf.Tensor, matrix: list) -> tf.Tensor:
    """Output pixel (x, y) is the nearest input pixel to (a x + b y + c, d x + e y + f); outside it is gray."""
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=image[None],
        transforms=tf.stack([tf.cast(number, tf.float32) for number in (*matrix, 0.0, 0.0)])[None],
        output_shape=image.shape[:2],
        fill_value=float(_GREY),
        interpolation="NEAREST",
        fill_mode="CONSTANT",
    )[0]


def rotate(image: tf.Tensor, degrees: tf.Tensor) -> tf.Tensor:
    """About the center, counterclockwise."""
    angle = degrees * (math.pi / 180.0)
    cos, sin = tf.cos(angle), tf.sin(angle)
    x, y = (image.shape[1] - 1) / 2.0, (image.shape[0] - 1) / 2.0
    return transform(image, [cos, -sin, x - (cos * x - sin * y), sin, cos, y - (sin * x + cos * y)])


def cutout(image: tf.Tensor, half: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Return a gray square of twice `half` pixels about a place anywhere in the image, as far as it is inside."""
    half = tf.cast(half, tf.int32)
    rows, columns = (
        tf.range(side) - tf.random.stateless_uniform((), place, 0, side, tf.int32)
        for side, place in zip(image.shape[:2], tf.unstack(tf.random.split(seed)), strict=True)
    )
    inside = ((rows >= -half) & (rows < half))[:, None, None] & ((columns >= -half) & (columns < half))[None, :, None]
    return tf.where(inside, tf.constant(_GREY, tf.uint8), image)


OPERATIONS: dict[str, Callable] = {
    "AutoContrast": lambda image, _: auto_contrast(image),
    "Equalize": lambda image, _: equalize(image),
    "Invert": lambda image, _: 255 - image,
    "Rotate": rotate,
    "Posterize": posterize,
    "Solarize": solarize,
    "Color": lambda image, factor: blend(tf.repeat(gray(image), image.shape[-1], axis=-1), image, factor),
    "Contrast": contrast,
    "Brightness": lambda image, factor: blend(tf.zeros_like(image), image, factor),
    "Sharpness": sharpness,
    "ShearX": lambda image, shear: transform(image, [1.0, shear, 0.0, 0.0, 1.0, 0.0]),
    "ShearY": lambda image, shear: transform(image, [1.0, 0.0, 0.0, shear, 1.0, 0.0]),
    "TranslateX": lambda image, pixels: transform(image, [1.0, 0.0, pixels, 0.0, 1.0, 0.0]),
    "TranslateY": lambda image, pixels: transform(image, [1.0, 0.0, 0.0, 0.0, 1.0, pixels]),
    "Cutout": cutout,
    "SolarizeAdd": solarize_add,
}

_SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")  # in either direction, by chance

# Pairs of (operation, probability, level): AutoAugment's policy "v0".
_POLICIES = (
    (("Equalize", 0.8, 1), ("ShearY", 0.8, 4)),
    (("Color", 0.4, 9), ("Equalize", 0.6, 3)),
    (("Color", 0.4, 1), ("Rotate", 0.6, 8)),
    (("Solarize", 0.8, 3), ("Equalize", 0.4, 7)),
    (("Solarize", 0.4, 2), ("Solarize", 0.6, 2)),
    (("Color", 0.2, 0), ("Equalize", 0.8, 8)),
    (("Equalize", 0.4, 8), ("SolarizeAdd", 0.8, 3)),
    (("ShearX", 0.2, 9), ("Rotate", 0.6, 8)),
    (("Color", 0.6, 1), ("Equalize", 1.0, 2)),
    (("Invert", 0.4, 9), ("Rotate", 0.6, 0)),
    (("Equalize", 1.0, 9), ("ShearY", 0.6, 3)),
    (("Color", 0.4, 7), ("Equalize", 0.6, 0)),
    (("Posterize", 0.4, 6), ("AutoContrast", 0.4, 7)),
    (("Solarize", 0.6, 8), ("Color", 0.6, 9)),
    (("Solarize", 0.2, 4), ("Rotate", 0.8, 9)),
    (("Rotate", 1.0, 7), ("TranslateY", 0.8, 9)),
    (("ShearX", 0.0, 0), ("Solarize", 0.8, 4)),
    (("ShearY", 0.8, 0), ("Color", 0.6, 4)),
    (("Color", 1.0, 0), ("Rotate", 0.6, 2)),
    (("Equalize", 0.8, 4), ("Equalize", 0.0, 8)),
    (("Equalize", 1.0, 4), ("AutoContrast", 0.6, 2)),
    (("ShearY", 0.4, 7), ("SolarizeAdd", 0.6, 7)),
    (("Posterize", 0.8, 2), ("Solarize", 0.6, 10)),
    (("Solarize", 0.6, 8), ("Equalize", 0.6, 1)),
    (("Color", 0.8, 6), ("Rotate", 0.4, 5)),
)

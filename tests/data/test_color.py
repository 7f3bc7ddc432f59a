"""Color jitter and 3-Augment: keras-cv's operations, repeatable by seed and independent of the batch."""

import dataclasses
import sys
from collections.abc import Callable, Iterator

import keras
import numpy as np
import PIL.Image
import PIL.ImageFilter
import PIL.ImageOps
import pytest
import tensorflow as tf

from keras_vit import UserError
from training.data import augment
from training.data.pipeline import training_batches
from training.data.sources import array_split
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import Recipe

NUMBER = 12
_NOISE = np.random.default_rng(0).uniform(0, 255, (NUMBER, 5, 4, 3))
IMAGES = tf.saturate_cast(tf.image.resize(_NOISE, (37, 53), "bicubic"), tf.uint8).numpy()
FLOATS = tf.constant(IMAGES, tf.float32)


def draws(key: int) -> tf.Tensor:
    return tf.stack([augment.color_draws(tf.constant([key, number], tf.int64)) for number in range(NUMBER)])


def jitter_draws(*factors: float, amount: float) -> tf.Tensor:
    """The draws that give these factors of brightness, contrast and saturation to every image."""
    return tf.fill((NUMBER, 3), 0.5) + (tf.constant([factors]) - 1.0) / (2.0 * amount)


def largest_difference(found, expected) -> float:
    return float(np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max())


def pil(operation, images: np.ndarray = IMAGES) -> np.ndarray:
    return np.stack([operation(PIL.Image.fromarray(image)) for image in images])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("jitter", "three"),
    [*(pytest.param(*one, marks=pytest.mark.slow) for one in ((0.3, False), (0.0, True))), (0.3, True)],
)
def test_colors_repeat_with_their_seed_and_vary_without(jitter, three, channels):
    images = IMAGES[..., :channels]
    change = tf.function(lambda images, draws: augment.augment_colors(images, draws, jitter=jitter, three=three))
    once, again, other = (change(images, draws(key)).numpy() for key in (5, 5, 6))
    np.testing.assert_array_equal(once, again)
    np.testing.assert_allclose(augment.augment_colors(images, draws(5), jitter=jitter, three=three), once, atol=1)
    assert (once.dtype, once.shape) == (np.dtype(np.uint8), images.shape)
    changed = [(image != another).any() for image, another in zip(once, other, strict=True)]
    assert np.mean(changed) >= 0.5


def test_an_image_does_not_depend_on_the_rest_of_its_batch():
    change = tf.function(lambda images, draws: augment.augment_colors(images, draws, jitter=0.3, three=True))
    whole = change(IMAGES, draws(5)).numpy()
    for begin, end in ((0, 1), (3, 5), (7, 12)):
        np.testing.assert_array_equal(change(IMAGES[begin:end], draws(5)[begin:end]), whole[begin:end])


def test_neutral_factors_change_nothing():
    assert largest_difference(augment.color_jitter(FLOATS, tf.fill((NUMBER, 3), 0.5), 0.3), FLOATS) < 1e-3


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_brightness_moves_the_mean_as_the_factor_would(factor):
    images = FLOATS * 0.3 + 90.0  # far from the ends of the range
    found = augment.color_jitter(images, jitter_draws(factor, 1.0, 1.0, amount=0.3), 0.3).numpy()
    np.testing.assert_allclose(found.mean(axis=(1, 2, 3)), factor * tf.reduce_mean(images, axis=(1, 2, 3)), rtol=1e-4)
    assert largest_difference(np.ptp(found, axis=(1, 2)), np.ptp(images, axis=(1, 2))) < 1e-2


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_contrast_is_about_the_mean_of_each_channel(factor):
    images = FLOATS * 0.3 + 90.0
    found = augment.color_jitter(images, jitter_draws(1.0, factor, 1.0, amount=0.3), 0.3)
    means = tf.reduce_mean(images, axis=(1, 2), keepdims=True)
    assert largest_difference(found, means + factor * (images - means)) < 1e-2


@pytest.mark.parametrize("factor", [0.0, 0.7, 1.3])
def test_saturation_is_that_of_hsv(factor):
    found = augment.color_jitter(FLOATS, jitter_draws(1.0, 1.0, factor, amount=1.0), 1.0)
    hue, saturation, value = tf.unstack(tf.image.rgb_to_hsv(FLOATS), axis=-1)
    expected = tf.image.hsv_to_rgb(tf.stack([hue, tf.clip_by_value(saturation * factor, 0.0, 1.0), value], axis=-1))
    assert largest_difference(found, expected) < 1e-2
    if not factor:
        assert largest_difference(found[..., 0], found[..., 2]) < 1e-3


def test_factors_are_even_between_their_ends():
    drawn = np.stack([augment.color_draws(tf.constant([3, number], tf.int64)) for number in range(400)])
    assert drawn.shape == (400, 5)
    assert 0.0 <= drawn.min() < 0.02 < 0.98 < drawn.max() < 1.0
    np.testing.assert_allclose(drawn.mean(axis=0), 0.5, atol=0.06)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(5)).max() < 0.2


def test_grayscale_and_solarization_are_those_of_pil_but_for_rounding():
    expected = pil(lambda image: np.asarray(image.convert("L").convert("RGB")))
    assert largest_difference(augment.grayscale(FLOATS), expected) <= 1.0
    np.testing.assert_array_equal(augment.solarize(FLOATS), pil(lambda image: np.asarray(PIL.ImageOps.solarize(image))))


@pytest.mark.parametrize("sigma", [0.1, 1.0, 2.0])
def test_the_blur_is_near_that_of_pil_to_the_border(sigma):
    found = augment.gaussian_blur(FLOATS, tf.fill((NUMBER,), (sigma - 0.1) / 1.9))
    assert found.shape == IMAGES.shape
    expected = pil(lambda image: np.asarray(image.filter(PIL.ImageFilter.GaussianBlur(sigma))))
    assert largest_difference(found, expected) <= 4.0
    assert np.abs(np.asarray(found) - expected).mean() < 1.0
    flat = np.full((2, 3, 5, 1), 200.0, np.float32)  # smaller than the kernel
    assert largest_difference(augment.gaussian_blur(flat, tf.ones((2,))), flat) < 1e-3


def test_the_operations_of_3_augment_are_chosen_evenly_and_put_back_in_order():
    choices = np.linspace(0.0, 0.999, NUMBER, dtype=np.float32)[::-1].copy()
    found = augment.three_augment(FLOATS, choices, np.full(NUMBER, 0.5, np.float32)).numpy()
    operations = (augment.grayscale, augment.solarize, augment.gaussian_blur)
    for number, choice in enumerate(choices):
        one = FLOATS[number : number + 1]
        expected = operations[int(choice * 3)](one, tf.fill((1,), 0.5))
        assert largest_difference(found[number], expected[0]) < 1e-3
    assert np.bincount((choices * 3).astype(int)).tolist() == [4, 4, 4]


@pytest.fixture(name="make_layers_anew")
def _make_layers_anew() -> Iterator[Callable[[], None]]:
    """The layers are new at the begin, and when this is called."""
    forget = augment._layers.cache_clear
    forget()
    yield forget
    forget()


def test_mixed_precision_does_not_reach_the_images(make_layers_anew):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        changed = augment.augment_colors(IMAGES, draws(5), jitter=0.3, three=True)
    finally:
        keras.config.set_dtype_policy(policy)
    make_layers_anew()
    np.testing.assert_array_equal(changed, augment.augment_colors(IMAGES, draws(5), jitter=0.3, three=True))


@pytest.mark.parametrize("scope", ["graph", "replicas"])
def test_layers_can_be_made_anywhere(make_layers_anew, scope):
    if scope == "graph":
        changed = tf.function(lambda: augment.augment_colors(IMAGES, draws(5), jitter=0.3, three=True))()
    else:
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            changed = augment.augment_colors(IMAGES, draws(5), jitter=0.3, three=True)
    make_layers_anew()
    np.testing.assert_array_equal(changed, augment.augment_colors(IMAGES, draws(5), jitter=0.3, three=True))


RECIPE = Recipe(
    image_size=(6, 8), batch_size=6, learning_rate=1.0, steps=9, flip=True, three_augment=True, color_jitter=0.3
)


@pytest.mark.parametrize("mixup", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_any_step_and_any_part_can_be_made_again(channels, mixup):
    recipe = dataclasses.replace(RECIPE, mixup=mixup, batch_size=42)  # the colors are those of 32 images at a time
    images = np.random.default_rng(0).integers(0, 256, (47, 6, 8, channels), dtype=np.uint8)
    split = array_split(images, np.arange(47) % 3, tuple("abc"))

    def batches(first_step: int, part: tuple[int, int] = (0, 1), recipe: Recipe = recipe) -> list[np.ndarray]:
        data = training_batches(
            split, recipe, recipe.preprocessing(channels), num_classes=3, seed=4, first_step=first_step, part=part
        )
        return [np.stack([step.numpy() for step in steps]) for steps in zip(*data.take(6 - first_step), strict=True)]

    whole = batches(0)
    assert whole[0].shape == (6, 42, 6, 8, channels)
    parts = [batches(3, (index, 2)) for index in range(2)]
    for kind, all_steps in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([part[kind] for part in parts], axis=1), all_steps[3:])
    without = batches(0, recipe=dataclasses.replace(recipe, three_augment=False, color_jitter=0.0))
    np.testing.assert_array_equal(without[1], whole[1])  # the same examples, mixed alike
    assert (without[0] != whole[0]).any(axis=(2, 3, 4)).mean() > 0.9


def test_runs_without_colors_do_without_keras_cv(make_layers_anew, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_cv", None)
    with pytest.raises(ImportError):
        augment.augment_colors(IMAGES, draws(5), jitter=0.3, three=True)
    recipe = dataclasses.replace(RECIPE, three_augment=False, color_jitter=0.0, batch_size=2)
    split = array_split(np.zeros((4, 6, 8, 3), np.uint8), np.zeros(4, int), ("a",))
    next(iter(training_batches(split, recipe, recipe.preprocessing(3), num_classes=1, seed=0, first_step=0)))
    assert "keras_cv" not in vars(augment)


def test_the_jitter_of_a_recipe_is_a_share():
    for amount in (-0.1, 1.1):
        with pytest.raises(UserError, match=rf"color-jitter must be in \[0, 1\], but is {amount}"):
            dataclasses.replace(RECIPE, color_jitter=amount)


def test_the_recipe_like_deit_iii():
    recipe = RECIPES["deit3-like"]
    assert (recipe.three_augment, recipe.color_jitter, recipe.flip, recipe.randaugment_layers) == (True, 0.3, True, 0)
    assert (recipe.epochs, recipe.batch_size, recipe.weight_decay, recipe.clip_norm) == (800, 2048, 0.05, 1.0)
    assert (recipe.loss, recipe.label_smoothing, recipe.mixup, recipe.cutmix) == ("sigmoid", 0.0, 0.8, 1.0)
    assert (recipe.optimizer, recipe.learning_rate, recipe.schedule.warmup_steps) == ("adamw", 2e-3, 3125)
    assert (recipe.model.stochastic_depth_rate, recipe.model.dropout_rate) == (0.05, 0.0)

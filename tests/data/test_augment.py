"""What training does to images: operations as PIL has them, and every choice from a seed; colors by keras-cv."""

import contextlib
import dataclasses
import functools
import struct
import sys
from collections.abc import Callable, Iterator

import keras
import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageFilter
import PIL.ImageOps
import pytest
import tensorflow as tf

from keras_vit import Preprocessing
from keras_vit.images.preprocessing import to_channels
from training.data import augment, randaugment
from training.data.pipeline import training_batches
from training.data.sources import array_split
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import Recipe

IMAGE = np.clip(
    np.asarray(tf.image.resize(np.random.default_rng(0).uniform(0, 255, (5, 4, 3)), (37, 53), "bicubic")) * 0.7 + 20,
    0,
    255,
).astype(np.uint8)
PIL_IMAGE = PIL.Image.fromarray(IMAGE)
OPERATIONS = randaugment.OPERATIONS


def seeds(count: int) -> tf.Tensor:
    return tf.constant([[5, number] for number in range(count)], tf.int64)


def of_seeds(count: int, draw: Callable[[tf.Tensor], tf.Tensor]) -> np.ndarray:
    """What a function, which is traced once, draws by each of these seeds."""
    return tf.function(lambda: tf.map_fn(draw, seeds(count), fn_output_signature=tf.float32))().numpy()


def largest_difference(found, expected) -> float:
    return float(np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).max())


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (randaugment.equalize(IMAGE), PIL.ImageOps.equalize(PIL_IMAGE)),
        (randaugment.posterize(IMAGE, 4), PIL.ImageOps.posterize(PIL_IMAGE, 4)),
        (randaugment.solarize(IMAGE, 100), PIL.ImageOps.solarize(PIL_IMAGE, 100)),
        (OPERATIONS["Invert"](IMAGE, None), PIL.ImageOps.invert(PIL_IMAGE)),
        (OPERATIONS["Brightness"](tf.constant(IMAGE), 1.9), PIL.ImageEnhance.Brightness(PIL_IMAGE).enhance(1.9)),
        (
            OPERATIONS["TranslateX"](tf.constant(IMAGE), 9.0),
            PIL_IMAGE.transform(PIL_IMAGE.size, PIL.Image.AFFINE, (1, 0, 9, 0, 1, 0), fillcolor=(128,) * 3),
        ),
        (
            OPERATIONS["TranslateY"](tf.constant(IMAGE), -9.0),
            PIL_IMAGE.transform(PIL_IMAGE.size, PIL.Image.AFFINE, (1, 0, 0, 0, 1, -9), fillcolor=(128,) * 3),
        ),
        (randaugment.rotate(tf.constant(IMAGE), 90.0)[:, 8:45], PIL_IMAGE.rotate(90).crop((8, 0, 45, 37))),
    ],
    ids=["equalize", "posterize", "solarize", "invert", "brightness", "translate x", "translate y", "rotate"],
)
def test_operations_are_those_of_pil(found, expected):
    assert largest_difference(found, expected) == 0


@pytest.mark.parametrize("factor", [0.1, 1.0, 1.9, 2.8])
@pytest.mark.parametrize("name", ["Color", "Contrast", "Sharpness"])
def test_enhancements_are_those_of_pil_but_for_rounding(name, factor):
    """The original cuts to whole numbers where PIL rounds, once before and once after the factor is applied."""
    found = OPERATIONS[name](tf.constant(IMAGE), factor)
    expected = getattr(PIL.ImageEnhance, name)(PIL_IMAGE).enhance(factor)
    assert largest_difference(found, expected) <= max(factor - 1.0, 0.0) + 1.0
    if factor == 1.0:
        np.testing.assert_array_equal(found, IMAGE)


def test_auto_contrast_is_that_of_pil_but_for_rounding():
    assert largest_difference(randaugment.auto_contrast(IMAGE), PIL.ImageOps.autocontrast(PIL_IMAGE)) <= 1
    flat = np.full((4, 5, 3), 77, np.uint8)
    np.testing.assert_array_equal(randaugment.auto_contrast(flat), flat)
    np.testing.assert_array_equal(randaugment.equalize(flat), flat)


@pytest.mark.parametrize(
    ("name", "neutral"),
    [("Rotate", 0.0), ("ShearX", 0.0), ("ShearY", 0.0), ("TranslateX", 0.0), ("TranslateY", 0.0), ("Color", 1.0),
     ("Brightness", 1.0), ("Posterize", 8), ("Solarize", 256), ("SolarizeAdd", 0)],
)  # fmt: skip
def test_neutral_strengths_change_nothing(name, neutral):
    np.testing.assert_array_equal(OPERATIONS[name](tf.constant(IMAGE), neutral), IMAGE)


def test_shears_move_rows_and_columns_by_their_distance():
    image = tf.constant(np.arange(25, dtype=np.uint8).reshape(5, 5, 1))
    rows = np.asarray(OPERATIONS["ShearX"](image, 1.0))[:, :, 0]
    np.testing.assert_array_equal(rows[2], [12, 13, 14, 128, 128])
    columns = np.asarray(OPERATIONS["ShearY"](image, 1.0))[:, :, 0]
    np.testing.assert_array_equal(columns[:, 2], [12, 17, 22, 128, 128])


def test_dark_values_are_lightened_and_bright_ones_kept():
    image = tf.constant([[[0], [127], [128], [255]]], tf.uint8)
    np.testing.assert_array_equal(randaugment.solarize_add(image, 150)[0, :, 0], [150, 255, 128, 255])


def test_a_cutout_is_a_grey_square_about_any_place():
    image = tf.zeros((20, 30, 3), tf.uint8)
    sizes = set()
    for seed in seeds(60):
        rows, columns, _ = np.nonzero(np.asarray(randaugment.cutout(image, 4, seed)))
        sizes.add((np.ptp(rows) + 1, np.ptp(columns) + 1))
        assert len(rows) == 3 * (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    assert max(sizes) == (8, 8)
    assert len(sizes) > 5  # smaller ones at the edges


def test_strengths_are_those_of_the_original():
    """tensorflow/tpu `efficientnet/autoaugment.py` at 224 pixels: RandAugment at 15, and AutoAugment.

    So computed by TensorFlow 2.12 with NumPy 1.23, which make a byte of the threshold 384 without an error.
    """
    shape = tf.TensorShape((224, 224, 3))
    found = {name: randaugment._amount(name, 15.0, randaugment._RANDAUGMENT_PIXELS, shape) for name in OPERATIONS}
    enhanced = dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), 2.8)
    moved = {"Rotate": 45.0, "ShearX": 0.45, "ShearY": 0.45, "TranslateX": 150.0, "TranslateY": 150.0, "Cutout": 60}
    others = {"Posterize": 6, "Solarize": 128, "SolarizeAdd": 165, "AutoContrast": 0, "Equalize": 0, "Invert": 0}
    assert found == pytest.approx(enhanced | moved | others)
    assert randaugment._amount("Solarize", 10.0, randaugment._AUTOAUGMENT_PIXELS, shape) == 0
    np.testing.assert_array_equal(randaugment.posterize(IMAGE, 10), randaugment.posterize(IMAGE, 1))
    assert randaugment._amount("TranslateY", 9.0, randaugment._AUTOAUGMENT_PIXELS, shape) == pytest.approx(225.0)


def test_sixteen_operations_are_drawn_evenly(monkeypatch):
    marks = {
        name: lambda image, _, n=n: tf.fill(image.shape, tf.constant(n, tf.uint8)) for n, name in enumerate(OPERATIONS)
    }
    monkeypatch.setattr(randaugment, "OPERATIONS", marks)
    monkeypatch.setattr(randaugment, "cutout", lambda image, half, seed: marks["Cutout"](image, half))
    image = tf.zeros((2, 3, 1), tf.uint8)  # a shape of its own, for operations are kept by shape
    marked = of_seeds(640, lambda seed: tf.cast(randaugment.randaugment(image, seed, 2, 10.0)[0, 0, 0], tf.float32))
    counts = np.bincount(marked.astype(int), minlength=16)
    assert len(counts) == 16
    assert 20 <= counts.min() <= counts.max() <= 65


@pytest.mark.parametrize(
    "change",
    [
        lambda image, seed: randaugment.randaugment(image, seed, 2, 20.0),
        lambda image, seed: randaugment.autoaugment(image, seed),
        lambda image, seed: augment.random_erasing(image, seed, 0.7),
        lambda image, seed: augment.random_flip(image, seed),
        lambda image, seed: augment.random_shift(image, seed, 2),
        lambda image, seed: tf.image.resize(augment.inception_crop(image, seed), (37, 53)),
    ],
    ids=["RandAugment", "AutoAugment", "erasing", "flip", "shift", "crop"],
)
def test_changes_repeat_with_their_seed_and_vary_without(change):
    image = tf.constant(IMAGE)
    graph = tf.function(change)
    results = [graph(image, seed).numpy() for seed in seeds(6)]
    np.testing.assert_array_equal(graph(image, seeds(1)[0]), results[0])
    np.testing.assert_allclose(change(image, seeds(1)[0]), results[0], atol=1)
    assert len({result.tobytes() for result in results}) > 1
    assert {result.shape[:2] for result in results} == {(37, 53)}


def test_flips_are_even():
    image = tf.constant(np.arange(6, dtype=np.uint8).reshape(1, 6, 1))
    flipped = sum(int(augment.random_flip(image, seed)[0, 0, 0]) == 5 for seed in seeds(200))
    assert 70 < flipped < 130


def test_shifts_reach_every_offset_and_bring_in_black():
    image = tf.fill((5, 7, 1), tf.constant(9, tf.uint8))
    found = {
        tuple(np.argwhere(augment.random_shift(image, seed, 1).numpy() == 0)[:, :2].ravel()) for seed in seeds(150)
    }
    assert len(found) == 9


def test_crops_have_five_to_hundred_per_cent_of_the_area_and_a_moderate_aspect():
    image = tf.zeros((200, 300, 3), tf.uint8)
    for seed in seeds(100):
        height, width, _ = augment.inception_crop(image, seed).shape
        assert 0.045 <= height * width / 60_000 <= 1.0
        assert 0.72 <= width / height <= 1.37


def test_erasing_leaves_the_right_share_and_chance():
    image = tf.zeros((40, 50, 1), tf.uint8)
    erased = of_seeds(300, lambda seed: tf.cast(augment.random_erasing(image, seed, 0.25), tf.float32))
    shares = np.mean(erased != 0, axis=(1, 2, 3))
    assert 50 <= np.count_nonzero(shares) <= 100
    assert 0.015 < shares[shares > 0].min() < 0.05
    assert 0.3 < shares.max() < 0.41


@pytest.mark.parametrize("p", [0.1, 0.2, 0.8, 1.0])
def test_shares_are_of_the_beta_distribution(p):
    shares = of_seeds(800, lambda seed: augment.beta(seed, p))
    assert np.isfinite(shares).all()
    assert shares.mean() == pytest.approx(0.5, abs=0.05)
    assert shares.var() == pytest.approx(1 / (4 * (2 * p + 1)), rel=0.15)


def pairs() -> tuple:
    rng = np.random.default_rng(1)
    images, labels = rng.uniform(-1, 1, (5, 8, 9, 1)).astype(np.float32), np.eye(5, dtype=np.float32)
    return (images, labels), (np.roll(images, 1, axis=0), np.roll(labels, 1, axis=0))


@pytest.mark.parametrize("mostly_own", [True, False])
def test_mixup_takes_one_share_for_the_batch(mostly_own):
    own, others = pairs()
    own_shares = []
    for seed in seeds(30):
        images, labels = augment.mixup((own, others), seed, 0.8, mostly_own=mostly_own)
        share = labels.numpy()[0, 0]
        own_shares.append(share)
        np.testing.assert_allclose(labels, share * own[1] + (1 - share) * others[1], atol=1e-6)
        np.testing.assert_allclose(images, share * own[0] + (1 - share) * others[0], atol=1e-6)
    assert (min(own_shares) >= 0.5) == mostly_own


def test_cutmix_gives_the_partner_its_window_and_its_share_of_the_label():
    own, others = pairs()
    shares = set()
    for seed in seeds(30):
        images, labels = augment.cutmix((own, others), seed, 1.0)
        from_partner = images.numpy() == others[0]
        np.testing.assert_array_equal(from_partner | (images.numpy() == own[0]), True)
        assert len(np.unique(from_partner.reshape(5, -1), axis=0)) == 1  # one window for the batch
        share = from_partner[0].mean()
        np.testing.assert_allclose(labels, (1 - share) * own[1] + share * others[1], atol=1e-6)
        shares.add(share)
    assert len(shares) > 10


@pytest.mark.parametrize("encode", [tf.io.encode_jpeg, tf.io.encode_png], ids=["JPEG", "PNG"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_window_of_a_file_is_that_of_the_decoded_image(encode, channels):
    data = encode(IMAGE)
    decoded = tf.io.decode_image(data)
    for seed in seeds(4):
        begin, size = augment.inception_window(tf.shape(decoded), seed)
        window = augment.decode_and_inception_crop(data, seed, Preprocessing((6, 8), channels))
        expected = to_channels(tf.slice(decoded, begin, size), channels)
        edge = 2 if encode is tf.io.encode_jpeg else 0  # its colors are interpolated from what lies outside
        inside = (slice(edge, size[0] - edge), slice(edge, size[1] - edge))
        np.testing.assert_array_equal(window[inside], expected[inside])


def test_a_jpeg_that_declares_too_many_pixels_is_refused_before_a_window_is_decoded():
    data = tf.io.encode_jpeg(IMAGE).numpy()
    sides = data.index(b"\xff\xc0") + 5
    huge = data[:sides] + struct.pack(">HH", 60_000, 60_000) + data[sides + 4 :]
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        augment.decode_and_inception_crop(tf.constant(huge), (1, 2), Preprocessing((6, 8), 3))


def test_the_smaller_side_is_resized_and_any_window_cut_out():
    resized = augment.resize_small(IMAGE, 16, Preprocessing((8, 8), resize="resize-small", crop_from=16))
    assert resized.shape == (16, 23, 3)
    image = tf.constant(np.arange(30, dtype=np.uint8).reshape(5, 6, 1))
    corners = {int(augment.random_crop(image, seed, (4, 4))[0, 0, 0]) for seed in seeds(60)}
    assert corners == {0, 1, 2, 6, 7, 8}


EVERYTHING = Recipe(
    image_size=(6, 8),
    batch_size=6,
    learning_rate=1.0,
    steps=9,
    flip=True,
    shift=1,
    inception_crop=True,
    autoaugment=True,
    randaugment_layers=2,
    randaugment_magnitude=10.0,
    random_erasing=0.5,
    mixup=0.8,
    cutmix=1.0,
)
PLAIN = Recipe(image_size=(6, 8), batch_size=42, learning_rate=1.0, steps=9, flip=True, mixup=0.8)
COLORED = dataclasses.replace(PLAIN, three_augment=True, color_jitter=0.3)  # the colors of 32 images at a time
VARIANTS = {
    "few": dataclasses.replace(EVERYTHING, autoaugment=False, randaugment_layers=0, randaugment_magnitude=0.0),
    "next": EVERYTHING,
    "opposite": dataclasses.replace(EVERYTHING, mixup_partner="opposite"),
    "resize-small": dataclasses.replace(EVERYTHING, inception_crop=False, resize="resize-small", crop_from=9),
    "stretch": dataclasses.replace(EVERYTHING, inception_crop=False, crop_from=9, cutmix=0.0),
    "colors": COLORED,
    "colors alone": dataclasses.replace(COLORED, mixup=0.0),
}


def steps_of(recipe: Recipe, images: np.ndarray, first: int = 0, part: tuple[int, int] = (0, 1)) -> list[np.ndarray]:
    """Images and labels of the steps from the first to the sixth, each stacked."""
    split, channels = array_split(images, np.arange(len(images)) % 3, tuple("abc")), images.shape[-1]
    options = {"num_classes": 3, "seed": 4, "first_step": first, "part": part}
    data = training_batches(split, recipe, recipe.preprocessing(channels), **options)
    return [np.stack([step.numpy() for step in steps]) for steps in zip(*data.take(6 - first), strict=True)]


@pytest.mark.parametrize(
    "name", [name if name == "few" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_any_step_and_any_part_can_be_made_again(name):
    recipe = VARIANTS[name]
    images = np.random.default_rng(0).integers(0, 256, (recipe.batch_size + 17, 11, 13, 3), dtype=np.uint8)
    whole = steps_of(recipe, images)
    assert whole[0].shape == (6, recipe.batch_size, 6, 8, 3)
    np.testing.assert_allclose(whole[1].sum(axis=-1), 1.0, atol=1e-6)
    assert (np.count_nonzero(whole[1].max(axis=-1) < 1.0) > 5) == bool(recipe.mixup or recipe.cutmix)
    half = recipe.batch_size // 2
    for array, all_steps in zip(steps_of(recipe, images, 3, (1, 2)), whole, strict=True):
        np.testing.assert_array_equal(array, all_steps[3:, half:])


def test_what_trains_on_windows_is_evaluated_on_the_centre():
    assert VARIANTS["resize-small"].preprocessing(3) == Preprocessing((6, 8), 3, "resize-small", crop_from=9)
    assert VARIANTS["stretch"].preprocessing(1) == Preprocessing((6, 8), 1)


NUMBER = 12
_NOISE = np.random.default_rng(0).uniform(0, 255, (NUMBER, 5, 4, 3))
IMAGES = tf.saturate_cast(tf.image.resize(_NOISE, (37, 53), "bicubic"), tf.uint8).numpy()
FLOATS = tf.constant(IMAGES, tf.float32)


def draws(key: int) -> tf.Tensor:
    return tf.stack([augment.color_draws(tf.constant([key, number], tf.int64)) for number in range(NUMBER)])


def jitter_draws(*factors: float, amount: float) -> tf.Tensor:
    """The draws that give these factors of brightness, contrast and saturation to every image."""
    return tf.fill((NUMBER, 3), 0.5) + (tf.constant([factors]) - 1.0) / (2.0 * amount)


def pil(operation, images: np.ndarray = IMAGES) -> np.ndarray:
    return np.stack([operation(PIL.Image.fromarray(image)) for image in images])


@pytest.mark.parametrize(
    ("jitter", "three", "channels"),
    [
        (0.3, True, 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.3, False, 3), (0.0, True, 1), (0.3, True, 1))),
    ],
)
def test_colors_repeat_with_their_seed_and_vary_without_whatever_the_rest_of_the_batch(jitter, three, channels):
    images = IMAGES[..., :channels]
    change = tf.function(lambda images, draws: augment.augment_colors(images, draws, jitter=jitter, three=three))
    once, again, other = (change(images, draws(key)).numpy() for key in (5, 5, 6))
    np.testing.assert_array_equal(once, again)
    assert (once.dtype, once.shape) == (np.dtype(np.uint8), images.shape)
    changed = [(image != another).any() for image, another in zip(once, other, strict=True)]
    assert np.mean(changed) >= 0.5
    np.testing.assert_array_equal(change(images[3:8], draws(5)[3:8]), once[3:8])


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


@pytest.mark.parametrize("made", ["in a graph", "for replicas", "in mixed precision"])
def test_layers_are_the_same_wherever_they_are_made(make_layers_anew, made):
    policy = keras.config.dtype_policy()
    change = functools.partial(augment.augment_colors, IMAGES[:4], draws(5)[:4], jitter=0.3, three=True)
    with contextlib.ExitStack() as stack:
        if made == "for replicas":
            stack.enter_context(tf.distribute.MirroredStrategy(["CPU:0"]).scope())
        elif made == "in mixed precision":
            stack.callback(keras.config.set_dtype_policy, policy)
            keras.config.set_dtype_policy("mixed_bfloat16")
        changed = (tf.function(change) if made == "in a graph" else change)()
    make_layers_anew()
    np.testing.assert_array_equal(changed, change())


@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_colors_change_nothing_else(channels):
    """Neither the order of the examples nor how they are mixed."""
    images = np.random.default_rng(0).integers(0, 256, (47, 6, 8, channels), dtype=np.uint8)
    (colored, labels), (others, same) = (steps_of(recipe, images) for recipe in (COLORED, PLAIN))
    np.testing.assert_array_equal(labels, same)
    assert (colored != others).any(axis=(2, 3, 4)).mean() > 0.9


def test_runs_without_colors_do_without_keras_cv(make_layers_anew, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_cv", None)
    with pytest.raises(ImportError):
        augment.augment_colors(IMAGES, draws(5), jitter=0.3, three=True)
    recipe = dataclasses.replace(PLAIN, batch_size=2)
    split = array_split(np.zeros((4, 6, 8, 3), np.uint8), np.zeros(4, int), ("a",))
    next(iter(training_batches(split, recipe, recipe.preprocessing(3), num_classes=1, seed=0, first_step=0)))
    assert "keras_cv" not in vars(augment)


def test_the_recipe_like_deit_iii():
    recipe = RECIPES["deit3-like"]
    assert (recipe.three_augment, recipe.color_jitter, recipe.flip, recipe.randaugment_layers) == (True, 0.3, True, 0)
    assert (recipe.epochs, recipe.batch_size, recipe.weight_decay, recipe.clip_norm) == (800, 2048, 0.05, None)
    assert (recipe.loss, recipe.label_smoothing, recipe.mixup, recipe.cutmix) == ("sigmoid", 0.0, 0.8, 1.0)
    assert (recipe.optimizer, recipe.learning_rate, recipe.schedule.warmup_steps) == ("adamw", 2e-3, 3125)
    assert (recipe.model.stochastic_depth_rate, recipe.model.dropout_rate) == (0.05, 0.0)

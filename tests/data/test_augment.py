"""What training does to images: operations as PIL has them, and every choice from a seed."""

import dataclasses

import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageOps
import pytest
import tensorflow as tf

from keras_vit import Preprocessing
from keras_vit.images.preprocessing import to_channels
from training.data import augment, randaugment
from training.data.pipeline import training_batches
from training.data.sources import array_split
from training.recipes.recipe import Recipe

PICTURE = np.clip(
    np.asarray(tf.image.resize(np.random.default_rng(0).uniform(0, 255, (5, 4, 3)), (37, 53), "bicubic")) * 0.7 + 20,
    0,
    255,
).astype(np.uint8)
PIL_PICTURE = PIL.Image.fromarray(PICTURE)
OPERATIONS = randaugment.OPERATIONS


def seeds(count: int) -> list[tf.Tensor]:
    return [tf.constant([5, number], tf.int64) for number in range(count)]


def largest_difference(found, expected) -> int:
    return int(np.abs(np.asarray(found).astype(int) - np.asarray(expected).astype(int)).max())


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (randaugment.equalize(PICTURE), PIL.ImageOps.equalize(PIL_PICTURE)),
        (randaugment.posterize(PICTURE, 4), PIL.ImageOps.posterize(PIL_PICTURE, 4)),
        (randaugment.solarize(PICTURE, 100), PIL.ImageOps.solarize(PIL_PICTURE, 100)),
        (OPERATIONS["Invert"](PICTURE, None), PIL.ImageOps.invert(PIL_PICTURE)),
        (OPERATIONS["Brightness"](tf.constant(PICTURE), 1.9), PIL.ImageEnhance.Brightness(PIL_PICTURE).enhance(1.9)),
        (
            OPERATIONS["TranslateX"](tf.constant(PICTURE), 9.0),
            PIL_PICTURE.transform(PIL_PICTURE.size, PIL.Image.AFFINE, (1, 0, 9, 0, 1, 0), fillcolor=(128,) * 3),
        ),
        (
            OPERATIONS["TranslateY"](tf.constant(PICTURE), -9.0),
            PIL_PICTURE.transform(PIL_PICTURE.size, PIL.Image.AFFINE, (1, 0, 0, 0, 1, -9), fillcolor=(128,) * 3),
        ),
        (randaugment.rotate(tf.constant(PICTURE), 90.0)[:, 8:45], PIL_PICTURE.rotate(90).crop((8, 0, 45, 37))),
    ],
    ids=["equalize", "posterize", "solarize", "invert", "brightness", "translate x", "translate y", "rotate"],
)
def test_operations_are_those_of_pil(found, expected):
    assert largest_difference(found, expected) == 0


@pytest.mark.parametrize("factor", [0.1, 1.0, 1.9, 2.8])
@pytest.mark.parametrize("name", ["Color", "Contrast", "Sharpness"])
def test_enhancements_are_those_of_pil_but_for_rounding(name, factor):
    """The original cuts to whole numbers where PIL rounds, once before and once after the factor is applied."""
    found = OPERATIONS[name](tf.constant(PICTURE), factor)
    expected = getattr(PIL.ImageEnhance, name)(PIL_PICTURE).enhance(factor)
    assert largest_difference(found, expected) <= max(factor - 1.0, 0.0) + 1.0
    if factor == 1.0:
        np.testing.assert_array_equal(found, PICTURE)


def test_auto_contrast_is_that_of_pil_but_for_rounding():
    assert largest_difference(randaugment.auto_contrast(PICTURE), PIL.ImageOps.autocontrast(PIL_PICTURE)) <= 1
    flat = np.full((4, 5, 3), 77, np.uint8)
    np.testing.assert_array_equal(randaugment.auto_contrast(flat), flat)
    np.testing.assert_array_equal(randaugment.equalize(flat), flat)


@pytest.mark.parametrize(
    ("name", "neutral"),
    [("Rotate", 0.0), ("ShearX", 0.0), ("ShearY", 0.0), ("TranslateX", 0.0), ("TranslateY", 0.0), ("Color", 1.0),
     ("Brightness", 1.0), ("Posterize", 8), ("Solarize", 256), ("SolarizeAdd", 0)],
)  # fmt: skip
def test_neutral_strengths_change_nothing(name, neutral):
    np.testing.assert_array_equal(OPERATIONS[name](tf.constant(PICTURE), neutral), PICTURE)


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


def test_sixteen_operations_are_drawn_evenly(monkeypatch):
    marks = {
        name: lambda image, _, n=n: tf.fill(image.shape, tf.constant(n, tf.uint8)) for n, name in enumerate(OPERATIONS)
    }
    monkeypatch.setattr(randaugment, "OPERATIONS", marks)
    monkeypatch.setattr(randaugment, "cutout", lambda image, half, seed: marks["Cutout"](image, half))
    image = tf.zeros((2, 3, 1), tf.uint8)  # a shape of its own, for operations are kept by shape
    draw = tf.function(lambda seed: randaugment.randaugment(image, seed, 2, 10.0)[0, 0, 0])
    counts = np.bincount([int(draw(seed)) for seed in seeds(640)], minlength=16)
    assert len(counts) == 16
    assert 20 <= counts.min() <= counts.max() <= 65


@pytest.mark.parametrize(
    "change",
    [
        lambda image, seed: randaugment.randaugment(image, seed, 2, 20.0),
        lambda image, seed: randaugment.randaugment(image[:, :, :1], seed, 2, 9.0),
        lambda image, seed: randaugment.autoaugment(image, seed),
        lambda image, seed: augment.random_erasing(image, seed, 0.7),
    ],
    ids=["RandAugment", "RandAugment of gray", "AutoAugment", "erasing"],
)
def test_policies_repeat_with_their_seed_and_vary_without(change):
    image = tf.constant(PICTURE)
    graph = tf.function(change)
    results = [graph(image, seed).numpy() for seed in seeds(12)]
    for seed, result in list(zip(seeds(12), results, strict=True))[:4]:
        np.testing.assert_array_equal(graph(image, seed), result)
        np.testing.assert_allclose(change(image, seed), result, atol=1)
    assert len({result.tobytes() for result in results}) > 5
    assert {(result.dtype, result.shape[:2]) for result in results} == {(np.dtype(np.uint8), (37, 53))}


def test_erasing_leaves_the_right_share_and_chance():
    image = tf.zeros((40, 50, 1), tf.uint8)
    erase = tf.function(lambda seed: augment.random_erasing(image, seed, 0.25))
    shares = np.array([np.mean(erase(seed).numpy() != 0) for seed in seeds(300)])
    assert 50 <= np.count_nonzero(shares) <= 100
    assert 0.015 < shares[shares > 0].min() < 0.05
    assert 0.3 < shares.max() < 0.41


@pytest.mark.parametrize("p", [0.1, 0.2, 0.8, 1.0])
def test_shares_are_of_the_beta_distribution(p):
    draw = tf.function(lambda seed: augment.beta(seed, p))
    shares = np.array([draw(seed).numpy() for seed in seeds(800)])
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
    data = encode(PICTURE)
    decoded = tf.io.decode_image(data)
    for seed in seeds(10):
        begin, size = augment.inception_window(tf.shape(decoded), seed)
        window = augment.decode_and_inception_crop(data, seed, Preprocessing((6, 8), channels))
        expected = to_channels(tf.slice(decoded, begin, size), channels)
        edge = 2 if encode is tf.io.encode_jpeg else 0  # its colors are interpolated from what lies outside
        inside = (slice(edge, size[0] - edge), slice(edge, size[1] - edge))
        np.testing.assert_array_equal(window[inside], expected[inside])


def test_the_smaller_side_is_resized_and_any_window_cut_out():
    resized = augment.resize_small(PICTURE, 16, Preprocessing((8, 8), resize="resize-small", crop_from=16))
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
VARIANTS = {
    "next": EVERYTHING,
    "opposite": dataclasses.replace(EVERYTHING, mixup_partner="opposite"),
    "resize-small": dataclasses.replace(EVERYTHING, inception_crop=False, resize="resize-small", crop_from=9),
    "stretch": dataclasses.replace(EVERYTHING, inception_crop=False, crop_from=9, cutmix=0.0),
}


@pytest.mark.parametrize(
    "name", ["next", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "next")]
)
def test_with_everything_any_step_and_any_part_can_be_made_again(name):
    recipe = VARIANTS[name]
    images = np.random.default_rng(0).integers(0, 256, (23, 11, 13, 3), dtype=np.uint8)
    split = array_split(images, np.arange(23) % 3, tuple("abc"))

    def batches(first_step: int, part: tuple[int, int] = (0, 1)) -> list[np.ndarray]:
        data = training_batches(
            split, recipe, recipe.preprocessing(3), num_classes=3, seed=4, first_step=first_step, part=part
        )
        return [np.stack([step.numpy() for step in steps]) for steps in zip(*data.take(6 - first_step), strict=True)]

    whole = batches(0)
    assert whole[0].shape == (6, 6, 6, 8, 3)
    np.testing.assert_allclose(whole[1].sum(axis=-1), 1.0, atol=1e-6)
    assert np.count_nonzero(whole[1].max(axis=-1) < 1.0) > 5  # labels are mixed too
    parts = [batches(3, (index, 2)) for index in range(2)]
    for kind, all_steps in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([part[kind] for part in parts], axis=1), all_steps[3:])


def test_what_trains_on_windows_is_evaluated_on_the_centre():
    assert VARIANTS["resize-small"].preprocessing(3) == Preprocessing((6, 8), 3, "resize-small", crop_from=9)
    assert VARIANTS["stretch"].preprocessing(1) == Preprocessing((6, 8), 1)

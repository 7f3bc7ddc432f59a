"""The order of examples and what happens to them on their way into a batch."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from keras_vit import Preprocessing, UserError
from keras_vit.images.files import Samples
from training.data.pipeline import evaluation_batches, resized_once, steps_per_epoch, training_batches
from training.data.sources import DataOptions, Split, array_split, open_source
from training.data.write import save_samples, write_samples
from training.recipes.pretrain import RECIPES

PREPROCESSING = Preprocessing((4, 6), channels=1)
MODEL = dataclasses.replace(RECIPES["digits"].model, patch_size=2)
RECIPE = dataclasses.replace(RECIPES["digits"], model=MODEL, image_size=(4, 6), batch_size=5, shift=0)
NAMES = tuple("abc")


def numbered_split(count: int = 23) -> Split:
    """Image number n is filled with n, so that an example can be read from its pixels."""
    images = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 4, 6, 1))
    return array_split(np.array(images), np.arange(count) % 3, NAMES)


def order(first_step: int, num_steps: int, seed: int = 0) -> np.ndarray:
    """Numbers of the examples of consecutive batches, (steps, batch)."""
    batches = training_batches(numbered_split(), RECIPE, PREPROCESSING, num_classes=3, seed=seed, first_step=first_step)
    return np.stack([np.round(images[:, 0, 0, 0] * 127.5 + 127.5) for images, _ in batches.take(num_steps)])


def test_an_epoch_holds_no_example_twice_and_epochs_differ():
    epochs = order(0, 12).reshape(3, 20)
    for epoch in epochs:
        assert len(set(epoch)) == 20
    assert not np.array_equal(epochs[0], epochs[1])
    assert set(epochs.ravel()) == set(range(23))  # another rest is left out in each epoch


def test_the_order_continues_from_any_step_and_changes_with_the_seed():
    whole = order(0, 12)
    for first in (1, 4, 7):
        np.testing.assert_array_equal(order(first, 12 - first), whole[first:])
    assert not np.array_equal(order(0, 8, seed=4), whole[:8])


def test_the_shuffle_leaves_no_neighbours_together():
    count = 2000

    def read(index):  # the number in two bytes
        image = tf.reshape(tf.cast([index // 256, index % 256] * 12, tf.uint8), (4, 6, 1))
        return image, tf.cast(index % 3, tf.int32)

    split = Split(count, read)
    recipe = dataclasses.replace(RECIPE, batch_size=count)
    preprocessing = Preprocessing((4, 6), channels=1, value_range=(0.0, 255.0))
    images, _ = next(iter(training_batches(split, recipe, preprocessing, num_classes=3, seed=0, first_step=0)))
    numbers = images[:, 0, 0, 0].numpy() * 256 + images[:, 0, 1, 0].numpy()
    assert sorted(numbers) == list(range(count))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


def test_a_batch_is_in_the_range_of_the_model_with_one_hot_labels():
    images, labels = next(
        iter(training_batches(numbered_split(), RECIPE, PREPROCESSING, num_classes=3, seed=0, first_step=0))
    )
    assert images.shape == (5, 4, 6, 1)
    assert images.dtype == tf.float32
    numbers = np.round(images[:, 0, 0, 0] * 127.5 + 127.5).astype(int)
    np.testing.assert_array_equal(np.argmax(labels, -1), numbers % 3)
    assert -1.0 <= images.numpy().min() <= images.numpy().max() <= 1.0


def epochs_of_one_image(seed: int = 0, **augmentations) -> list[bytes]:
    """The only image of a set, as ten epochs show it."""
    image = np.random.default_rng(3).integers(0, 256, (1, 4, 6, 1), dtype=np.uint8)
    recipe = dataclasses.replace(RECIPE, batch_size=1, **augmentations)
    split = array_split(image, np.array([0]), NAMES)
    batches = training_batches(split, recipe, PREPROCESSING, num_classes=3, seed=seed, first_step=0)
    return [images.numpy().tobytes() for images, _ in batches.take(10)]


@pytest.mark.parametrize(
    ("augmentation", "least", "most"),
    [({}, 1, 1), ({"flip": True}, 2, 2), ({"shift": 1}, 3, 9), ({"inception_crop": True}, 5, 10)],
)
def test_each_augmentation_changes_an_image_anew_in_every_epoch(augmentation, least, most):
    epochs = epochs_of_one_image(**augmentation)
    assert least <= len(set(epochs)) <= most
    assert (epochs != epochs_of_one_image(seed=1, **augmentation)) == bool(augmentation)


@pytest.mark.parametrize("inception_crop", [False, True])
def test_training_pads_as_evaluation_does(inception_crop):
    """A wide black image has white above and below; its random windows are padded instead of stretched."""
    preprocessing = Preprocessing((8, 8), channels=1, resize="pad")
    split = array_split(np.zeros((1, 8, 16, 1), np.uint8), np.array([0]), NAMES)
    recipe = dataclasses.replace(
        RECIPE, image_size=(8, 8), batch_size=1, resize="pad", inception_crop=inception_crop, flip=inception_crop
    )
    data = training_batches(split, recipe, preprocessing, num_classes=3, seed=0, first_step=0)
    if inception_crop:
        white = {float((images.numpy() == 1.0).mean()) for images, _ in data.take(10)}
        assert max(white) > 0.0
        assert max(white) <= 0.375  # the windows' aspect ratio is 0.75 to 1.33
        return
    (trained, _), (evaluated, _, _) = (
        next(iter(batches)) for batches in (data, evaluation_batches(split, preprocessing, num_classes=3, batch_size=1))
    )
    np.testing.assert_array_equal(trained, evaluated)
    np.testing.assert_allclose(evaluated[0, :, 0, 0], [1, 1, -1, -1, -1, -1, 1, 1], atol=1e-5)


@pytest.fixture(name="files", scope="module")
def _files(tmp_path_factory):
    """A source of image files, and its folder."""
    tmp_path = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 3)):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                image = random.integers(0, 256, (7 + number, 9, 3 + number % 2), np.uint8)
                path = tmp_path / split / name / f"{number}.png"
                path.write_bytes(tf.io.encode_png(image).numpy())
    return open_source(DataOptions(data=f"folder:{tmp_path}")), tmp_path


@pytest.mark.parametrize(
    ("evaluations", "fields"),
    [
        (1, {"mixup": 0.5, "shift": 1}),
        *(
            pytest.param(2, fields, marks=pytest.mark.slow)
            for fields in (
                {"resize": "crop", "shift": 1},
                {"resize": "pad", "flip": True, "shift": 1},
                {"crop_from": 8},
                {"randaugment_layers": 1, "randaugment_magnitude": 5.0},
            )
        ),
    ],
    ids=str,
)
def test_images_that_are_resized_once_give_the_same_batches_without_their_files(evaluations, fields, files):
    source, folder = files
    moved = folder.with_name("moved")
    recipe = dataclasses.replace(RECIPE, channels=3, **fields)
    preprocessing = recipe.preprocessing(3)

    def batches(source):
        training = training_batches(source.train, recipe, preprocessing, num_classes=2, seed=0, first_step=1)
        evaluation = evaluation_batches(source.evaluation, preprocessing, num_classes=2, batch_size=4)
        shown = (*training.take(3), *(evaluation if evaluations > 1 else ()))
        return [[tensor.numpy() for tensor in batch] for batch in shown]

    expected = batches(source)
    held = resized_once(source, recipe, preprocessing, epochs=2.5, evaluations=evaluations)
    assert held.fingerprint == source.fingerprint
    folder.rename(moved)
    try:
        for one, other in zip(batches(held), expected, strict=True):
            for array, same in zip(one, other, strict=True):
                np.testing.assert_array_equal(array, same)
    finally:
        moved.rename(folder)


@pytest.mark.parametrize("fields", [{"inception_crop": True}, {"resize": "resize-small", "crop_from": 7}])
def test_images_whose_windows_are_random_are_decoded_in_every_epoch(fields, files):
    source, _ = files
    recipe = dataclasses.replace(RECIPE, channels=3, **fields)
    assert resized_once(source, recipe, recipe.preprocessing(3), epochs=9, evaluations=1).train is source.train


def test_images_are_not_held_for_one_epoch_or_if_they_are_large(files, monkeypatch):
    source, _ = files
    recipe = dataclasses.replace(RECIPE, channels=3)
    assert resized_once(source, recipe, recipe.preprocessing(3), epochs=1.9, evaluations=1) == source
    monkeypatch.setattr("training.data.pipeline._HELD_BYTES", 12 * 4 * 6 * 3 * 4 - 1)
    held = resized_once(source, recipe, recipe.preprocessing(3), epochs=9, evaluations=9)
    assert held.train is source.train
    assert held.evaluation is not source.evaluation  # of half as many images


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(UserError, match="takes 24 images, but there are 23"):
        steps_per_epoch(numbered_split(), 24)


@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_evaluation_sees_every_example_once_in_order_and_pads_the_last_batch(batch_size):
    batches = evaluation_batches(numbered_split(), PREPROCESSING, num_classes=3, batch_size=batch_size)
    assert batches.element_spec[0].shape == (batch_size, 4, 6, 1)
    images, labels, weights = (np.concatenate(part) for part in zip(*batches, strict=True))
    np.testing.assert_array_equal(np.round(images[:23, 0, 0, 0] * 127.5 + 127.5), np.arange(23))
    np.testing.assert_array_equal(np.argmax(labels[:23], -1), np.arange(23) % 3)
    np.testing.assert_array_equal(weights, np.arange(len(images)) < 23)
    assert not images[23:].any()
    assert not labels[23:].any()


def test_parts_of_an_evaluation_hold_every_example_once_in_equally_many_batches():
    parts = [
        list(evaluation_batches(numbered_split(), PREPROCESSING, num_classes=3, batch_size=8, part=(index, 4)))
        for index in range(4)
    ]
    assert {len(part) for part in parts} == {3}
    numbers = [
        int(np.round(image[0, 0, 0] * 127.5 + 127.5))
        for part in parts
        for images, _, weights in part
        for image, weight in zip(images, weights, strict=True)
        if weight > 0.0
    ]
    assert sorted(numbers) == list(range(23))


def test_samples_kept_beside_a_model_are_the_evaluation_images(tmp_path):
    save_samples(numbered_split(), PREPROCESSING, tmp_path / "samples.npz")
    samples = Samples.from_file(tmp_path / "samples.npz")
    numbers = [int(tf.io.decode_png(image)[0, 0, 0]) for image in samples.encoded]
    assert sorted(numbers) == list(range(23))
    np.testing.assert_array_equal(samples.labels, np.array(numbers) % 3)


def test_samples_of_a_data_set_are_evaluation_images_with_the_names_of_their_classes(tmp_path):
    write_samples(DataOptions("digits"), tmp_path / "some", count=5)
    samples, digits = Samples.from_file(tmp_path / "some" / "samples.npz"), open_source(DataOptions("digits"))
    expected = [digits.evaluation.read(tf.constant(int(name.split()[1])))[0] for name in samples.names]
    np.testing.assert_array_equal([tf.io.decode_png(image) for image in samples.encoded], expected)
    assert (tmp_path / "some" / "labels.txt").read_text().split() == list("0123456789")


def test_large_samples_are_reduced_once_they_are_on_white(tmp_path):
    stripes = tf.where(tf.range(400)[:, None] % 2 == 0, [255, 0, 0, 255], [0, 255, 0, 0])  # red, and a hidden green
    image = tf.cast(tf.broadcast_to(stripes[:, None], (400, 300, 4)), tf.uint8)
    save_samples(Split(1, lambda index: (image, tf.constant(0))), Preprocessing((8, 10)), tmp_path / "samples.npz")
    [data] = Samples.from_file(tmp_path / "samples.npz").encoded
    assert tf.io.decode_png(data).shape == (32, 24, 3)
    middle = tf.io.decode_png(data)[8:24, 8:16].numpy().astype(int)  # (height, width, RGB)
    np.testing.assert_allclose(middle, np.broadcast_to([255, 127.5, 127.5], middle.shape), atol=2)


def test_training_without_augmentation_shows_what_evaluation_shows():
    image = np.random.default_rng(1).integers(0, 256, (9, 11, 1), np.uint8)
    split = Split(1, lambda index: (tf.constant(image), tf.constant(0)))
    recipe = dataclasses.replace(RECIPE, batch_size=1, shift=0, flip=False, inception_crop=False)
    options = {"num_classes": 2, "seed": 0, "first_step": 0, "num_steps": 1}
    [(trained, _)] = training_batches(split, recipe, PREPROCESSING, **options)
    [(evaluated, _, _)] = evaluation_batches(split, PREPROCESSING, num_classes=2, batch_size=1)
    np.testing.assert_array_equal(trained, evaluated)


@pytest.mark.parametrize(("resize", "enters"), [("pad", 1.0), ("stretch", -1.0)])
def test_beside_white_padding_white_enters_a_shifted_image(resize, enters):
    split = Split(1, lambda index: (tf.fill((8, 8, 3), tf.constant(9, tf.uint8)), tf.constant(0)))
    preprocessing = Preprocessing((8, 8), resize=resize, background="white")
    recipe = dataclasses.replace(RECIPES["digits"], resize=resize, channels=3, shift=3, batch_size=1, image_size=(8, 8))
    batches = training_batches(split, recipe, preprocessing, num_classes=1, seed=0, first_step=0, num_steps=4)
    pixels = np.unique([images for images, _ in batches.as_numpy_iterator()])
    np.testing.assert_allclose(pixels, sorted([enters, 9 / 127.5 - 1]), atol=1e-6)

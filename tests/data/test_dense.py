"""Images with masks and boxes: one transform moves all of them, and batches do not depend on the worker."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from tests.segmentation.shapes import shapes
from training.data.dataset import Split
from training.data.dense import DenseBatches, model_geometry, moved_image, moved_target, random_geometry
from training.recipes.dense import EOMT

SIZE = (32, 40)
RECIPE = dataclasses.replace(EOMT, image_size=SIZE, batch_size=4, color_jitter=0.0)
PREPROCESSING = RECIPE.preprocessing(3)


def photo(height: int = 50, width: int = 70) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A dark image with a bright rectangle, its segments, and its box."""
    image, segments = np.full((height, width, 3), 20.0, np.float32), np.zeros((height, width), np.int32)
    image[15:35, 25:55], segments[15:35, 25:55] = 230.0, 1
    return image, segments, np.array([[0, 0, width, height], [25, 15, 55, 35]], np.float32)


@pytest.mark.parametrize("seed", range(12))
def test_image_masks_and_boxes_move_together(seed):
    image, segments, boxes = photo()
    geometry = random_geometry(tf.constant(image.shape[:2]), tf.constant([7, seed], tf.int64), RECIPE)
    moved = moved_image(tf.constant(image), geometry, PREPROCESSING).numpy()
    labels = tf.constant([0, 1])
    masks = moved_target({"labels": labels, "segments": tf.constant(segments)}, geometry, SIZE)
    boxed = moved_target({"labels": labels, "boxes": tf.constant(boxes)}, geometry, SIZE)
    inside = masks["segments"].numpy() == 1
    value, within = moved[..., 0], masks["segments"].numpy() >= 0
    assert inside[within & (value > 190)].all()  # without those on the edges
    assert not inside[within & (value < 60)].any()
    np.testing.assert_array_equal(moved[masks["segments"].numpy() == -1], 255.0)  # beside the image
    if boxed["labels"][1] == 1:
        x, y, w, h = boxed["boxes"][1].numpy() * [*SIZE[::-1], *SIZE[::-1]]
        rows, columns = np.nonzero(inside)
        np.testing.assert_allclose(
            [x - w / 2, y - h / 2, x + w / 2, y + h / 2],
            [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1],
            atol=1.6,
        )
    assert (masks["labels"][1] == 1) == inside.any()


def test_the_geometry_of_a_model_is_that_of_its_preprocessing():
    image, segments, boxes = photo()
    for preprocessing in (PREPROCESSING, keras_vit.Preprocessing(SIZE), keras_vit.Preprocessing(SIZE, resize="crop")):
        geometry = model_geometry(tf.constant(image.shape[:2]), preprocessing)
        expected = preprocessing.resized(image)
        masks = moved_target({"labels": tf.constant([0, 1]), "segments": tf.constant(segments)}, geometry, SIZE)
        seen = masks["segments"].numpy()
        assert ((np.array(expected)[..., 0] > 125)[seen >= 0] != (seen[seen >= 0] == 1)).mean() < 0.03
        boxed = moved_target({"labels": tf.constant([0, 1]), "boxes": tf.constant(boxes)}, geometry, SIZE)["boxes"]
        inside = preprocessing.boxes_in_input(boxes[1], image.shape[:2])
        np.testing.assert_allclose(boxed[1], np.clip(inside, 0, 1), atol=1e-6)


def test_batches_are_filled_up_and_the_same_for_all_workers():
    source = shapes(8, 3)
    options = {"seed": 3, "first_step": 1, "num_steps": 2}
    whole = list(source.batches.training(source.train, RECIPE, PREPROCESSING, **options).as_numpy_iterator())
    second = source.batches.training(source.train, RECIPE, PREPROCESSING, **options, part=(1, 2)).as_numpy_iterator()
    for (images, targets), (own, own_targets) in zip(whole, second, strict=True):
        assert images.shape == (4, *SIZE, 3)
        assert targets["labels"].shape == (4, 4)
        np.testing.assert_array_equal(images[2:], own)
        for name, values in targets.items():
            np.testing.assert_array_equal(values[2:], own_targets[name])
    first = next(iter(source.batches.training(source.train, RECIPE, PREPROCESSING, **{**options, "first_step": 2})))
    np.testing.assert_array_equal(first[0], whole[1][0])


def test_the_last_evaluation_batch_is_filled_with_what_does_not_count():
    source = shapes(8, 3)
    (_, targets, weights), *rest = source.batches.evaluation(
        source.evaluation, PREPROCESSING, batch_size=4
    ).as_numpy_iterator()
    assert not rest
    np.testing.assert_array_equal(weights, [1, 1, 1, 0])
    assert (targets["labels"][3] == -1).all()


def test_a_box_that_a_window_hardly_shows_is_no_target():
    image = np.zeros((40, 40, 3), np.uint8)
    boxes = tf.constant([[8.0, 8.0, 12.0, 12.0], [10.0, 10.0, 30.0, 30.0]])
    split = Split(1, lambda index: (tf.constant(image), tf.constant(-1)), target=lambda index: {
        "labels": tf.constant([2, 5]), "boxes": boxes,
    })  # fmt: skip
    recipe = dataclasses.replace(RECIPE, image_size=(40, 40), batch_size=1, scale_jitter=(2.0, 2.0))
    batches = DenseBatches(3).training(split, recipe, recipe.preprocessing(3), seed=0, first_step=0, num_steps=20)
    kept = np.array([targets["labels"][0] for _, targets in batches.as_numpy_iterator()])
    assert (kept[:, 2] == -1).all()
    assert 0 < (kept[:, 0] == 2).sum() < 20

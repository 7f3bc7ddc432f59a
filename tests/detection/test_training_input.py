"""What a detector is trained on: images and boxes are changed together; the loss is that of the golden data."""

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import DetectionConfig, Preprocessing
from keras_vit.files.keras_model import load_model
from keras_vit.models.matching_losses import DETECTION_WEIGHTS
from tests.support import FIXTURES
from training.data.annotations.images import Box, BoxedImage
from training.data.annotations.open_boxes import BoxData
from training.detection.fit import box_data_set
from training.objectives.dense import BoxSetPrediction
from training.recipes.dense import DetectRecipe

RECIPE = DetectRecipe(image_size=(48, 64), batch_size=4, learning_rate=0.1, steps=1, flip=True, mosaic=0.5)
PAD = Preprocessing((48, 64), resize="pad", padding="after", background="black")
COLORS = {0: (255, 0, 0), 1: (0, 255, 0), 2: (0, 0, 255)}


@pytest.fixture(name="data", scope="module")
def _data(tmp_path_factory) -> BoxData:
    """Black images, of which each box is filled with the color of its class; one of three has no box."""
    folder, photos = tmp_path_factory.mktemp("boxes"), []
    for number in range(6):
        pixels = np.zeros((60, 80, 3), np.uint8)
        corners = np.array([[8, 4, 24, 20], [40, 30, 76, 54]], np.float32)[: number % 3]
        classes = (np.arange(len(corners)) + number) % 3
        for (left, top, right, bottom), label in zip(corners.astype(int), classes, strict=True):
            pixels[top:bottom, left:right] = COLORS[label]
        PIL.Image.fromarray(pixels).save(folder / f"{number}.png")
        rows = zip(corners.tolist(), classes.tolist(), strict=True)
        boxes = tuple(Box(label, (x, y, right - x, bottom - y)) for (x, y, right, bottom), label in rows)
        photos.append(BoxedImage(folder / f"{number}.png", (60, 80), boxes))
    return BoxData(("red", "green", "blue"), tuple(photos), tuple(photos), has_split=True, kind="coco")


@pytest.fixture(name="batches", scope="module")
def _batches(data) -> list:
    """Some batches of single images and of mosaics."""
    source = box_data_set(data)
    batches = source.batches.training(source.train, RECIPE, PAD, seed=3, first_step=0)
    return list(batches.take(6).as_numpy_iterator())


def test_boxes_stay_on_their_objects(batches):
    """The middle of each box has the color of its class, in single images and in quarters of mosaics."""
    found = []
    for images, targets in batches:
        pixels = (images + 1) * 127.5
        assert images.shape == (4, 48, 64, 3)
        assert targets["labels"].shape == (4, 8)
        for image, labels, boxes in zip(pixels, targets["labels"], targets["boxes"], strict=True):
            found.append((labels[labels >= 0], boxes[labels >= 0]))
            for label, (x, y, _, _) in zip(*found[-1], strict=True):
                np.testing.assert_allclose(image[int(y * 48), int(x * 64)], COLORS[label], atol=60)
    assert {*np.concatenate([labels for labels, _ in found])} == {0, 1, 2}
    # Of a single image, a box may be wider than half of it, and there are two at most.
    assert max(boxes[:, 2].max(initial=0) for _, boxes in found) > 0.5
    assert max(len(labels) for labels, _ in found) > 2


def test_evaluation_shows_every_image_once_with_the_boxes_of_the_input(data):
    source = box_data_set(data)
    batches = source.batches.evaluation(source.evaluation, PAD, batch_size=4)
    found = list(batches.as_numpy_iterator())
    np.testing.assert_array_equal(np.concatenate([each[2] for each in found]), [1] * 6 + [0] * 2)
    boxes = np.concatenate([each[1]["boxes"] for each in found])
    np.testing.assert_allclose(boxes[2][:2], PAD.boxes_in_input(data.train[2].targets[0], (60, 80)), atol=1e-6)


def test_the_objective_is_the_golden_loss():
    data = dict(np.load(FIXTURES / "tasks" / "detection_loss.io.npz"))
    labels, boxes = np.full((2, 4), -1, np.int32), np.zeros((2, 4, 4), np.float32)
    for image in range(2):
        count = len(data[f"class_labels_{image}"])
        labels[image, :count], boxes[image, :count] = data[f"class_labels_{image}"], data[f"boxes_{image}"]
    targets = {"labels": tf.constant(labels), "boxes": tf.constant(boxes)}
    targets["num_targets"] = tf.fill([2], float((labels >= 0).sum()) / 2)
    outputs = {"class_logits": tf.constant(data["logits"]), "boxes": tf.constant(data["pred_boxes"])}
    measure = tf.function(BoxSetPrediction().measure)
    losses, sums = measure(tf.zeros((2, 1)), targets, outputs, tf.ones(2))
    parts = {"classes": "loss_ce", "boxes": "loss_bbox", "overlap": "loss_giou"}
    expected = sum(DETECTION_WEIGHTS[name] * data[key] for name, key in parts.items())
    assert float(losses.numpy().mean()) == pytest.approx(float(expected), rel=1e-5)
    assert 0.0 < float(sums[1]) < 2.0
    assert float(sums[2]) == 2.0
    nothing = {**targets, "labels": tf.fill(labels.shape, -1), "num_targets": tf.ones(2)}
    _, sums = measure(tf.zeros((2, 1)), nothing, outputs, tf.ones(2))
    assert float(sums[1]) == 2.0


def test_detection_heads_fit_models_without_class_token_and_with_registers(tmp_path):
    small = {"patch_size": 8, "hidden_size": 12, "num_layers": 1, "num_heads": 3, "mlp_dim": 16}
    for more in ({"classifier": "gap", "with_class_token": False}, {"num_registers": 2}):
        config = keras_vit.ViTConfig(**small, **more)
        model = keras_vit.detection_model(config, DetectionConfig(4), image_size=(16, 24))
        images = np.random.default_rng(0).random((1, 16, 24, 3)).astype(np.float32)
        boxes = model(images)["boxes"]
        assert boxes.shape == (1, 6, 4)
        model.save(tmp_path / "x.keras")
        np.testing.assert_array_equal(load_model(tmp_path / "x.keras")(images)["boxes"], boxes)

"""Open-vocabulary detection: OWL-ViT and OWLv2, boxes and losses, against transformers."""

import dataclasses
import functools
import itertools
import json

import keras
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

import keras_vit
from keras_vit import DetectionConfig, Preprocessing, UserError
from keras_vit.files.safetensors import read_json
from keras_vit.models import detection
from keras_vit.models.detection import box_iou, to_corners
from keras_vit.models.matching_losses import detection_losses, match_boxes, matched_queries
from keras_vit.text.zero_shot import with_text_head
from tests.support import FIXTURES, TINY, TINY_IMAGE, assert_equal_weights, changed_folder, others_slow

TASKS = FIXTURES / "tasks"
INDEX = json.loads((TASKS / "index.json").read_text())["fixtures"]
OWL = ["hf_owlvit", "hf_owlv2"]
TOLERANCE = {"atol": 2e-5, "rtol": 1e-4}


@functools.cache
def golden_model(name: str, image_size: tuple[int, int] | None = None):
    return keras_vit.from_checkpoint(TASKS / name, image_size=image_size)


def recorded(name: str, size: str = "") -> dict:
    return dict(np.load(TASKS / (f"{name}_large.npz" if size else INDEX[name]["io"])))


def queries_of(data: dict) -> np.ndarray:
    """Embeddings of texts (B, K, E), zeros for a text that is not there."""
    present = data["input_ids"].reshape(*data["text_embeds"].shape[:2], -1)[..., :1] > 0
    return np.where(present, data["text_embeds"], 0.0).astype(np.float32)


# Between them both detectors and both sizes.
SIZES = others_slow(itertools.product(OWL, ("", "large")), ("hf_owlvit", "large"), ("hf_owlv2", ""))


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_boxes_embeddings_and_logits_agree_with_transformers(name, size):
    """At the size of the file and at another, rectangular one (interpolate_pos_encoding)."""
    data = recorded(name, size)
    model = keras_vit.with_queries(golden_model(name, data["images"].shape[1:3]))
    outputs = model({"image": data["images"], "queries": queries_of(data)})
    pairs = {"boxes": "pred_boxes", "class_embeddings": "class_embeds", "class_logits": "logits"}
    if name == "hf_owlv2":
        pairs["objectness"] = "objectness_logits"
    assert outputs.keys() == pairs.keys()
    assert golden_model(name).output.keys() == pairs.keys() - {"class_logits"}
    for ours, key in pairs.items():
        np.testing.assert_allclose(outputs[ours], data[key], **TOLERANCE, err_msg=key)


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_an_object_on_another_image_is_found_as_transformers_does(name, size):
    data = recorded(name, size)
    model = golden_model(name, data["images"].shape[1:3])
    embeddings, patches = keras_vit.query_embeddings(model, data["images"][1:])
    assert patches.shape == (1,)
    outputs = keras_vit.with_queries(model)({"image": data["images"][:1], "queries": embeddings[:, None]})
    np.testing.assert_allclose(outputs["class_logits"], data["guided_logits"], **TOLERANCE)


@pytest.mark.parametrize("name", OWL)
def test_texts_find_what_they_find_in_transformers(name):
    """The text tower of the same folder, with the recorded token ids."""
    data = recorded(name)
    embeddings = keras_vit.text_tower(TASKS / name)(data["input_ids"].astype(np.int32))
    texts = np.reshape(embeddings, data["text_embeds"].shape)
    present = data["input_ids"].reshape(*texts.shape[:2], -1)[..., :1] > 0
    np.testing.assert_allclose(np.where(present, texts, 0), queries_of(data), **TOLERANCE)
    model = keras_vit.with_queries(golden_model(name))
    logits = model({"image": data["images"], "queries": np.where(present, texts, 0)})["class_logits"]
    np.testing.assert_allclose(logits, data["logits"], **TOLERANCE)


@pytest.mark.parametrize("name", OWL)
def test_a_detector_is_written_back_beside_its_text_tower(name, tmp_path):
    model = keras_vit.from_checkpoint(TASKS / name)
    model.get_layer("box_head.Dense_2").bias.assign([1.0, 2.0, 3.0, 4.0])
    keras_vit.save_checkpoint(model, tmp_path / name, layout="huggingface", two_towers=TASKS / name)
    original, copy = (safetensors.numpy.load_file(f / name / "model.safetensors") for f in (TASKS, tmp_path))
    assert original.keys() == copy.keys()
    assert [key for key in original if not np.array_equal(original[key], copy[key])] == ["box_head.dense2.bias"]


def test_the_object_in_a_given_box_is_the_query():
    data = recorded("hf_owlv2")
    model = golden_model("hf_owlv2")
    boxes = data["pred_boxes"][:, 7]
    _, patches = keras_vit.query_embeddings(model, data["images"], boxes)
    ious, _ = box_iou(to_corners(data["pred_boxes"]), to_corners(boxes[:, None]))
    chosen = np.take_along_axis(np.asarray(ious), patches[:, None], axis=1)
    assert (chosen >= 0.8 * np.max(ious, axis=1, keepdims=True)).all()
    for wrong in (boxes[:1], boxes.T):
        with pytest.raises(UserError, match="one for each image"):
            keras_vit.query_embeddings(model, data["images"], wrong)


def test_classes_are_saved_with_the_model(tmp_path):
    data = recorded("hf_owlvit")
    texts = data["text_embeds"][0]
    model = keras_vit.with_classes(golden_model("hf_owlvit"), texts)
    expected = model(data["images"])["class_logits"]
    np.testing.assert_allclose(expected[0], data["logits"][0], **TOLERANCE)
    model.save(tmp_path / "x.keras")
    again = keras.models.load_model(tmp_path / "x.keras")
    np.testing.assert_array_equal(again(data["images"])["class_logits"], expected)
    with pytest.raises(ValueError, match="cannot reshape"):
        keras_vit.with_classes(golden_model("hf_owlvit"), texts[0])
    with pytest.raises(UserError, match="does not detect by class embeddings"):
        keras_vit.with_classes(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=0), texts)


@pytest.mark.parametrize("name", OWL)
def test_the_image_side_of_a_detector_is_written_as_it_was_read(name, tmp_path):
    keras_vit.save_checkpoint(golden_model(name), tmp_path / name, layout="huggingface")
    original, copy = (safetensors.numpy.load_file(f / name / "model.safetensors") for f in (TASKS, tmp_path))
    kind = name.removeprefix("hf_")
    others = ("text_model.", "text_projection.", "visual_projection.", "logit_scale")
    image_side = {key for key in original if not key.startswith(tuple(f"{kind}.{other}" for other in others))}
    assert copy.keys() == image_side
    for key in image_side:
        np.testing.assert_array_equal(copy[key], original[key], err_msg=key)
    stored, written = (read_json(f / name / "config.json") for f in (TASKS, tmp_path))
    assert stored["vision_config"].items() - written["vision_config"].items() <= {
        ("attention_dropout", 0.0),
        ("initializer_factor", 1.0),
        ("initializer_range", 0.02),
        ("projection_dim", 32),
    }
    assert written["text_config"]["hidden_size"] == stored["text_config"]["hidden_size"]
    again = keras_vit.from_checkpoint(tmp_path / name)
    assert_equal_weights(again, golden_model(name))
    made, of_file = (keras_vit.preprocessing_of(each) for each in (again, golden_model(name)))
    np.testing.assert_allclose(made.value_range, of_file.value_range, rtol=1e-12)
    assert dataclasses.replace(made, value_range=of_file.value_range) == of_file


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "owlvit"}, "unsupported model_type='owlvit'; supported: owlv2"),
        ({"text_config": {"hidden_size": 31}}, "embeddings of=31, but the arrays are of a model with 32"),
        ({"vision_config": {"num_hidden_layers": 2}}, "num_hidden_layers=2, but the arrays"),
        ({"vision_config": [1]}, "vision_config. as an object"),
        ({"vision_config": {"image_size": 24}}, "image_size"),
    ],
)
def test_a_config_of_another_detector_is_refused(change, sentence, tmp_path):
    config = read_json(TASKS / "hf_owlv2" / "config.json")
    fields = {n: config[n] | value if isinstance(value, dict) else value for n, value in change.items()}
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(changed_folder(TASKS / "hf_owlv2", tmp_path / "x", **fields))


@pytest.mark.parametrize("key", ["box_head.dense1.weight", "objectness_head.dense2.bias"])
def test_an_incomplete_detector_is_refused(key, tmp_path):
    with pytest.raises(UserError, match="missing keys"):
        keras_vit.from_checkpoint(changed_folder(TASKS / "hf_owlv2", tmp_path / "x", without=key))


def test_texts_as_classes_of_images_are_refused_for_a_detector(tmp_path):
    embeddings = np.eye(2, 32, dtype=np.float32)
    with pytest.raises(UserError, match="boxes, for which keras_vit.with_classes"):
        with_text_head(TASKS / "hf_owlvit", None, embeddings, None)


def test_a_detector_begins_with_boxes_at_its_patches():
    """On any backbone with a class token; the bias is that of OWL-ViT, the lower right corner of the patch."""
    model = keras_vit.detection_model(TINY, DetectionConfig(8), image_size=TINY_IMAGE)
    for leaf in model.get_layer("box_head.Dense_2").weights:
        leaf.assign(leaf * 0)
    boxes = np.asarray(model(np.zeros((1, *TINY_IMAGE, 3), np.float32))["boxes"])[0]
    rows, columns = TINY.grid(TINY_IMAGE)
    np.testing.assert_allclose(boxes[0], [1 / columns, 1 / rows, 1 / columns, 1 / rows], atol=2e-4)
    np.testing.assert_allclose(boxes[-1, :2], 1.0, atol=2e-4)


def _padded(data: dict) -> tuple[np.ndarray, np.ndarray]:
    labels, boxes = np.full((2, 3), -1), np.zeros((2, 3, 4), np.float32)
    for image in range(2):
        count = len(data[f"class_labels_{image}"])
        labels[image, :count], boxes[image, :count] = data[f"class_labels_{image}"], data[f"boxes_{image}"]
    return labels, boxes


def test_matching_and_losses_of_boxes_are_those_of_transformers():
    data = dict(np.load(TASKS / "detection_loss.io.npz"))
    labels, boxes = _padded(data)
    matched = match_boxes(data["logits"], data["pred_boxes"], labels, boxes)
    for image in range(2):
        queries, numbers = data[f"matched_{image}"]
        np.testing.assert_array_equal(matched[image, numbers], queries)
    losses = detection_losses(data["logits"], data["pred_boxes"], labels, boxes, matched)
    for ours, key in (("classes", "loss_ce"), ("boxes", "loss_bbox"), ("overlap", "loss_giou")):
        np.testing.assert_allclose(losses[ours], data[key], atol=1e-5, rtol=1e-5, err_msg=key)


def test_an_image_without_objects_has_only_the_loss_of_its_classes():
    data = dict(np.load(TASKS / "detection_loss.io.npz"))
    labels, boxes = np.full((2, 1), -1), np.zeros((2, 1, 4), np.float32)
    matched = match_boxes(data["logits"], data["pred_boxes"], labels, boxes)
    losses = detection_losses(data["logits"], data["pred_boxes"], labels, boxes, matched, alpha=None, gamma=0.0)
    np.testing.assert_allclose(losses["classes"], np.log1p(np.exp(data["logits"])).sum(), rtol=1e-5)
    assert float(losses["boxes"]) == float(losses["overlap"]) == 0.0


def test_each_query_has_one_target_and_worthless_ones_come_last():
    costs = np.array([[[4.0, 1.0, np.nan], [2.0, 5.0, 0.0]]])
    np.testing.assert_array_equal(matched_queries(costs, np.ones((1, 3))), [[-1, 0, 1]])
    np.testing.assert_array_equal(matched_queries(costs, [[1, 0, 1]]), [[0, -1, 1]])


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"resize": "stretch"}, [57 / 4, 0.0, 57.0, 33 / 2]),
        # OWLv2: the square of the longer side, the image in its upper left corner
        (
            {
                "resize": "pad",
                "padding": "after",
                "background": "gray",
                "interpolation": "gaussian",
                "dtype": "float32",
            },
            [57 / 4, 0.0, 57.0, 57 / 2],
        ),
        # The 33 rows are 12 of the input.
        ({"resize": "pad", "padding": "after", "background": "gray"}, [57 / 4, 0.0, 57.0, 33 * 10 / 12]),
        ({"resize": "pad"}, [57 / 4, -11.0, 57.0, 16.5]),
    ],
)
def test_boxes_find_their_way_back_to_the_image_and_again_to_the_input(options, shown):
    preprocessing = Preprocessing(20, library="transformers", **{"background": None, **options})
    box = np.array([5 / 8, 1 / 4, 3 / 4, 1 / 2])
    corners = preprocessing.boxes_in_picture(box, (33, 57))
    np.testing.assert_allclose(corners, shown, atol=1e-4)
    np.testing.assert_allclose(preprocessing.boxes_in_input(corners, (33, 57)), box, atol=1e-6)


def test_overlaps_are_suppressed_as_by_tensorflow():
    """Greedily, the most likely box first, and equal ones in their order; the same in a saved layer."""
    rng = np.random.default_rng(0)
    boxes = np.concatenate([rng.uniform(0.2, 0.8, (4, 60, 2)), rng.uniform(0.01, 0.4, (4, 60, 2))], axis=-1)
    logits = np.round(rng.normal(size=(4, 60, 2)), 1).astype(np.float32)
    layer = detection.SuppressOverlaps(0.3)
    layer = detection.SuppressOverlaps.from_config(layer.get_config())
    found = np.asarray(layer(logits, boxes.astype(np.float32)))
    for number in range(4):
        x, y, w, h = boxes[number].T
        corners = np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], axis=-1)
        kept = tf.image.non_max_suppression(corners, logits[number].max(axis=-1), 60, 0.3).numpy()
        left_out = np.setdiff1d(np.arange(60), kept)
        np.testing.assert_array_equal(found[number, kept], logits[number, kept])
        assert len(left_out)
        assert (found[number, left_out] == detection.SUPPRESSED).all()

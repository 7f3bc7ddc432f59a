"""Detectors, models that segment, and embeddings as SavedModel, TFLite and ONNX: all give the outputs of the model."""

import dataclasses
import functools
import json

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

import keras_vit
from export import parity, tasks
from export.onnx import export as onnx_export
from export.options import OnnxOptions, SavedModelOptions, SourceOptions, TFLiteOptions
from export.saved_model import __main__ as saved_model
from export.saved_model.export import export_saved_model
from export.source import ExportedModel, random_images
from export.tflite import __main__ as tflite
from export.tflite.export import export_tflite
from export.tflite.tflite_file import run_interpreter
from keras_vit import DetectionConfig, SegmentationConfig, UserError, inspection
from keras_vit.errors import ParityError
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import LinearSegmentationConfig
from keras_vit.models.segmentation import segment_outputs
from keras_vit.run import Run
from tests.export import cpp_loader
from tests.segmentation.shapes import LABELS
from tests.support import FIXTURES, TINY, TINY_IMAGE, encoded, others_slow, randomize
from training.detection.detector import open_detector

SOURCE = SourceOptions("a model")
SEGMENTER = dataclasses.replace(TINY, patch_size=8, hidden_size=24, mlp_dim=32, classifier="none")
PREPROCESSING = keras_vit.Preprocessing((32, 40), resize="pad", padding="after")
SEGMENTS = {
    "linear": LinearSegmentationConfig(4),
    "semantic": SegmentationConfig(4, 6, 1, 1),
    "instance": SegmentationConfig(4, 6, 1, 1, task="instance"),
    "panoptic": SegmentationConfig(4, 6, 1, 1, task="panoptic", stuff=(0, 1)),
}
CHECKPOINTS = FIXTURES / "tasks"
DETECTORS = ("detector", "owl")  # the first pads to the right and below, as OWLv2 does
NAMES = (*SEGMENTS, *DETECTORS, "embeddings", "unit length")


@functools.cache
def task_of(name: str) -> tasks.Task:
    """A tiny model of a task with two images, as exports take it, of which tests only read."""
    labels = LABELS
    if name in SEGMENTS:
        model = randomize(Blueprint(SEGMENTER, PREPROCESSING, task=SEGMENTS[name]).build())
        if name in ("instance", "panoptic"):  # segments that are likely
            model.get_layer("class_head").kernel.assign(3.0 * model.get_layer("class_head").kernel.numpy())
    elif name in DETECTORS:
        rule = keras_vit.Preprocessing(TINY_IMAGE, resize="pad", padding="after")
        model = keras_vit.from_checkpoint(CHECKPOINTS / "hf_owlv2") if name == "owl" else None
        model = model or randomize(Blueprint(TINY, rule, task=DetectionConfig(8)).build())
        classes = np.random.default_rng(1).normal(size=(3, 32 if name == "owl" else 8))
        # Of its boxes on one object it finds the likeliest alone.
        model, labels = keras_vit.with_classes(model, classes, max_overlap=0.3), LABELS[:3]
    else:
        model = keras_vit.from_checkpoint(CHECKPOINTS / "hf_clip_two_towers")
    exported = ExportedModel(model, labels, random_images(keras_vit.preprocessing_of(model)).some(2))
    if name in (*SEGMENTS, *DETECTORS):
        return tasks.Segmentation(exported) if name in SEGMENTS else tasks.Detection(exported)
    return tasks.embedding_of(exported, normalize=name == "unit length")


def check(name: str, run) -> None:
    """The outputs that `run` gives for images (B, h, w, C) are those of the model."""
    model = task_of(name).exported.model
    images = np.random.default_rng(0).uniform(-1, 1, (2, *model.input_shape[1:])).astype(np.float32)
    outputs, found = model(images), run(images)
    if name in SEGMENTS:
        expected = segment_outputs(outputs, SEGMENTS[name], PREPROCESSING)
    elif name in DETECTORS:
        expected = {"detections": np.concatenate([outputs["boxes"], outputs["class_logits"]], axis=-1)}
    else:
        lengths = np.linalg.norm(outputs, axis=1, keepdims=True) if name == "unit length" else 1.0
        expected = {"embeddings": outputs / lengths}
    both = [{key: np.asarray(value) for key, value in each.items()} for each in (expected, found)]
    assert {key: value.shape for key, value in both[0].items()} == {key: value.shape for key, value in both[1].items()}
    ours, theirs = ([{key: value[row] for key, value in each.items()} for row in range(2)] for each in both)
    task_of(name).measure("file", parity.Reference(None, None, outputs=ours), theirs, exact=True)


def served(name: str, place):
    """Export a SavedModel. Returns its path, its measures, and its signatures."""
    path, measures = export_saved_model(task_of(name), SavedModelOptions(SOURCE, str(place / "served")))
    return path, measures, tf.saved_model.load(path).signatures


def photos() -> list[bytes]:
    """Files of several sizes, the last one turned by its EXIF orientation."""
    rng, files, turned = np.random.default_rng(0), [], PIL.Image.Exif()
    turned[0x0112] = 6
    for number, (width, height) in enumerate([(57, 33), (20, 81), (41, 30)]):
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        files.append(encoded(pixels, **({"exif": turned} if number == 2 else {})))
    return files


@pytest.mark.parametrize("name", others_slow(NAMES, "panoptic"))
def test_tflite_files_have_the_outputs_of_the_model(name, tmp_path):
    low = "float16" if name in DETECTORS else "int8-dynamic"
    written = export_tflite(task_of(name), TFLiteOptions(SOURCE, str(tmp_path), ("float32", low)))
    check(name, lambda images: run_interpreter(written["float32"][0].read_bytes(), images))
    files = json.loads((tmp_path / "report.json").read_text())["files"]
    assert list(files) == ["float32", low]
    rule = keras_vit.preprocessing_of(task_of(name).exported.model)
    page = (tmp_path / "report.md").read_text()
    assert rule.summary() in page
    assert "Operators" not in page  # which nobody counted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_onnx_files_have_the_outputs_of_the_model(name, tmp_path):
    pytest.importorskip("tf2onnx")
    pytest.importorskip("onnxruntime")
    path, _ = onnx_export.export_onnx(task_of(name), OnnxOptions(SOURCE, str(tmp_path)))
    check(name, onnx_export.open_file(path))


@pytest.mark.parametrize("name", others_slow(DETECTORS, "detector"))
def test_a_saved_model_finds_in_files_what_the_detector_finds(name, tmp_path):
    task_of(name).exported.model.save(tmp_path / "model.keras")
    (tmp_path / "labels.txt").write_text("\n".join(LABELS[:3]) + "\n")
    path, _, signatures = served(name, tmp_path)
    answer = {key: value.numpy() for key, value in signatures["serving_default"](image_bytes=photos()).items()}
    detector = open_detector(Run.open(tmp_path))
    images = [inspection.decode(data, "x", preprocessing=detector.preprocessing) for data in photos()]
    assert images[2].pixels.shape[:2] == (41, 30)
    for number, objects in enumerate(detector.detect(images, 100)):
        boxes, scores, classes, labels = (answer[key][number] for key in ("boxes", "scores", "classes", "labels"))
        has_area = (boxes[:, 2:] > boxes[:, :2]).all(axis=-1) & (scores > 0)
        np.testing.assert_allclose(scores[has_area], objects.scores, atol=1e-5)
        np.testing.assert_allclose(boxes[has_area], objects.corners, atol=2e-2)
        np.testing.assert_array_equal(classes[has_area], objects.classes)
        assert [label.decode() for label in labels] == [LABELS[label] for label in classes]
    assert json.loads((path / "report.json").read_text())["files"]["SavedModel"]["max_abs_diff"] < 1e-4
    assert signatures["serving_default"](image_bytes=tf.constant([], tf.string))["boxes"].shape[0] == 0


@pytest.mark.parametrize("name", others_slow(SEGMENTS, "panoptic"))
def test_a_saved_model_takes_files_and_gives_segments_at_the_size_of_the_image(name, tmp_path):
    path, measures, signatures = served(name, tmp_path)
    assert min(measures["equal_pixels"], measures["equal_pixels_of_files"]) >= 0.999
    data = tf.io.encode_png(np.random.default_rng(0).integers(0, 256, (51, 23, 3), np.uint8))
    answer = {key: value.numpy() for key, value in signatures["serving_default"](image_bytes=data).items()}
    key = {"instance": "masks", "panoptic": "segment_map"}.get(name, "label_map")
    assert answer[key].shape[-2:] == (51, 23)
    if name == "panoptic":
        assert answer["segment_map"].max() < len(answer["classes"]) == len(answer["labels"])
        names = [LABELS[label].encode() if label < 4 else b"" for label in answer["classes"]]
        assert all(a == b for a, b in zip(answer["labels"], names, strict=True) if b)
    assert json.loads((path / "report.json").read_text())["files"]["SavedModel"]["equal_pixels"] >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embeddings", "unit length"])
def test_the_signature_embed_gives_the_embeddings_of_files(name, tmp_path):
    path, _, signatures = served(name, tmp_path)
    model, files = keras_vit.from_checkpoint(CHECKPOINTS / "hf_clip_two_towers"), photos()
    preprocess = keras_vit.preprocessing_of(model)
    expected = np.asarray(model(np.stack([np.asarray(preprocess(preprocess.decode(file))) for file in files])))
    lengths = np.linalg.norm(expected, axis=1, keepdims=True) if name == "unit length" else 1.0
    found = signatures["embed"](image_bytes=tf.constant(files))["embeddings"]
    np.testing.assert_allclose(found, expected / lengths, rtol=0, atol=1e-4)
    assert json.loads((path / "report.json").read_text())["files"]["SavedModel"]["least_cosine"] > 0.9999


@pytest.mark.slow
@pytest.mark.parametrize(("name", "output"), [("owl", "boxes"), ("semantic", "label_map")])
def test_the_cpp_loader_gives_the_same(name, output, tmp_path):
    path, _, signatures = served(name, tmp_path)
    files = np.array(photos() if name == "owl" else photos()[0], object)
    expected = signatures["serving_default"](image_bytes=tf.constant(files))[output].numpy()
    found = cpp_loader.run(path, "serving_default", output, files)
    np.testing.assert_allclose(found.view(expected.dtype), expected, atol=1e-3)


@pytest.mark.slow
def test_an_image_without_any_object_is_served(tmp_path, monkeypatch):
    task = task_of.__wrapped__("panoptic")
    task.exported.model.get_layer("class_head").bias.assign([0.0] * 4 + [50.0])  # the last is no object
    path, _ = export_saved_model(task, SavedModelOptions(SOURCE, str(tmp_path / "served")))
    serve = tf.saved_model.load(path).signatures["serving_default"]
    answer = serve(image_bytes=tf.io.encode_png(np.zeros((20, 30, 3), np.uint8)))
    assert answer["segment_map"].numpy().max() == -1


def test_what_the_head_reads_is_the_embedding_of_a_classifier_and_of_a_model_without_head():
    def embedded(**options) -> tuple[keras.Model, keras.Model]:
        model = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, **options))
        samples = random_images(keras_vit.preprocessing_of(model))
        return model, tasks.embedding_of(ExportedModel(model, (), samples)).exported.model

    images = np.random.default_rng(1).normal(size=(2, *TINY_IMAGE, 3)).astype(np.float32)
    model, embedding = embedded(num_classes=3)
    np.testing.assert_allclose(embedding(images), keras_vit.intermediates(model, "pre_logits")(images))
    model, embedding = embedded(num_classes=0)
    np.testing.assert_allclose(embedding(images), model(images))


def test_the_command_exports_the_embeddings_of_a_checkpoint_without_head(tmp_path):
    model = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=0))
    model.save(tmp_path / "features.keras")
    options = ["--checkpoint", str(tmp_path / "features.keras"), "--output", str(tmp_path / "out")]
    saved_model.main([*options, "--embeddings", "unit-length", "--verify-images", "3"])
    images = tf.random.stateless_uniform((2, *TINY_IMAGE, 3), (0, 1), -1.0, 1.0)
    signatures = tf.saved_model.load(tmp_path / "out" / "1").signatures
    features = np.asarray(model(images))
    expected = features / np.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(signatures["embed_tensor"](image=images)["embeddings"], expected, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="--xla applies only to an export of classes"):
        saved_model.main([*options, "--embeddings", "features", "--xla"])


def test_boxes_and_embeddings_that_are_elsewhere_are_not_kept():
    expected = np.random.default_rng(0).random((30, 7))
    assert tasks.agreement_of_boxes(expected, expected) == 1.0
    moved = expected + np.eye(7)[0]
    assert tasks.agreement_of_boxes(expected, moved) < 0.5
    reference = parity.Reference(None, None, outputs=[{"detections": expected}])
    with pytest.raises(ParityError, match="of the most likely boxes"):
        tasks.Detection(None).measure("int8 file", reference, [{"detections": moved}], exact=False)
    rows = [{"embeddings": row} for row in np.eye(3, dtype=np.float32)]
    reference = parity.Reference(None, None, outputs=rows)
    for exact, words in ((False, "has the cosine 0.0000"), (True, "from the model's by up to 1, more than 0.0001")):
        with pytest.raises(ParityError, match=words):
            tasks.Embedding(None).measure("file", reference, rows[::-1], exact=exact)


def test_segments_with_other_pixels_masks_or_scores_are_not_kept():
    def measure(right, found, *, exact: bool) -> dict:
        reference = parity.Reference(None, None, outputs=[right])
        return tasks.Segmentation(None).measure("file", reference, [found], exact=exact)

    right, wrong = {"label_map": np.zeros((8, 8), int)}, {"label_map": np.eye(8, dtype=int)}
    assert measure(right, right, exact=True) == {"equal_pixels": 1.0, "score_difference": 0.0}
    with pytest.raises(ParityError, match="87.5% of the pixels of the file are those of the model, fewer than 90.0%"):
        measure(right, wrong, exact=False)
    mask, scores = np.zeros((1, 64, 64), bool), np.array([0.9])
    mask[0, 3, 3] = True
    right = {"masks": mask, "classes": np.zeros(1, int), "scores": scores}
    no_mask = {name: value[:0] for name, value in right.items()}
    for change in ({"masks": np.roll(mask, 1, axis=1)}, {"classes": np.ones(1, int)}, no_mask):
        with pytest.raises(ParityError, match="0.0% of the pixels of the file"):
            measure(right, right | change, exact="masks" in change)
    with pytest.raises(ParityError, match="The scores of the file differ from the model's by up to 0.2"):
        measure(right, right | {"scores": scores - 0.2}, exact=True)


def test_tasks_and_formats_without_an_export_are_refused(tmp_path):
    tokens = keras_vit.build(dataclasses.replace(TINY, classifier="unpooled"), image_size=TINY_IMAGE, num_classes=0)
    with pytest.raises(UserError, match="needs one vector per image"):
        tasks.embedding_of(ExportedModel(tokens, (), random_images(keras_vit.preprocessing_of(tokens))))
    for name in ("embeddings", "detector"):
        with pytest.raises(UserError, match="int8 is calibrated for classes"):
            export_tflite(task_of(name), TFLiteOptions(SOURCE, str(tmp_path), ("int8",)))
    with pytest.raises(UserError, match="has no classes of its own"):
        tflite.main(["--checkpoint", str(CHECKPOINTS / "hf_owlvit"), "--output", str(tmp_path)])

"""Exports of models that segment: at the size of the image, at a fixed size, and in the loader of C++."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from export.options import OnnxOptions, SavedModelOptions, SourceOptions, TFLiteOptions
from export.parity import Reference
from export.saved_model.export import export_saved_model
from export.source import random_images
from export.tasks import Segmentation, open_task
from export.tflite.export import export_tflite
from keras_vit import SegmentationConfig
from keras_vit.errors import ParityError
from keras_vit.models.blueprint import Blueprint
from keras_vit.models.config import LinearSegmentationConfig
from keras_vit.models.segmentation import segment_outputs
from keras_vit.run import Run
from tests.export import cpp_loader
from tests.segmentation.shapes import LABELS
from tests.support import others_slow, randomize

TINY = keras_vit.ViTConfig(patch_size=8, hidden_size=24, num_layers=2, num_heads=3, mlp_dim=32, classifier="none")
PREPROCESSING = keras_vit.Preprocessing((32, 40), resize="pad", padding="after")
TASKS = {
    "linear": LinearSegmentationConfig(4),
    "semantic": SegmentationConfig(4, 6, 1, 1),
    "instance": SegmentationConfig(4, 6, 1, 1, task="instance"),
    "panoptic": SegmentationConfig(4, 6, 1, 1, task="panoptic", stuff=(0, 1)),
}


@functools.cache
def exported(task: str):
    """A model of a task, of which tests only read."""
    model = randomize(Blueprint(TINY, PREPROCESSING, task=TASKS[task]).build())
    if task in ("instance", "panoptic"):  # segments that are likely
        model.get_layer("class_head").kernel.assign(3.0 * model.get_layer("class_head").kernel.numpy())
    source = open_task(Run.of_model(model, labels=LABELS), SourceOptions(run="memory"))
    samples = random_images(PREPROCESSING)
    few = dataclasses.replace(samples, encoded=samples.encoded[:2], labels=samples.labels[:2])
    return Segmentation(dataclasses.replace(source.exported, labels=LABELS, samples=few))


def served(place) -> SavedModelOptions:
    return SavedModelOptions(SourceOptions("a model"), str(place / "served"))


def measure(right, found, *, exact: bool) -> dict:
    """The differences of the outputs for one image."""
    return Segmentation(None).measure("file", Reference(None, None, outputs=[right]), [found], exact=exact)


@pytest.mark.parametrize("task", others_slow(TASKS, "panoptic"))
def test_a_saved_model_takes_files_and_gives_segments_at_the_size_of_the_image(task, tmp_path):
    path, measures = export_saved_model(exported(task), served(tmp_path))
    assert min(measures["equal_pixels"], measures["equal_pixels_of_files"]) >= 0.999
    serve = tf.saved_model.load(path).signatures["serving_default"]
    data = tf.io.encode_png(np.random.default_rng(0).integers(0, 256, (51, 23, 3), np.uint8))
    answer = {name: value.numpy() for name, value in serve(image_bytes=data).items()}
    key = {"instance": "masks", "panoptic": "segment_map"}.get(task, "label_map")
    assert answer[key].shape[-2:] == (51, 23)
    if task == "panoptic":
        assert answer["segment_map"].max() < len(answer["classes"]) == len(answer["labels"])
        names = [LABELS[label].encode() if label < 4 else b"" for label in answer["classes"]]
        assert all(a == b for a, b in zip(answer["labels"], names, strict=True) if b)
    report = json.loads((path / "report.json").read_text())
    assert report["files"]["SavedModel"]["equal_pixels"] >= 0.999


@pytest.mark.slow
def test_a_saved_model_answers_in_the_loader_of_c_plus_plus(tmp_path):
    path, _ = export_saved_model(exported("semantic"), served(tmp_path))
    data = tf.io.encode_png(np.random.default_rng(0).integers(0, 256, (51, 23, 3), np.uint8)).numpy()
    expected = tf.saved_model.load(path).signatures["serving_default"](image_bytes=tf.constant(data))["label_map"]
    found = cpp_loader.run(path, "serving_default", "label_map", np.array(data, object)).view(np.int32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("task", others_slow(TASKS, "panoptic"))
def test_tflite_files_have_the_same_outputs_at_a_fixed_size(task, tmp_path):
    written = export_tflite(
        exported(task), TFLiteOptions(SourceOptions("memory"), str(tmp_path / "phone"), ("float32", "int8-dynamic"))
    )
    assert written["float32"][1]["equal_pixels"] >= 0.999
    assert written["int8-dynamic"][1]["equal_pixels"] >= 0.9
    report = json.loads((tmp_path / "phone" / "report.json").read_text())
    assert set(report["files"]) == {"float32", "int8-dynamic"}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_onnx_files_have_the_same_outputs_at_a_fixed_size(task, tmp_path):
    pytest.importorskip("onnxruntime")
    from export.onnx.export import export_onnx

    options = OnnxOptions(SourceOptions(run="memory"), str(tmp_path / "portable"))
    path, measures = export_onnx(exported(task), options)
    assert path.is_file()
    assert measures["equal_pixels"] >= 0.999


def test_an_export_with_other_pixels_is_not_kept():
    right, wrong = {"label_map": np.zeros((8, 8), int)}, {"label_map": np.eye(8, dtype=int)}
    assert measure(right, right, exact=True) == {"equal_pixels": 1.0, "score_difference": 0.0}
    with pytest.raises(ParityError, match="87.5% of the pixels of the file are those of the model, fewer than 90.0%"):
        measure(right, wrong, exact=False)


def test_small_masks_and_scores_that_differ_are_not_kept():
    mask, scores = np.zeros((1, 64, 64), bool), np.array([0.9])
    mask[0, 3, 3] = True
    right = {"masks": mask, "classes": np.zeros(1, int), "scores": scores}
    with pytest.raises(ParityError, match="0.0% of the pixels of the file"):
        measure(right, right | {"masks": np.roll(mask, 1, axis=1)}, exact=True)
    with pytest.raises(ParityError, match="0.0% of the pixels of the file"):
        measure(right, right | {"classes": np.ones(1, int)}, exact=False)
    with pytest.raises(ParityError, match="0.0% of the pixels of the file"):
        measure(right, {name: value[:0] for name, value in right.items()}, exact=True)
    with pytest.raises(ParityError, match="The scores of the file differ from the model's by up to 0.2"):
        measure(right, right | {"scores": scores - 0.2}, exact=True)


@pytest.mark.slow
def test_an_image_without_any_object_is_served(tmp_path):
    source = exported.__wrapped__("panoptic")
    head = source.exported.model.get_layer("class_head")
    head.bias.assign([0.0] * 4 + [50.0])  # the last is no object
    path, _ = export_saved_model(source, served(tmp_path))
    serve = tf.saved_model.load(path).signatures["serving_default"]
    answer = serve(image_bytes=tf.io.encode_png(np.zeros((20, 30, 3), np.uint8)))
    assert answer["segment_map"].numpy().max() == -1


def test_the_model_of_segments_gives_what_the_outputs_say():
    task = exported("panoptic")
    model = task.exported.model
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 40, 3)).astype(np.float32)
    expected = segment_outputs(model(images), TASKS["panoptic"], PREPROCESSING)
    for name, value in task.network(model)(images).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)

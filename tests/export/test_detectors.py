"""Detectors as SavedModel, TFLite and ONNX: boxes in pixels of the given image, equal to the model's."""

import functools
import json
import pathlib

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

import keras_vit
from export.onnx import __main__ as onnx_command
from export.parity import Reference
from export.saved_model import __main__ as saved_model
from export.tasks import Detection, agreement_of_boxes
from export.tflite import __main__ as tflite
from keras_vit import DetectionConfig, UserError, inspection
from keras_vit.errors import ParityError
from keras_vit.models.blueprint import Blueprint
from keras_vit.run import Run
from tests.export import cpp_loader
from tests.support import FIXTURES, TINY, TINY_IMAGE, encoded, others_slow, randomize
from training.detection.detector import open_detector

NAMES = ("ant", "bee", "cat")


def own() -> keras.Model:
    """A detector that pads to the right and below, as OWLv2 does."""
    rule = keras_vit.Preprocessing(TINY_IMAGE, resize="pad", padding="after")
    return randomize(Blueprint(TINY, rule, task=DetectionConfig(8)).build())


MODELS = {"own": own, "owl": lambda: keras_vit.from_checkpoint(FIXTURES / "tasks" / "hf_owlv2")}


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory):
    """Makes the directory of a detector: of its boxes on one object it finds the likeliest alone."""

    @functools.cache
    def make(name: str) -> pathlib.Path:
        folder, model = tmp_path_factory.mktemp(name), MODELS[name]()
        classes = np.random.default_rng(1).normal(size=(3, 8 if name == "own" else 32))
        keras_vit.with_classes(model, classes, max_overlap=0.3).save(folder / "model.keras")
        (folder / "labels.txt").write_text("\n".join(NAMES) + "\n")
        return folder

    return make


def photos() -> list[bytes]:
    """Files of several sizes, the last one turned by its EXIF orientation."""
    rng, files, turned = np.random.default_rng(0), [], PIL.Image.Exif()
    turned[0x0112] = 6
    for number, (width, height) in enumerate([(57, 33), (20, 81), (41, 30)]):
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        files.append(encoded(pixels, **({"exif": turned} if number == 2 else {})))
    return files


@pytest.mark.parametrize("name", others_slow(MODELS, "own"))
def test_a_saved_model_finds_in_files_what_the_detector_finds(name, place, tmp_path, capsys):
    saved_model.main(["--run", str(place(name)), "--output", str(tmp_path / "served"), "--verify-images", "3"])
    version = tmp_path / "served" / "1"
    served = tf.saved_model.load(version)
    answer = served.signatures["serving_default"](image_bytes=tf.constant(photos()))
    detector = open_detector(Run.open(place(name)))
    images = [inspection.decode(data, "x", preprocessing=detector.preprocessing) for data in photos()]
    assert images[2].pixels.shape[:2] == (41, 30)
    for number, objects in enumerate(detector.detect(images, 100)):
        scores, boxes = answer["scores"][number].numpy(), answer["boxes"][number].numpy()
        has_area = (boxes[:, 2:] > boxes[:, :2]).all(axis=-1) & (scores > 0)
        np.testing.assert_allclose(scores[has_area], objects.scores, atol=1e-5)
        np.testing.assert_allclose(boxes[has_area], objects.corners, atol=2e-2)
        np.testing.assert_array_equal(answer["classes"][number].numpy()[has_area], objects.classes)
        labels = [label.decode() for label in answer["labels"][number].numpy()]
        assert labels == [NAMES[label] for label in answer["classes"][number]]
    report = json.loads((version / "report.json").read_text())
    assert report["files"]["SavedModel"]["max_abs_diff"] < 1e-4
    assert "boxes and logits within" in capsys.readouterr().out
    empty = served.signatures["serving_default"](image_bytes=tf.constant([], tf.string))
    assert empty["boxes"].shape[0] == 0


@pytest.mark.slow
def test_the_cpp_loader_finds_the_same(place, tmp_path):
    saved_model.main(["--run", str(place("owl")), "--output", str(tmp_path / "served")])
    version = tmp_path / "served" / "1"
    loaded = tf.saved_model.load(version).signatures["serving_default"]
    expected = loaded(image_bytes=tf.constant(photos()))["boxes"].numpy()
    boxes = cpp_loader.run(version, "serving_default", "boxes", np.array(photos(), object))
    np.testing.assert_allclose(boxes, expected, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tflite_files_give_boxes_and_logits(name, place, tmp_path):
    options = ["--output", str(tmp_path), "--formats", "float32", "float16"]
    tflite.main(["--run", str(place(name)), *options])
    interpreter = Interpreter(str(tmp_path / "detector-float32.tflite"))
    interpreter.allocate_tensors()
    model = Run.open(place(name)).model
    image = np.random.default_rng(0).normal(size=(1, *model.input_shape[1:])).astype(np.float32)
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    interpreter.invoke()
    found = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    outputs = model(image)
    np.testing.assert_allclose(found[..., :4], outputs["boxes"], atol=1e-5)
    np.testing.assert_allclose(found[..., 4:], outputs["class_logits"], atol=1e-4)
    assert json.loads((tmp_path / "report.json").read_text())["files"]["float16"]["agreement"] >= 0.9
    report, rule = (tmp_path / "report.md").read_text(), keras_vit.preprocessing_of(model)
    assert "padding='after'" in report
    assert f"interpolation={rule.interpolation!r}" in report


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_onnx_files_give_the_same(name, place, tmp_path):
    pytest.importorskip("tf2onnx")
    runtime = pytest.importorskip("onnxruntime")
    onnx_command.main(["--run", str(place(name)), "--output", str(tmp_path)])
    model = Run.open(place(name)).model
    images = np.random.default_rng(0).normal(size=(3, *model.input_shape[1:])).astype(np.float32)
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(["detections"], {"image": images})
    outputs = model(images)
    np.testing.assert_allclose(found, np.concatenate([outputs["boxes"], outputs["class_logits"]], axis=-1), atol=1e-4)


def test_formats_that_move_boxes_and_detectors_without_classes_are_refused(place, tmp_path):
    expected = np.random.default_rng(0).random((30, 7))
    assert agreement_of_boxes(expected, expected) == 1.0
    moved = expected + np.eye(7)[0]
    assert agreement_of_boxes(expected, moved) < 0.5
    with pytest.raises(ParityError, match="of the most likely boxes"):
        reference = Reference(None, None, outputs=[{"detections": expected}])
        Detection(None).measure("int8 file", reference, [{"detections": moved}], exact=False)
    with pytest.raises(UserError, match="has no classes of its own"):
        tflite.main(["--checkpoint", str(FIXTURES / "tasks" / "hf_owlvit"), "--output", str(tmp_path)])
    with pytest.raises(UserError, match="is calibrated for classes"):
        tflite.main(["--run", str(place("own")), "--output", str(tmp_path), "--formats", "int8", "--calibration", "."])

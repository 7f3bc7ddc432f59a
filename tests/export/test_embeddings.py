"""Embeddings of images as SavedModel and TFLite: of models with and without a head, normalized or not."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

import keras_vit
from export.onnx import __main__ as onnx_command
from export.options import SavedModelOptions, SourceOptions, TFLiteOptions
from export.parity import Reference
from export.saved_model import __main__ as saved_model
from export.saved_model.export import export_saved_model
from export.source import ExportedModel, random_images
from export.tasks import embedding_of
from export.tflite import __main__ as tflite
from export.tflite.export import export_tflite
from keras_vit.errors import ParityError, UserError
from tests.support import FIXTURES, TINY, TINY_IMAGE, randomize


def tiny(**options):
    return randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, **options))


def phone(directory, *formats):
    return TFLiteOptions(SourceOptions("memory"), str(directory), formats)


@pytest.fixture(name="clip", scope="module")
def _clip():
    return keras_vit.from_checkpoint(FIXTURES / "tasks" / "hf_clip_two_towers")


def task_of(model, *, normalize=False):
    samples = random_images(keras_vit.preprocessing_of(model))
    return embedding_of(ExportedModel(model, (), samples), normalize=normalize)


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
def test_the_signature_embed_gives_the_embeddings_of_clip(normalize, clip, tmp_path):
    task = task_of(clip, normalize=normalize)
    samples = task.exported.samples
    path, _ = export_saved_model(task, SavedModelOptions(SourceOptions("a model"), str(tmp_path / "served")))
    found = tf.saved_model.load(path).signatures["embed"](image_bytes=tf.constant(samples.encoded))["embeddings"]
    preprocess = keras_vit.preprocessing_of(clip)
    images = np.stack([np.asarray(preprocess(tf.io.decode_png(file).numpy())) for file in samples.encoded])
    expected = np.asarray(clip(images))
    if normalize:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert json.loads((path / "report.json").read_text())["files"]["SavedModel"]["least_cosine"] > 0.9999


@pytest.mark.slow
def test_tflite_files_give_the_embeddings(clip, tmp_path):
    command = ["--checkpoint", str(FIXTURES / "tasks" / "hf_clip_two_towers"), "--embeddings", "unit-length"]
    tflite.main([*command, "--output", str(tmp_path), "--formats", "float32", "int8-dynamic"])
    interpreter = Interpreter(str(tmp_path / "embeddings-float32.tflite"))
    interpreter.allocate_tensors()
    image = np.random.default_rng(0).normal(size=(1, 20, 20, 3)).astype(np.float32)
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    interpreter.invoke()
    found = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    expected = np.asarray(clip(image))
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "report.json").read_text())["files"]["int8-dynamic"]["least_cosine"] >= 0.99


def test_what_the_head_reads_is_the_embedding_of_a_classifier_and_of_a_model_without_head():
    images = np.random.default_rng(1).normal(size=(2, *TINY_IMAGE, 3)).astype(np.float32)
    model = tiny(num_classes=3)
    expected = keras_vit.intermediates(model, "pre_logits")(images)
    np.testing.assert_allclose(task_of(model).exported.model(images), expected)
    features = tiny(num_classes=0)
    np.testing.assert_allclose(task_of(features).exported.model(images), features(images))


def test_a_model_of_all_tokens_and_a_calibrated_format_are_refused(clip, tmp_path):
    tokens = keras_vit.build(dataclasses.replace(TINY, classifier="unpooled"), image_size=TINY_IMAGE, num_classes=0)
    with pytest.raises(UserError, match="needs one vector per image"):
        task_of(tokens)
    with pytest.raises(UserError, match="int8 is calibrated for classes"):
        export_tflite(task_of(clip), phone(tmp_path, "int8"))


def test_embeddings_that_point_elsewhere_are_not_kept(clip):
    task, rows = task_of(clip), [{"embeddings": row} for row in np.eye(3, dtype=np.float32)]
    expected = Reference(None, None, outputs=rows)
    with pytest.raises(ParityError, match="has the cosine 0.0000"):
        task.measure("file", expected, rows[::-1], exact=False)
    with pytest.raises(ParityError, match="differ from the model's by up to 1, more than 0.0001"):
        task.measure("file", expected, rows[::-1], exact=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnx_files_give_the_embeddings(tmp_path):
    pytest.importorskip("tf2onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = tiny(num_classes=0)
    model.save(tmp_path / "features.keras")
    options = ["--checkpoint", str(tmp_path / "features.keras"), "--output", str(tmp_path / "out")]
    onnx_command.main([*options, "--embeddings", "features"])
    images = np.random.default_rng(0).normal(size=(3, *TINY_IMAGE, 3)).astype(np.float32)
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(["embeddings"], {"image": images})
    np.testing.assert_allclose(found, model(images), atol=1e-5)


def test_the_command_exports_a_checkpoint_without_head(tmp_path):
    model = tiny(num_classes=0)
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

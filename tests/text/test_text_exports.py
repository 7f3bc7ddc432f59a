"""Exports of models whose classes are texts: the logits and probabilities of both towers, and no tokenizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

import keras_vit
from export.onnx import __main__ as onnx_command
from export.saved_model import __main__ as saved_model
from export.tflite import __main__ as tflite
from tests.export import cpp_loader
from tests.text.towers import CLIP, SIGLIP, golden, texts_of, with_tokenizer


@pytest.fixture(name="texts", scope="module", params=[CLIP, SIGLIP])
def _texts(request, tmp_path_factory):
    """(name of the golden towers, folder with the model of their texts as texts.keras)."""
    folder = tmp_path_factory.mktemp("texts")
    with_tokenizer(request.param, folder / "towers")
    model = keras_vit.zero_shot(folder / "towers", texts_of(request.param))
    model.save(folder / "texts.keras")
    return request.param, folder


def probabilities_of(name: str, logits: np.ndarray) -> np.ndarray:
    """Sigmoid of SigLIP's logits, softmax of CLIP's."""
    activation = keras.activations.sigmoid if name == SIGLIP else keras.activations.softmax
    return keras.ops.convert_to_numpy(activation(keras.ops.convert_to_tensor(logits)))


@pytest.mark.slow
def test_the_cpp_loader_gives_the_probabilities_of_both_towers(texts, tmp_path):
    name, folder = texts
    saved_model.main(["--checkpoint", str(folder / "texts.keras"), "--output", str(tmp_path / "served")])
    version = tmp_path / "served" / "1"
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 3), np.uint8)
    files = np.array([tf.io.encode_png(image).numpy() for image in pixels], object)
    found = cpp_loader.run(version, "serving_default", "probabilities", files)
    model = keras.models.load_model(folder / "texts.keras")
    logits = model(np.stack([np.asarray(keras_vit.preprocessing_of(model)(photo)) for photo in pixels]))
    np.testing.assert_allclose(found, probabilities_of(name, logits), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_tflite_and_onnx_files_give_the_logits_of_both_towers(texts, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    name, folder = texts
    run = ["--checkpoint", str(folder / "texts.keras")]
    tflite.main([*run, "--output", str(tmp_path), "--formats", "float32"])
    onnx_command.main([*run, "--output", str(tmp_path)])
    io = golden(name)
    interpreter = Interpreter(str(tmp_path / "model-float32.tflite"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    interpreter.allocate_tensors()
    for image, expected in zip(io["images"].astype(np.float32), io["logits_per_image"], strict=True):
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image[None])
        interpreter.invoke()
        found = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])[0]
        for logits in (found, session.run(None, {session.get_inputs()[0].name: image[None]})[0][0]):
            np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)

"""TFLite files for GPUs and NPUs: the model in four axes, the rules of delegates, and float16 simulated."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from export.options import SourceOptions, TFLiteOptions
from export.source import random_images
from export.tflite import delegate_model as delegates
from export.tflite.convert import to_delegate_tflite
from export.tflite.delegate_checks import broken_rules, require_rules, run_in_half, to_float16
from export.tflite.tflite_file import run_interpreter
from keras_vit import Preprocessing, UserError
from keras_vit.errors import ParityError
from tests.exports import tflite_of
from tests.models.test_saving import CONFORMANCE, REWRITTEN
from tests.support import TINY, TINY_IMAGE, others_slow, randomize

INPUTS = np.random.default_rng(0).uniform(-1, 1, (3, *TINY_IMAGE, 3)).astype(np.float32)
# What has no form for delegates.
REFUSED = ("relative", "axial", "axial resnet", "shifted patches", "locality", "sequence pooling")
SUPPORTED = [name for name in CONFORMANCE if name not in REFUSED]


def built(name: str) -> keras.Model:
    return randomize(keras_vit.build(CONFORMANCE[name], image_size=TINY_IMAGE, num_classes=7))


@pytest.mark.parametrize("name", others_slow(SUPPORTED, *REWRITTEN))
def test_the_model_in_four_axes_is_the_model(name):
    model = built(name)
    found = np.asarray(delegates.delegate_model(model, INPUTS)(INPUTS))
    expected = np.asarray(model(INPUTS))
    assert found.ndim == 4
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", others_slow(REFUSED, "relative", "shifted patches"))
def test_what_has_no_form_is_refused_by_the_name_of_its_layer(name):
    with pytest.raises(UserError, match=r"The layer '.*' \(.*\) has no form for GPUs and NPUs; take --target cpu"):
        delegates.delegate_model(built(name), INPUTS)


@pytest.mark.parametrize("name", others_slow(("token", "map", "rotary", "two heads", "hybrid", "bit"), "token"))
def test_a_file_keeps_the_rules_of_both_targets_and_is_the_model(name):
    model = built(name)
    content = to_delegate_tflite(model, INPUTS)
    assert not broken_rules(content, "gpu")
    assert not broken_rules(content, "npu")
    np.testing.assert_allclose(run_interpreter(content, INPUTS)["logits"], model(INPUTS), rtol=1e-4, atol=1e-4)


def converted(function, shape=(1, 4, 4, 3)) -> bytes:
    graph = tf.function(function, [tf.TensorSpec(shape)], autograph=False).get_concrete_function()
    return tf.lite.TFLiteConverter.from_concrete_functions([graph]).convert()


@pytest.mark.parametrize(
    ("rule", "target", "function"),
    [
        ("four axes", "npu", lambda x: tf.nn.softmax(tf.reshape(x, (1, 16, 3))) * 2.0),
        ("leading dimension 1", "gpu", lambda x: tf.nn.softmax(tf.transpose(x, (1, 0, 2, 3))) * 2.0),
        ("no broadcast addition to a batched product", "gpu", lambda x: tf.matmul(x, x, transpose_b=True) + x[..., :1]),
        ("no output that is read again", "gpu", lambda x: (y := tf.nn.relu(x), tf.tanh(y))),
        ("no SUM, which overflows in float16", "gpu", lambda x: tf.reduce_sum(x, 1, keepdims=True)),
        ("operators of the GPU delegate", "gpu", lambda x: tf.reverse(x, [1])),
        ("operators of the GPU delegate", "gpu", lambda x: x[:, :1] * x[:, :, :1]),
        ("floating point", "gpu", lambda x: tf.cast(x, tf.int32)),
        ("operators of an NPU", "npu", lambda x: -x),
    ],
)
def test_a_broken_rule_is_named(rule, target, function):
    with pytest.raises(ParityError, match=rf"The file breaks rules for --target {target} \(.*{rule}: [A-Z].* from \("):
        require_rules("file", converted(function), target)


def test_dynamic_shapes_and_a_file_above_two_gibibytes_are_refused(monkeypatch):
    monkeypatch.setattr("export.tflite.delegate_checks._LARGEST_FILE", 100)
    assert broken_rules(converted(tf.nn.relu, (None, 4, 4, 3)), "gpu").keys() == {"static shapes", "less than 2 GiB"}


def images_of(images: np.ndarray) -> types.SimpleNamespace:
    """What the simulation reads of parity.Reference."""
    return types.SimpleNamespace(batches=lambda: [((), images)])


def in_half(x):
    return np.asarray(x, np.float16)


def test_float16_is_that_of_numpy():
    kernel = np.random.default_rng(1).normal(size=(2, 2, 3, 5)).astype(np.float32)

    def function(x):
        y = tf.nn.relu(tf.nn.conv2d(x, kernel, 2, "VALID"))  # (1, 2, 2, 5)
        y = y - tf.reduce_mean(y, -1, keepdims=True)
        return tf.reshape(tf.nn.softmax(tf.matmul(y, y, transpose_b=True) * 0.3), (1, 8))

    images = np.random.default_rng(2).uniform(-1, 1, (4, 4, 4, 3)).astype(np.float32)
    found = run_in_half(converted(function), images_of(images))
    for image, logits in zip(images, found, strict=True):
        patches = in_half(image).reshape(2, 2, 2, 2, 3).swapaxes(1, 2).reshape(2, 2, 12)  # rows, columns, pixels
        y = in_half(patches.astype(np.float32) @ in_half(kernel).reshape(12, 5).astype(np.float32))
        y = in_half(np.maximum(y, 0))
        y = in_half(y - in_half(y.astype(np.float32).mean(-1, keepdims=True)))
        products = in_half(y.astype(np.float32) @ y.astype(np.float32).swapaxes(1, 2))
        products = in_half(products.astype(np.float32) * np.float32(np.float16(0.3)))
        powers = np.exp(products.astype(np.float32) - products.max(-1, keepdims=True))
        np.testing.assert_allclose(logits, in_half(powers / powers.sum(-1, keepdims=True)).ravel(), atol=2e-3)


def test_large_numbers_overflow_as_in_float16():
    assert np.isinf(to_float16(tf.constant(65_520.0)))
    assert to_float16(tf.constant(65_504.0)) == 65_504.0


def test_massive_activations_do_not_overflow_in_float16():
    """Channels of some hundreds, as in DINOv2: their squares have no float16."""
    model = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7)
    randomize(model)
    embedding = model.get_layer("embedding")
    kernel, bias = embedding.get_weights()
    bias[3] = 900.0
    embedding.set_weights([kernel, bias])
    expected = np.asarray(model(INPUTS))
    found = run_in_half(to_delegate_tflite(model, INPUTS), images_of(INPUTS))
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    layers = delegates.delegate_model(model, INPUTS).layers
    assert min(getattr(layer, "factor", 1.0) for layer in layers) < 1 / 64


@pytest.mark.slow
def test_files_for_a_gpu_are_written_with_their_agreement_in_float16(tmp_path):
    model, samples = built("token"), random_images(Preprocessing(TINY_IMAGE))
    written = tflite_of(model, "abcdefg", samples, tmp_path, ("float32", "float16"), target="gpu")
    assert {path.name for path, _ in written.values()} == {"model-float32-gpu.tflite", "model-float16-gpu.tflite"}
    assert "agreement in float16" in (tmp_path / "report.md").read_text()
    assert not any(broken_rules(path.read_bytes(), "gpu") for path, _ in written.values())


def test_what_a_delegate_cannot_take_is_refused(tmp_path):
    for options, words in (
        ({"formats": ("int8",), "target": "gpu"}, "A GPU computes in floating point"),
        ({"target": "npu", "dynamic_batch": True}, "--dynamic-batch applies only to --target cpu"),
        ({"target": "gpu", "uint8_input": True}, "--uint8-input applies only to --target cpu"),
    ):
        with pytest.raises(UserError, match=words):
            TFLiteOptions(SourceOptions("a model"), str(tmp_path), **options)

"""Quantization of models with a few large channels: even channels, searched ranges, corrected biases."""

import pathlib
from collections import Counter

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType

import keras_vit
from export.parity import Reference
from export.tflite.activation_ranges import (
    Product,
    activations,
    noisy_products,
    products,
    searched_ranges,
    with_corrected_biases,
)
from export.tflite.convert import to_tflite
from export.tflite.flatbuffer import Graph, unpack
from export.tflite.quantize import quantize_static
from export.tflite.smooth_quant import best_scales, scalable_activations, smooth_quant
from keras_vit import run_directory
from tests.export.outliers import agreement, with_outliers
from tests.models.test_saving import CONFORMANCE
from tests.support import TINY, TINY_IMAGE, randomize


def tiny(name: str) -> keras.Model:
    return randomize(keras_vit.build(CONFORMANCE[name], image_size=TINY_IMAGE, num_classes=7))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "map" else pytest.mark.slow)
        for name in CONFORMANCE
        if name not in ("bit", "unpooled")
    ],
)
def test_even_channels_change_no_bit_of_any_kind_of_model(name, tiny_images):
    model = with_outliers(tiny(name))
    expected = np.asarray(model(tiny_images))
    smoothed, scaled = smooth_quant(model, [tiny_images[:3], tiny_images[3:]])
    assert {activation.source for activation in scalable_activations(model)} == scaled.keys()
    np.testing.assert_array_equal(smoothed(tiny_images), expected)
    np.testing.assert_array_equal(model(tiny_images), expected)
    for found in scaled.values():
        assert found.after < found.before


def test_what_more_than_products_read_is_left_alone():
    found = {activation.source for activation in scalable_activations(tiny("axial"))}
    assert not any(name.endswith("LayerNorm_0") for name in found)  # a reshape reads it
    assert scalable_activations(tiny("bit")) == []
    wider = {activation.source for activation in scalable_activations(tiny("token and mean"))}
    assert "Transformer.encoder_norm" not in wider  # the head reads two of its vectors


def test_channels_that_are_even_stay_as_they_are():
    rng = np.random.default_rng(0)
    tokens, kernel = rng.normal(size=(200, 16)).astype(np.float32), rng.normal(size=(16, 8)).astype(np.float32)
    scales, found = best_scales(np.abs(tokens).max(axis=0), tokens, [kernel])
    assert scales is None
    tokens[:, 3] *= 200.0
    kernel[3] /= 200.0
    tokens[:, 5], kernel[6] = 0.0, 0.0
    scales, found = best_scales(np.abs(tokens).max(axis=0), tokens, [kernel])
    assert scales[3] >= 64.0
    assert scales[5] == scales[6] == 1.0
    assert set(np.log2(scales) % 1.0) == {0.0}
    assert found.after < 0.01 * found.before


@pytest.fixture(name="float_file", scope="module")
def _float_file(tmp_path_factory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("float") / "float.tflite"
    file.write_bytes(to_tflite(randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7)), all_tokens=True))
    return file


def images(count: int) -> list[np.ndarray]:
    return [*np.random.default_rng(2).uniform(-1.0, 1.0, (count, 1, *TINY_IMAGE, 3)).astype(np.float32)]


def test_a_searched_range_clips_what_is_rare_and_keeps_what_is_not(float_file):
    content = float_file.read_bytes()
    name = products(content)[1].inputs  # after a LayerNorm
    wide = {name: {"min": np.array([[-400.0]], np.float32), "max": np.array([[400.0]], np.float32)}}
    found = searched_ranges(content, wide, images(4), bits=8)
    assert found[name]["max"].dtype == np.float32
    assert found[name]["max"].item() == pytest.approx(0.3 * 400.0)  # the smallest share
    narrow = {name: {"min": np.array([[-0.1]], np.float32), "max": np.array([[0.1]], np.float32)}}
    assert searched_ranges(content, narrow, images(4), bits=8)[name]["max"].item() == pytest.approx(0.1, rel=0.05)


def test_a_product_whose_range_is_wide_is_noisy_and_takes_its_range_at_run_time(float_file, monkeypatch):
    content, seen = float_file.read_bytes(), images(8)
    found = products(content)
    names = {name for product in found for name in (product.inputs, product.outputs)}
    extremes: dict = {}
    for tensors in activations(content, seen, names):
        for name, tensor in tensors.items():
            low, high = extremes.get(name, {"min": 0.0, "max": 0.0}).values()
            extremes[name] = {"min": min(low, tensor.min()), "max": max(high, tensor.max())}
    assert noisy_products(content, extremes, seen, bits=16) == []
    wide = found[2].outputs
    extremes[wide] = {"min": 3000 * extremes[wide]["min"], "max": 3000 * extremes[wide]["max"]}
    assert noisy_products(content, extremes, seen, bits=16) == [wide]

    monkeypatch.setattr("export.tflite.quantize.noisy_products", lambda *_: [product.outputs for product in found])
    quantized, steps = quantize_static(float_file, "int8", seen)
    [step] = [step for step in steps if "run time" in step.name]
    assert step.kept
    dense = [o for o in Graph(quantized).operators if o.name in ("FULLY_CONNECTED", "CONV_2D")]
    kinds = [tuple(tensor.dtype for tensor in (*o.inputs[:2], *o.outputs)) for o in dense]
    assert kinds == [("FLOAT32", "INT8", "FLOAT32")] * len(found)
    _, steps = quantize_static(float_file, "int8", seen, at_run_time=False)
    assert not any("run time" in step.name for step in steps)


def mean_outputs(content: bytes, found: Product, seen: list[np.ndarray], rounded: bool) -> np.ndarray:
    """The mean output of a product, with the biases of the file and, if asked, weights rounded to 8 bits."""
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(
        model_content=content, experimental_op_resolver_type=plain, experimental_preserve_all_tensors=True
    )
    interpreter.allocate_tensors()
    numbers = {tensor["name"]: tensor["index"] for tensor in interpreter.get_tensor_details()}
    steps = np.abs(found.weights).max(axis=1, keepdims=True) / 127.0
    error = np.round(found.weights / steps) * steps - found.weights if rounded else np.zeros_like(found.weights)
    means = []
    for image in seen:
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
        interpreter.invoke()
        inputs, outputs = (interpreter.get_tensor(numbers[name]) for name in (found.inputs, found.outputs))
        exact = outputs.reshape(-1, outputs.shape[-1]) + inputs.reshape(-1, inputs.shape[-1]) @ error.T
        means.append(exact.mean(axis=0))
    return np.mean(means, axis=0)


def test_corrected_biases_cancel_the_mean_error_of_rounded_weights(float_file):
    content, seen = float_file.read_bytes(), images(6)
    corrected = with_corrected_biases(content, seen)
    first, second = products(content), products(corrected)
    for one, other in zip(first, second, strict=True):
        assert (one.inputs, one.outputs) == (other.inputs, other.outputs)
        np.testing.assert_array_equal(one.weights, other.weights)
    dense = next(found for found in first if found.weights.ndim == 2)  # before it no bias has changed
    exact, rounded = (mean_outputs(content, dense, seen, rounded) for rounded in (False, True))
    repaired = mean_outputs(corrected, dense, seen, rounded=True)
    assert np.abs(rounded - exact).max() > 1e-4
    np.testing.assert_allclose(repaired, exact, atol=2e-6)


def test_biases_that_are_stored_once_for_several_products_stay(tmp_path):
    model = randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7))
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            layer.bias.assign(np.full(layer.bias.shape, 0.5))
    content = to_tflite(model, all_tokens=True)
    uses = Counter(found.bias for found in products(content) if found.bias is not None)
    shared = [number for number, count in uses.items() if count > 1]
    assert shared
    before, after = unpack(content), unpack(with_corrected_biases(content, images(3)))
    for number in shared:
        np.testing.assert_array_equal(after.buffers[number].data, before.buffers[number].data)


def test_steps_of_static_quantization_are_kept_where_they_help(float_file):
    content, steps = quantize_static(float_file, "int8", images(8))
    assert [step.name for step in steps][:3] == ["extremes as ranges", "searched ranges", "corrected biases"]
    assert steps[0].kept
    best = steps[0].error
    for step in steps[1:]:
        assert step.kept == (step.error < best)
        best = min(best, step.error)
    assert "QUANTIZE" in {operator.name for operator in Graph(content).operators}
    assert [path.name for path in float_file.parent.iterdir()] == [float_file.name]


def test_a_few_images_do_not_judge_the_steps(float_file):
    _, steps = quantize_static(float_file, "int8", images(3))
    assert [step.name for step in steps] == ["extremes as ranges"]


def test_a_product_stays_in_float_within_the_budget(float_file, monkeypatch):
    monkeypatch.setattr("export.tflite.quantize._ENOUGH_AGREEMENT", 2.0)  # never reached
    monkeypatch.setattr("export.tflite.quantize._FLOAT_SHARE", 0.5)
    content, steps = quantize_static(float_file, "int8", images(8))
    in_float = [step for step in steps if step.name.endswith("in float32")]
    assert in_float
    kept = sum(step.kept for step in in_float)
    dense = [o for o in Graph(content).operators if o.name == "FULLY_CONNECTED"]
    assert sum(operator.inputs[1].dtype == "FLOAT32" for operator in dense) == kept
    monkeypatch.setattr("export.tflite.quantize._FLOAT_SHARE", 0.0)
    _, steps = quantize_static(float_file, "int8", images(8))
    assert not any(step.name.endswith("in float32") for step in steps)


@pytest.mark.slow
def test_a_trained_model_with_outliers_is_as_good_in_8_bits_as_without(demo_place):
    model, _ = keras_vit.load(demo_place / "runs/demo")
    samples = run_directory.Samples.load(demo_place / "runs/demo" / run_directory.SAMPLES)
    preprocessing = keras_vit.preprocessing_of(model)
    images = np.concatenate([batch for _, batch in Reference(samples, preprocessing, np.zeros(0)).batches()])
    expected = Reference(samples, preprocessing, model.predict(images, verbose=0))
    calibration = [image[None] for image in images[:64]]
    before = agreement(model, "int8", calibration, expected)
    planted = with_outliers(model)
    smoothed, _ = smooth_quant(planted, np.array_split(images, 4))
    assert agreement(smoothed, "int8", calibration, expected) >= before - 0.01
    assert agreement(planted, "int8", calibration, expected) < before - 0.02

"""Quantization: static, in steps; and kernels of dense layers rounded to 8 and 4 bits by GPTQ."""

import pathlib

import keras
import numpy as np
import pytest

from export.tflite import gptq
from export.tflite.convert import to_tflite
from export.tflite.flatbuffer import Graph, activations, noisy_products, products
from export.tflite.quantize import quantize_static
from tests.support import TINY_IMAGE


@pytest.fixture(name="float_file", scope="module")
def _float_file(tiny_model, tmp_path_factory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("float") / "float.tflite"
    file.write_bytes(to_tflite(tiny_model, all_tokens=True))
    return file


def images(count: int) -> list[np.ndarray]:
    return [*np.random.default_rng(2).uniform(-1.0, 1.0, (count, 1, *TINY_IMAGE, 3)).astype(np.float32)]


def test_a_product_whose_range_is_wide_is_noisy_and_takes_its_range_at_run_time(float_file, monkeypatch):
    content, seen = float_file.read_bytes(), images(8)
    found = products(content)
    names = {name for product in found for name in (product.inputs, product.outputs)}
    extremes: dict = {}
    for tensors in activations(content, seen, names):
        for name, tensor in tensors.items():
            low, high = extremes.get(name, {"min": 0.0, "max": 0.0}).values()
            extremes[name] = {"min": min(low, tensor.min()), "max": max(high, tensor.max())}
    noisy = noisy_products(content, extremes, seen)
    wide = next(product.outputs for product in found if product.outputs not in noisy)
    extremes[wide] = {"min": 3000 * extremes[wide]["min"], "max": 3000 * extremes[wide]["max"]}
    assert wide in noisy_products(content, extremes, seen)

    monkeypatch.setattr("export.tflite.quantize.noisy_products", lambda *_: [product.outputs for product in found])
    quantized, steps = quantize_static(float_file, seen)
    [step] = [step for step in steps if "run time" in step.name]
    assert step.kept
    dense = [o for o in Graph(quantized).operators if o.name in ("FULLY_CONNECTED", "CONV_2D")]
    kinds = [tuple(tensor.dtype for tensor in (*o.inputs[:2], *o.outputs)) for o in dense]
    assert kinds == [("FLOAT32", "INT8", "FLOAT32")] * len(found)
    _, steps = quantize_static(float_file, seen, at_run_time=False)
    assert not any("run time" in step.name for step in steps)


def test_steps_of_static_quantization_are_kept_where_they_help(float_file):
    _, steps = quantize_static(float_file, images(3))
    assert [step.name for step in steps] == ["extremes as ranges"]  # a few images do not judge
    content, steps = quantize_static(float_file, images(8))
    assert steps[0].name == "extremes as ranges"
    assert steps[0].kept
    best = steps[0].error
    for step in steps[1:]:
        assert step.kept == (step.error < best)
        best = min(best, step.error)
    assert "QUANTIZE" in {operator.name for operator in Graph(content).operators}
    assert [path.name for path in float_file.parent.iterdir()] == [float_file.name]


def test_a_product_stays_in_float_within_the_budget(float_file, monkeypatch):
    monkeypatch.setattr("export.tflite.quantize._ENOUGH_AGREEMENT", 2.0)  # never reached
    monkeypatch.setattr("export.tflite.quantize._FLOAT_SHARE", 0.5)
    content, steps = quantize_static(float_file, images(8))
    in_float = [step for step in steps if step.name.endswith("in float32")]
    assert in_float
    kept = sum(step.kept for step in in_float)
    dense = [o for o in Graph(content).operators if o.name == "FULLY_CONNECTED"]
    assert sum(operator.inputs[1].dtype == "FLOAT32" for operator in dense) == kept
    monkeypatch.setattr("export.tflite.quantize._FLOAT_SHARE", 0.0)
    _, steps = quantize_static(float_file, images(8))
    assert not any(step.name.endswith("in float32") for step in steps)


def to_nearest(kernel: np.ndarray) -> np.ndarray:
    steps = np.abs(kernel).max(axis=0) / 127
    return np.round(kernel / steps) * steps


def test_errors_of_correlated_channels_cancel_in_the_product_and_the_scale_stays():
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(4000, 7)) @ rng.normal(size=(7, 150)) + 0.1 * rng.normal(size=(4000, 150))
    kernel = rng.normal(size=(150, 11)).astype(np.float32)  # more channels than a block
    rounded = gptq.rounded(kernel, *gptq.inverse_factor((tokens.T @ tokens).astype(np.float32)))
    np.testing.assert_allclose(to_nearest(rounded), rounded, atol=1e-6)  # nothing is left to round
    np.testing.assert_array_equal(np.abs(rounded).max(axis=0), np.abs(kernel).max(axis=0))
    errors = [np.square(tokens @ (found - kernel)).sum() for found in (rounded, to_nearest(kernel))]
    assert errors[0] < 0.2 * errors[1]


def test_in_four_bits_each_block_of_channels_keeps_its_scale():
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(4000, 9)) @ rng.normal(size=(9, 96)) + 0.3 * rng.normal(size=(4000, 96))
    kernel = rng.normal(size=(96, 5)).astype(np.float32) * np.repeat([1.0, 10.0, 0.1], 32)[:, None].astype(np.float32)
    blocks = kernel.reshape(3, 32, 5)
    steps = np.abs(blocks).max(axis=1, keepdims=True) / 7
    nearest = (np.round(blocks / steps) * steps).reshape(96, 5)
    moments = (tokens.T @ tokens).astype(np.float32)
    rounded = gptq.rounded(kernel, *gptq.inverse_factor(moments), 7, 32)
    numbers = rounded.reshape(3, 32, 5) / steps
    np.testing.assert_allclose(numbers, np.round(numbers), atol=1e-5)
    np.testing.assert_allclose(np.abs(numbers).max(axis=1), 7, atol=1e-5)
    errors = [np.square(tokens @ (found - kernel)).sum() for found in (rounded, nearest)]
    assert errors[0] < 0.5 * errors[1]


def test_kernels_with_few_inputs_stay_as_they_are(tiny_model, tiny_images, monkeypatch):
    steps = list[int]()
    monkeypatch.setattr(gptq, "tracked", lambda batches, doing: batches)
    monkeypatch.setattr(gptq.Progress, "update", lambda self, count=1: steps.append(count))
    found = gptq.round_kernels(tiny_model, [tiny_images] * 3)
    assert steps == [len(steps) - 1] + [1] * (len(steps) - 1)  # what is measured counts before it is rounded
    for before, after in zip(tiny_model.layers, found.layers, strict=True):
        if not isinstance(before, keras.layers.Dense):
            continue
        kernel, rounded = np.asarray(before.kernel), np.asarray(after.kernel)
        if before.name == "head":
            np.testing.assert_array_equal(rounded, kernel)
        else:
            assert not np.array_equal(rounded, kernel)
            np.testing.assert_allclose(to_nearest(rounded), rounded, atol=1e-6)
    logits, expected = np.asarray(found(tiny_images)), np.asarray(tiny_model(tiny_images))
    np.testing.assert_allclose(logits, expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.slow
def test_second_moments_in_several_passes_are_the_same(tiny_model, tiny_images, monkeypatch):
    at_once = gptq.round_kernels(tiny_model, [tiny_images] * 3)
    monkeypatch.setattr(gptq, "_MOST_NUMBERS", 1)
    one_by_one = gptq.round_kernels(tiny_model, [tiny_images] * 3)
    for before, expected, found in zip(tiny_model.weights, at_once.weights, one_by_one.weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=before.path)
    assert any(not np.array_equal(*pair) for pair in zip(tiny_model.weights, at_once.weights, strict=True))

"""The steps of static quantization: ranges at run time, and products in float32."""

import pathlib

import numpy as np
import pytest

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
    content, steps = quantize_static(float_file, images(8))
    assert steps[0].name == "extremes as ranges"
    assert steps[0].kept
    best = steps[0].error
    for step in steps[1:]:
        assert step.kept == (step.error < best)
        best = min(best, step.error)
    assert "QUANTIZE" in {operator.name for operator in Graph(content).operators}
    assert [path.name for path in float_file.parent.iterdir()] == [float_file.name]


def test_a_few_images_do_not_judge_the_steps(float_file):
    _, steps = quantize_static(float_file, images(3))
    assert [step.name for step in steps] == ["extremes as ranges"]


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

"""Files for GPUs in LiteRT's WebGPU accelerator, with a Vulkan driver that computes on the CPU."""

import dataclasses
import functools
import os
import pathlib
import zipfile

import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from export.options import SourceOptions, TFLiteOptions
from export.parity import Reference
from export.source import ExportedModel, random_images
from export.tasks import Classification
from export.tflite import accelerator
from export.tflite.accelerator import GpuCheck, golden_numbers, sentences, write_page
from export.tflite.convert import converted, to_delegate_tflite
from export.tflite.delegate_checks import broken_rules
from export.tflite.export import export_tflite
from export.tflite.quantize import quantize
from keras_vit.errors import ParityError, UserError
from tests.browser import WITH_WEBGPU, open_browser
from tests.export.test_delegates import INPUTS, SUPPORTED, built
from tests.export.test_tasks import NAMES, task_of
from tests.support import TINY, TINY_IMAGE, others_slow, randomize, serving

IMAGES = np.random.default_rng(5).uniform(-1, 1, (2, 4, 6, 8)).astype(np.float32)


def graph(function) -> bytes:
    """A file from an image (1, 4, 6, 8) to what a function makes of its tanh, times 1.5."""
    return converted(lambda image: {"y": function(tf.tanh(image)) * 1.5}, tf.TensorSpec((1, 4, 6, 8), name="image"))


@functools.cache
def reason_to_skip() -> str:
    try:
        accelerator.run(graph(tf.nn.relu), IMAGES)
    except accelerator.NotRunError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def _needs_a_driver():
    if reason := reason_to_skip():
        pytest.skip(reason)


def check(content: bytes, images: np.ndarray, tmp_path: pathlib.Path) -> None:
    """Check the file and its half-precision form."""
    file = tmp_path / "float32.tflite"
    file.write_bytes(content)
    for each in (content, quantize(file, "float16")):
        assert not broken_rules(each, "gpu")
        assert accelerator.check("file", each, images) <= accelerator.TOLERANCE


@pytest.mark.parametrize("name", others_slow(SUPPORTED, "map"))
def test_every_model_is_right_in_the_accelerator(name, tmp_path):
    check(to_delegate_tflite(built(name), INPUTS), INPUTS[:2], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-Ti_16", "DINOv3-S_16"])
def test_a_whole_model_of_real_size_is_right_in_the_accelerator(name):
    model = keras_vit.build(name, num_classes=10)
    head = model.get_layer("head").kernel  # which begins with zeros
    head.assign(np.random.default_rng(1).normal(0.0, 0.05, head.shape))
    images = np.random.default_rng(0).uniform(-1, 1, (2, 224, 224, 3)).astype(np.float32)
    assert accelerator.check(name, to_delegate_tflite(model, images), images) <= accelerator.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_task_is_right_in_the_accelerator(name, tmp_path):
    task = task_of(name)
    model = task.exported.model
    images = np.random.default_rng(0).uniform(-1, 1, (2, *model.input_shape[1:])).astype(np.float32)
    content = to_delegate_tflite(model, images, all_tokens=task.all_tokens, finish=task.network)
    expected = task.network(model).predict(images, verbose=0)
    found = accelerator.run_interpreter(content, images)
    assert [found[name].shape for name in found] == [expected[name].shape for name in found]
    ours, theirs = (
        [{name: value[row] for name, value in part.items()} for row in range(2)] for part in (expected, found)
    )
    task.measure("file", Reference(None, None, outputs=ours), theirs, exact=True)
    check(content, images, tmp_path)


KERNEL = np.ones((3, 3, 8, 4), np.float32)


def means_of(x):
    return tf.transpose(tf.reduce_mean(x, 1, keepdims=True), (0, 1, 3, 2))


def padded(x, value=0.0):
    return tf.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=value)


@pytest.mark.parametrize(
    ("function", "operator", "rule"),
    [
        (lambda x: tf.concat(tf.split(x, 2, -1)[::-1], -1), "CONCATENATION", "no reordered split"),
        (lambda x: tf.nn.max_pool2d(padded(x), 3, 1, "VALID"), "MAX_POOL_2D", "no padding before pooling"),
        (lambda x: tf.nn.conv2d(padded(x, 0.7), KERNEL, 1, "VALID"), "CONV_2D", "no padding before pooling"),
        (lambda x: tf.matmul(x, means_of(x)), "BATCH_MATMUL", "factors with equal batches"),
    ],
)
def test_the_operator_that_is_computed_wrongly_is_named(function, operator, rule):
    content = graph(function)
    assert rule in broken_rules(content, "gpu")
    with pytest.raises(ParityError, match=f"wrongly, by .* from the operator {operator} .number"):
        GpuCheck(False, IMAGES, None).facts("file", content)


@pytest.mark.parametrize(
    ("function", "operator", "rule"),
    [
        (lambda x: tf.matmul(tf.ones((1, 4, 3, 6)), x), "BATCH_MATMUL", "no constant as the first factor"),
        (lambda x: x[:, 0], "STRIDED_SLICE", "operators of the GPU delegate"),
        (lambda x: tf.transpose(tf.reshape(x, (1, 4, 6, 2, 4)), (0, 1, 3, 2, 4)), "RESHAPE", "four axes"),
    ],
)
def test_the_operator_that_is_refused_is_named(function, operator, rule):
    content = graph(function)
    assert rule in broken_rules(content, "gpu")
    with pytest.raises(ParityError, match=f"does not run the file .*{operator}"):
        accelerator.check("file", content, IMAGES)


def test_the_copy_of_two_blocks_is_right():
    model = randomize(keras_vit.build(dataclasses.replace(TINY, num_layers=3), image_size=TINY_IMAGE, num_classes=7))
    content = to_delegate_tflite(model, INPUTS, first_and_last_block=True)
    two = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7)
    for layer in two.layers:
        layer.set_weights(model.get_layer(layer.name.replace("block_1", "block_2")).get_weights())
    np.testing.assert_allclose(
        accelerator.run_interpreter(content, INPUTS)["logits"], two(INPUTS), rtol=1e-4, atol=1e-4
    )


def test_without_a_driver_the_message_names_a_package(monkeypatch):
    monkeypatch.setenv("VK_DRIVER_FILES", "/nowhere.json")
    monkeypatch.setattr(accelerator, "_CHROMIUM", ())
    with pytest.raises(accelerator.NotRunError, match="no Vulkan driver is here; the package chromium brings one"):
        accelerator.run(graph(tf.nn.relu), IMAGES)


def test_a_run_has_a_time_limit():
    with pytest.raises(accelerator.NotRunError, match="more than 0 seconds"):
        accelerator.run(graph(tf.nn.relu), IMAGES, seconds=0.01)


def test_an_export_for_a_gpu_says_what_was_run_and_has_golden_numbers(tmp_path):
    model = randomize(keras_vit.build(dataclasses.replace(TINY, num_layers=3), image_size=TINY_IMAGE, num_classes=3))
    exported = ExportedModel(model, ("a", "b", "c"), random_images(keras_vit.preprocessing_of(model)).some(3))
    export_tflite(
        Classification(exported), TFLiteOptions(SourceOptions("memory"), str(tmp_path), ("float16",), target="gpu")
    )
    report = (tmp_path / "report.md").read_text()
    assert "accelerator on 2 images (float16: a copy with its first and last block, within" in report
    assert "it shows neither the rounding of float16" in report
    assert '["model-float16-gpu.tflite"]' in (tmp_path / "check.html").read_text()
    golden = (tmp_path / "model-float16-gpu.golden.bin").read_bytes()
    with zipfile.ZipFile(tmp_path / "model-float16-gpu.tflite") as archive:
        assert archive.read("golden.bin") == golden
    numbers = np.frombuffer(golden, "<f4").reshape(2, -1)
    images, logits = numbers[:, :-3].reshape(2, *TINY_IMAGE, 3), numbers[:, -3:]
    np.testing.assert_allclose(logits, model(images), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_the_page_compares_in_a_browser(tmp_path):
    packages = os.environ.get("LITERTJS")
    if packages is None:
        pytest.skip("Set LITERTJS to the folder @litertjs of the npm packages core and wasm-utils 2.5.3.")
    right, wrong = (graph(function) for function in (tf.sigmoid, lambda x: tf.concat(tf.split(x, 2, -1)[::-1], -1)))
    for name, content in (("right", right), ("wrong", wrong)):
        (tmp_path / f"{name}.tflite").write_bytes(content)
        (tmp_path / f"{name}.golden.bin").write_bytes(golden_numbers(content, IMAGES))
    write_page(tmp_path, ["right.tflite", "wrong.tflite"])
    with serving(tmp_path) as address, open_browser(WITH_WEBGPU) as page:
        for name in ("core", "wasm-utils"):
            page.served[f"https://cdn.jsdelivr.net/npm/@litertjs/{name}@2.5.3/"] = pathlib.Path(packages) / name
        page.open(f"{address}/check.html")
        page.wait_for("/fastest|No file|cannot/.test(document.getElementById('status').textContent)")
        rows = page.evaluate("document.getElementById('rows').innerText").splitlines()
    results = [row.split("\t")[2].split(",")[0] for row in rows]
    assert results == ["right", "right", "wrong", "right"]


@pytest.mark.slow
def test_an_export_of_a_task_for_a_gpu_is_run(tmp_path):
    options = TFLiteOptions(SourceOptions("memory"), str(tmp_path), ("float32", "float16"), target="gpu")
    written = export_tflite(task_of("detector"), options)
    assert [path.name for path, _ in written.values()] == ["detector-float32-gpu.tflite", "detector-float16-gpu.tflite"]
    assert "Right in LiteRT's GPU accelerator" in (tmp_path / "report.md").read_text()


def test_a_check_that_is_required_and_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setattr(accelerator, "_drivers", lambda: iter(()))
    facts = GpuCheck(False, IMAGES, None).facts("float32", graph(tf.nn.relu))
    [sentence] = sentences({"float32": facts})
    assert sentence.startswith("LiteRT's GPU accelerator: float32: not run: no Vulkan driver is here; the package")
    with pytest.raises(UserError, match="was not run in .*: no Vulkan driver is here; the package"):
        GpuCheck(True, IMAGES, None).facts("float32", graph(tf.nn.relu))

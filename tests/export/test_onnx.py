"""ONNX files: equality with the model, known problems of the converters, and errors if they differ."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import types
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from export.fastest import runtime_process
from export.files import identity_files
from export.inference_model import inference_model
from export.onnx import __main__ as onnx
from export.onnx import export as onnx_export
from export.source import Provenance, random_images
from export.texts import preprocessing_code
from keras_vit import ConvStem, Preprocessing, ResNetConfig, UserError, preprocessing_of
from keras_vit.errors import ParityError
from keras_vit.files.labels import labels_text
from keras_vit.images.files import Samples
from tests.exports import LABELS, onnx_of
from tests.support import TINY, TINY_IMAGE, TINY_STEM, others_slow, randomize

BIT = ResNetConfig((1, 1), 4, (8, 16), preactivation=True, num_groups=2)
# Configuration, image size and channels.
MODELS = {
    "token": (TINY, TINY_IMAGE, 1),
    "gap, exact GELU": (dataclasses.replace(TINY, classifier="gap", gelu="erf", dropout_rate=0.1), TINY_IMAGE, 3),
    "map": (dataclasses.replace(TINY, classifier="map", representation_size=9, gelu="erf"), TINY_IMAGE, 3),
    "relative": (dataclasses.replace(TINY, axial=True, classifier="gap", position_embedding="relative"), TINY_IMAGE, 3),
    "hybrid": (dataclasses.replace(TINY, patch_size=1, stem=TINY_STEM), (64, 96), 3),
    "early convolutions": (
        dataclasses.replace(TINY, patch_size=1, stem=ConvStem((8, 16), (3, 3), (2, 2))), (16, 24), 3,
    ),
    "bit": (BIT, (64, 96), 1),
}  # fmt: skip


def build(name: str = "token") -> keras.Model:
    config, size, channels = MODELS[name]
    return randomize(keras_vit.build(config, preprocessing=Preprocessing(size, channels), num_classes=7))


def samples_of(model: keras.Model, count: int = 9) -> Samples:
    encoded = random_images(preprocessing_of(model)).encoded[:count]
    return Samples(encoded, np.arange(len(encoded)) % 7)


@pytest.fixture(name="packages")
def _packages() -> None:
    """Skip a test where the packages are missing."""
    for package in onnx_export.PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -r {onnx_export.REQUIREMENTS}")


@pytest.fixture(name="installed")
def _installed(monkeypatch):
    """As if the packages were there, for mistakes that are found before any is used."""
    for package in onnx_export.PACKAGES:
        monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(__spec__=package))


# Tests without the packages


def test_missing_packages_are_named_with_what_to_install(installed, monkeypatch, tmp_path):
    for package in ("tf2onnx", "onnx"):
        monkeypatch.setitem(sys.modules, package, None)
    zipfile.ZipFile(tmp_path / "model.keras", "w").close()
    with pytest.raises(UserError, match=r"needs onnx, tf2onnx, which are .*`pip install onnx tf2onnx`"):
        onnx.main(["--run", str(tmp_path), "--output", str(tmp_path / "x")])
    assert not (tmp_path / "x").exists()


def test_the_file_of_requirements_pins_every_package_exactly():
    root = pathlib.Path(__file__).parents[2]
    lines = (root / onnx_export.REQUIREMENTS).read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    assert pinned == {*onnx_export.PACKAGES, "openvino"}
    assert "-r ../requirements.txt" in lines


@pytest.mark.parametrize("name", others_slow(MODELS, "map", "hybrid"))
def test_the_rebuilt_model_is_the_model(name):
    model = build(name)
    images = np.random.default_rng(0).uniform(-1, 1, (3, *model.input_shape[1:])).astype(np.float32)
    rebuilt = inference_model(model, for_onnx=True)
    np.testing.assert_allclose(rebuilt(images), model(images), atol=1e-5)
    assert [layer.name for layer in rebuilt.layers] == [layer.name for layer in model.layers]


def test_the_rebuilt_model_has_no_complementary_error_function():
    def operators(model: keras.Model) -> set[str]:
        graph = tf.function(model).get_concrete_function(tf.TensorSpec(model.input_shape)).graph
        return {operator.type for operator in graph.get_operations()}

    model = build("gap, exact GELU")
    assert "Erfc" in operators(model)
    assert operators(inference_model(model, for_onnx=True)) >= {"Erf"}
    assert "Erfc" not in operators(inference_model(model, for_onnx=True))
    assert "Erfc" in operators(inference_model(model))  # other exports keep TensorFlow's own


def test_the_padding_before_a_pooling_is_nearly_zero():
    layer = inference_model(build("bit"), for_onnx=True).get_layer("resnet.root_block.pool_padding")
    padded = np.asarray(layer(np.full((1, 2, 2, 1), -1.0, np.float32)))[0, :, :, 0]
    assert padded[0, 0] == np.float32(1e-30)
    np.testing.assert_array_equal(np.pad([[-1.0, -1.0], [-1.0, -1.0]], 1), padded.round(6))


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_exported_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    model = build()
    with pytest.raises(UserError, match="there are 2 labels"):
        onnx_of(model, ("a", "b"), samples_of(model), tmp_path / "x")
    headless = keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=0)
    with pytest.raises(UserError, match="has no classes to serve"):
        onnx_of(headless, LABELS, samples_of(model), tmp_path / "x")
    monkeypatch.setattr(onnx_export, "_MOST_WEIGHT_BYTES", 4 * model.count_params() - 1)
    with pytest.raises(UserError, match=r"an ONNX file holds at most [\d,]+; export a SavedModel"):
        onnx_of(model, LABELS, samples_of(model), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_exports_of_another_model_is_refused(tmp_path):
    model, others = build(), ("model-int8.tflite", "model.bin", "model.onnx", "model.xml")
    (tmp_path / "model.keras").write_bytes(b"a run may hold its exports")
    assert identity_files(tmp_path, model, LABELS, Provenance())["labels.txt"].split() == list(LABELS)
    for name in others:
        (tmp_path / name).write_bytes(b"of whom?")
    with pytest.raises(UserError, match=f"already holds the export of another model .{', '.join(others)}."):
        identity_files(tmp_path, model, LABELS, Provenance())


# Tests with the packages


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_for_any_batch(name, tmp_path):
    model = build(name)
    path, found = onnx_of(model, LABELS, samples_of(model), tmp_path)
    assert path == tmp_path / "model.onnx"
    assert found["max_abs_diff"] <= 1e-4
    assert found["agreement"] == 1.0
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.onnx", "labels.txt", "export.sha256", "report.json", "report.md", "report.png",
    }  # fmt: skip
    images = np.random.default_rng(0).uniform(-1, 1, (7, *model.input_shape[1:])).astype(np.float32)
    runner = onnx_export.open_file(path)
    for size in (1, 2, 7):
        np.testing.assert_allclose(runner(images[:size])["logits"], model.predict_on_batch(images[:size]), atol=1e-4)


@pytest.mark.usefixtures("packages")
def test_openvino_reads_the_file(tmp_path):
    pytest.importorskip("openvino")
    model = build("map")
    path, _ = onnx_of(model, LABELS, samples_of(model), tmp_path)
    images = np.random.default_rng(0).uniform(-1, 1, (3, *model.input_shape[1:])).astype(np.float32)
    logits = runtime_process.openvino(str(path), 1, images.shape)(images)
    np.testing.assert_allclose(logits, model.predict_on_batch(images), atol=1e-4)


@pytest.mark.usefixtures("packages")
def test_an_unsupported_operator_is_detected(tmp_path):
    """tf2onnx writes it under TensorFlow's name, and only logs that."""
    model = build("gap, exact GELU")
    with pytest.raises(ParityError, match=r"operators that ONNX does not support \(Erfc\), so it was not kept"):
        onnx_export.write_file(model, tmp_path / "x.onnx", LABELS, {})


@pytest.mark.usefixtures("packages")
def test_a_padding_with_exact_zeros_before_a_pooling_would_be_lost(tmp_path):
    """If this fails, ONNX Runtime no longer needs `_NearlyZeroPadding`."""
    model = build("bit")
    onnx_export.write_file(inference_model(model), tmp_path / "model.onnx", LABELS, {})
    images = np.random.default_rng(0).uniform(-1, 1, (3, *model.input_shape[1:])).astype(np.float32)
    logits = onnx_export.open_file(tmp_path / "model.onnx")(images)["logits"]
    assert np.abs(logits - model.predict_on_batch(images)).max() > 1e-4


@pytest.mark.usefixtures("packages")
def test_onnx_runtime_computes_each_norm_in_one_operation(tmp_path):
    import onnx
    import onnxruntime

    model = build("map")
    onnx_export.write_file(inference_model(model, for_onnx=True), tmp_path / "model.onnx", LABELS, {})
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    found = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    norms = sum(isinstance(layer, keras.layers.LayerNormalization) for layer in model.layers)
    assert found.count("LayerNormalization") == norms
    assert not {"Sqrt", "ReduceMean", "GlobalAveragePool", "Reciprocal"} & set(found)


@pytest.mark.usefixtures("packages")
def test_the_onnx_file_says_what_it_takes_and_gives(tmp_path):
    import onnxruntime

    model = build()
    origin = Provenance(weights="augreg:B_16", license="Apache-2.0")
    path, _ = onnx_of(model, LABELS, samples_of(model), tmp_path, origin=origin)
    session = onnxruntime.InferenceSession(path)
    ends = [(end.name, end.shape, end.type) for end in (*session.get_inputs(), *session.get_outputs())]
    assert ends == [("image", ["batch", *TINY_IMAGE, 1], "tensor(float)"), ("logits", ["batch", 7], "tensor(float)")]
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["labels"]) == list(LABELS)
    assert Preprocessing(**json.loads(metadata["preprocessing"])) == preprocessing_of(model)
    assert (metadata["weights"], metadata["license"]) == ("augreg:B_16", "Apache-2.0")


@pytest.mark.usefixtures("packages")
def test_the_report_has_size_speed_and_preprocessing(tmp_path):
    model = build()
    path, _ = onnx_of(model, LABELS, samples_of(model), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(report["formats"]) == ["onnx"]
    row = report["formats"]["onnx"]
    assert row["bytes"] == path.stat().st_size > 4 * model.count_params()
    assert row["accuracy"] == report["keras_accuracy"]
    assert row["max_abs_diff_by_batch"].keys() == {"1", "5"}
    assert min(row["latency_ms"].values()) > 0
    assert row["operators"]["MatMul"] > 8
    assert row["packages"].keys() == {*onnx_export.PACKAGES}
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert preprocessing_of(model).summary() in text
    assert "\n".join(preprocessing_code(preprocessing_of(model))) in text


@pytest.mark.usefixtures("packages")
def test_a_file_that_differs_is_not_kept(tmp_path, monkeypatch):
    model, opened = build(), onnx_export.open_file
    for wrong, words in (
        (lambda number: True, "logits of the onnx file differ from the model's by up to 0.02"),
        (lambda number: number == 1, "logits of the onnx file for 1 images"),
        (lambda number: number == 5, "logits of the onnx file for 5 images"),
        (lambda number: np.nan, "by up to nan"),
    ):

        def opening(file, threads=0, wrong=wrong):
            run = opened(file, threads)
            return lambda images: {"logits": run(images)["logits"] + 2e-2 * wrong(len(images))}

        monkeypatch.setattr(onnx_export, "open_file", opening)
        with pytest.raises(ParityError, match=words):
            onnx_of(model, LABELS, samples_of(model), tmp_path / "a" / "x")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("packages")
def test_a_larger_batch_is_checked_where_there_is_one_image(tmp_path):
    model = build()
    onnx_of(model, LABELS, samples_of(model, 1), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["formats"]["onnx"]["max_abs_diff_by_batch"].keys() == {"1", "5"}


@pytest.mark.usefixtures("packages")
def test_the_command_prints_only_its_table(tmp_path):
    run, model = tmp_path / "run", build("gap, exact GELU")
    run.mkdir()
    model.save(run / "model.keras")
    (run / "labels.txt").write_text(labels_text(LABELS), encoding="utf-8")
    (run / "config.json").write_text("{}")
    samples_of(model).save(run / "samples.npz")
    command = ["-m", "export.onnx", "--run", str(run), "--output", str(run / "x"), "--web"]
    environment = {name: value for name, value in os.environ.items() if name not in ("TF_CPP_MIN_LOG_LEVEL", "CI")}
    environment |= {"MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=root, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["format", "onnx", "Next:"]
    assert all(line.startswith("  ") for line in lines[3:])
    assert {"classify.html", "classify.json", "model.onnx"} <= {path.name for path in (run / "x").iterdir()}

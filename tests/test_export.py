"""Artifacts: equal to the model after a fresh load, free of the known traps, and not kept when they differ."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

import keras_vit
from conftest import randomize
from export import parity, saved_model, tflite
from keras_vit import Preprocessing, UserError, ViTConfig
from keras_vit.run_directory import Samples

LABELS = tuple("abcdefg")
CONFIG = ViTConfig(patch_size=(4, 6), hidden_size=48, num_layers=2, num_heads=3, mlp_dim=64)
SIZE = (12, 30)
CONFIGS = {
    "token": CONFIG,
    "gap": dataclasses.replace(CONFIG, classifier="gap", gelu="erf"),
    "map": dataclasses.replace(CONFIG, classifier="map", representation_size=9, dropout_rate=0.1),
}


def build(name: str = "token", channels: int = 3) -> keras.Model:
    return randomize(keras_vit.build(CONFIGS[name], preprocessing=Preprocessing(SIZE, channels), num_classes=7))


@pytest.fixture(name="samples", scope="module")
def _samples() -> Samples:
    """Pictures in all four formats, of mixed sizes and channels."""
    rng = np.random.default_rng(4)
    encoded = []
    for number in range(9):
        shape = (10 + number, 25, (3, 1, 3, 4)[number % 4])
        image = rng.integers(0, 256, shape, dtype=np.uint8)
        encoded.append((tf.io.encode_jpeg if number % 4 == 2 else tf.io.encode_png)(image).numpy())
    return Samples(tuple(encoded), np.arange(9) % 7)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("channels", [3, 1])
def test_a_saved_model_is_the_model(name, channels, samples, tmp_path):
    path, difference = saved_model.export_saved_model(build(name, channels), LABELS, samples, tmp_path / "served")
    assert path == tmp_path / "served" / "1"
    assert difference.max_abs_diff <= 1e-4
    assert difference.num_images == 9
    assert (path / "assets" / "labels.txt").read_text().split() == list(LABELS)
    assert [entry.name for entry in (tmp_path / "served").iterdir()] == ["1"]


@pytest.fixture(name="served", scope="module")
def _served(samples, tmp_path_factory):
    model = build()
    path, _ = saved_model.export_saved_model(model, LABELS, samples, tmp_path_factory.mktemp("served"))
    return model, path, tf.saved_model.load(path)


def test_bytes_of_any_format_and_size_share_a_batch(served, samples):
    model, _, loaded = served
    answer = loaded.signatures["serving_default"](image_bytes=tf.constant(list(samples.encoded)))
    expected = parity.softmax(parity.reference(model, keras_vit.preprocessing_of(model), samples).logits)
    np.testing.assert_allclose(answer["probabilities"], expected, atol=1e-5)
    best = np.argsort(-expected, axis=-1)[:, :5]
    np.testing.assert_array_equal(answer["classes"], best)
    np.testing.assert_allclose(answer["scores"], np.take_along_axis(expected, best, -1), atol=1e-5)
    assert answer["labels"].numpy().astype(str).tolist() == np.array(LABELS)[best].tolist()


def test_any_batch_is_served_even_an_empty_one(served):
    _, _, loaded = served
    for batch in (0, 1, 3):
        logits = loaded.signatures["image_tensor"](image=tf.zeros((batch, *SIZE, 3)))["logits"]
        assert logits.shape == (batch, 7)
    answer = loaded.signatures["serving_default"](image_bytes=tf.constant([], tf.string))
    assert answer["probabilities"].shape == (0, 7)
    assert answer["labels"].shape == (0, 5)


def test_garbage_bytes_are_an_error_and_the_model_lives_on(served, samples):
    _, _, loaded = served
    with pytest.raises(tf.errors.InvalidArgumentError):
        loaded.signatures["serving_default"](image_bytes=tf.constant([b"no image"]))
    loaded.signatures["serving_default"](image_bytes=tf.constant([samples.encoded[0]]))


def test_weights_are_stored_once(served):
    model, path, _ = served
    stored = sum(file.stat().st_size for file in (path / "variables").iterdir())
    assert 4 * model.count_params() < stored < 1.25 * 4 * model.count_params()


def test_the_signatures_are_named(served):
    _, _, loaded = served
    assert set(loaded.signatures) == {"serving_default", "image_tensor"}
    described = loaded.signatures["image_tensor"].structured_outputs
    assert {name: spec.shape.as_list() for name, spec in described.items()} == {
        "logits": [None, 7],
        "probabilities": [None, 7],
    }


def test_versions_count_up(samples, tmp_path):
    model = build()
    for version in ("1", "2"):
        assert saved_model.export_saved_model(model, LABELS, samples, tmp_path)[0].name == version


def test_epsilon_survives_in_the_served_graph_and_when_frozen(samples, tmp_path):
    """OneDNN's fused LayerNorm computes with 1e-3 whatever was asked: no optimised graph may hold it."""
    model = build()
    model.get_layer("embedding").set_weights([1e-3 * w for w in model.get_layer("embedding").get_weights()])
    model.get_layer("Transformer.posembed_input").set_weights(
        [1e-3 * w for w in model.get_layer("Transformer.posembed_input").get_weights()]
    )
    images = np.random.default_rng(0).uniform(-1, 1, (4, *SIZE, 3)).astype(np.float32)
    expected = np.asarray(model(images))
    path, _ = saved_model.export_saved_model(model, LABELS, samples, tmp_path)
    loaded = tf.saved_model.load(path)  # owns the variables that the signature reads
    served = loaded.signatures["image_tensor"]
    np.testing.assert_allclose(served(image=tf.constant(images))["logits"], expected, atol=1e-4)

    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    frozen = convert_variables_to_constants_v2(served)
    logits = next(value for value in frozen(image=tf.constant(images)) if not np.allclose(value.numpy().sum(-1), 1))
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert not [node.name for node in frozen.graph.as_graph_def().node if "LayerNorm" in node.op]


def test_an_artifact_that_differs_is_not_kept(samples, tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "FLOAT_TOLERANCE", -1.0)
    with pytest.raises(UserError, match="logits of the SavedModel differ from the model's by up to"):
        saved_model.export_saved_model(build(), LABELS, samples, tmp_path / "served")
    assert list((tmp_path / "served").iterdir()) == []
    with pytest.raises(UserError, match="logits of the float32 TFLite file differ"):
        tflite.export_tflite(build(), LABELS, samples, tmp_path / "phone", ["float32"])
    assert list((tmp_path / "phone").iterdir()) == []


def test_a_not_a_number_is_a_difference(samples):
    model = build()
    expected = parity.reference(model, keras_vit.preprocessing_of(model), samples)
    with pytest.raises(UserError, match="differ"):
        parity.require_equal("file", parity.compare(expected, np.full_like(expected.logits, np.nan)))


@pytest.mark.parametrize("name", CONFIGS)
def test_tflite_files_are_the_model(name, samples, tmp_path):
    model = build(name)
    written = tflite.export_tflite(model, LABELS, samples, tmp_path, ["float32"])
    path, difference = written["float32"]
    assert difference.max_abs_diff <= 1e-4
    assert path.stat().st_size > 4 * model.count_params()
    assert (tmp_path / "labels.txt").read_text().split() == list(LABELS)
    interpreter = Interpreter(model_path=str(path))
    assert [detail["shape"].tolist() for detail in interpreter.get_input_details()] == [[1, *SIZE, 3]]
    assert [detail["shape"].tolist() for detail in interpreter.get_output_details()] == [[1, 7]]


def operators(path) -> set[str]:
    interpreter = Interpreter(model_path=str(path), experimental_op_resolver_type=_REFERENCE)
    return {operator["op_name"] for operator in interpreter._get_ops_details()}


_REFERENCE = __import__("ai_edge_litert.interpreter", fromlist=["OpResolverType"]).OpResolverType.BUILTIN_REF


def test_a_phone_needs_no_flex_no_custom_and_no_shape_operator(samples, tmp_path):
    path, _ = tflite.export_tflite(build(), LABELS, samples, tmp_path, ["float32"])["float32"]
    found = operators(path)
    assert "FULLY_CONNECTED" in found
    assert not found & {"SHAPE", "PACK", "GATHER", "REDUCE_PROD", "CUSTOM", "READ_VARIABLE", "VAR_HANDLE"}
    assert not [name for name in found if name.startswith("Flex")]


def test_int8_is_smaller_and_agrees(samples, tmp_path):
    model = keras_vit.build(CONFIG, preprocessing=Preprocessing(SIZE), num_classes=7)
    for weight in model.weights:
        if weight.path.startswith("head"):
            weight.assign(np.random.default_rng(0).normal(size=weight.shape))
    written = tflite.export_tflite(model, LABELS, samples, tmp_path, ["float32", "int8-dynamic"])
    (exact, _), (small, difference) = written["float32"], written["int8-dynamic"]
    assert small.stat().st_size < 0.6 * exact.stat().st_size
    assert difference.agreement == 1.0
    assert 0 < difference.max_abs_diff < 0.5


def test_a_file_without_its_weights_is_noticed(tmp_path):
    (tmp_path / "x.tflite").write_bytes(b"0" * 1000)
    with pytest.raises(UserError, match="too few for its weights"):
        tflite._require_weights(tmp_path / "x.tflite", 100_000, 1.0)


def test_a_file_that_was_not_quantised_is_noticed(tmp_path):
    (tmp_path / "x.tflite").write_bytes(b"0" * 10_000_000)
    with pytest.raises(UserError, match="weights were not quantised"):
        tflite._require_weights(tmp_path / "x.tflite", 10_000_000, 0.25)


def test_labels_of_another_number_are_refused(samples, tmp_path):
    with pytest.raises(UserError, match=r"output has shape \(None, 7\), but there are 2 labels"):
        saved_model.export_saved_model(build(), ("a", "b"), samples, tmp_path / "served")
    with pytest.raises(UserError, match="there are 2 labels"):
        tflite.export_tflite(build(), ("a", "b"), samples, tmp_path / "phone", ["float32"])
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_output_is_refused(samples, tmp_path):
    (tmp_path / "x").write_text("mine")
    for export in (
        lambda: saved_model.export_saved_model(build(), LABELS, samples, tmp_path / "x"),
        lambda: tflite.export_tflite(build(), LABELS, samples, tmp_path / "x", ["float32"]),
    ):
        with pytest.raises(UserError, match="is a file; --output takes a directory"):
            export()

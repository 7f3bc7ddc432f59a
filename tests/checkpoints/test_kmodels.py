"""Files of kmodels (zeromodels), against what it computed with them."""

import json
import pathlib
import shutil

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.files.safetensors import read_json, write_json
from tests.support import FIXTURES

FILES = FIXTURES / "keras_libraries"
GOLDEN = json.loads((FILES / "kmodels.json").read_text())
RESIZED = [name for name in GOLDEN if name != "km_siglip2"]


@pytest.fixture(name="unpacked", scope="module")
def _unpacked(tmp_path_factory):
    """Unpack the folder of a name."""
    folder = tmp_path_factory.mktemp("kmodels")

    def unpacked(name: str) -> pathlib.Path:
        if not (folder / name).exists():
            shutil.unpack_archive(FILES / f"{name}.zip", folder / name)
        return folder / name

    return unpacked


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FILES / f"{name}.io.npz") as recorded:
        return dict(recorded)


def outputs(model: keras.Model, images: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(images, training=False))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_outputs_are_those_of_kmodels(name, unpacked):
    recorded, model = golden(name), keras_vit.from_checkpoint(unpacked(name))
    assert model.input_shape[1:] == recorded["images"].shape[1:]
    np.testing.assert_allclose(outputs(model, recorded["images"]), recorded["outputs"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", RESIZED)
def test_at_another_size_the_outputs_are_those_of_kmodels(name, unpacked):
    recorded = golden(name)
    model = keras_vit.from_checkpoint(unpacked(name), image_size=recorded["images_other"].shape[1:3])
    found = outputs(model, recorded["images_other"])
    np.testing.assert_allclose(found, recorded["outputs_other"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["km_vit", "km_dino"])
def test_the_images_are_those_of_the_processor(name, unpacked):
    recorded = golden(name)
    preprocessing = keras_vit.preprocessing_of(keras_vit.from_checkpoint(unpacked(name)))
    found = keras.ops.convert_to_numpy(preprocessing(recorded["raw"]))
    np.testing.assert_allclose(found, recorded["made"][0], rtol=1e-5, atol=2e-5)


def test_the_text_tower_and_the_scale_of_siglip_2(unpacked):
    recorded, folder = golden("km_siglip2"), unpacked("km_siglip2")
    images = outputs(keras_vit.from_checkpoint(folder), recorded["images"])
    texts = outputs(keras_vit.text_tower(folder), recorded["token_ids"].astype(np.int32))
    text = keras_vit.text.checkpoint.open_text(folder)
    found = text.scale * (images / np.linalg.norm(images, axis=1, keepdims=True)) @ texts.T + text.bias
    np.testing.assert_allclose(found, recorded["logits"], rtol=1e-4, atol=1e-5)


def test_a_file_without_its_config_needs_the_number_of_heads(unpacked, tmp_path):
    recorded = golden("km_deit")
    shutil.copy(unpacked("km_deit") / "model.weights.h5", tmp_path / "deit.weights.h5")
    with pytest.raises(UserError, match="give num_heads"):
        keras_vit.from_checkpoint(tmp_path / "deit.weights.h5")
    model = keras_vit.from_checkpoint(tmp_path / "deit.weights.h5", num_heads=3)
    np.testing.assert_allclose(outputs(model, recorded["images"]), recorded["outputs"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("km_dinov3", {"rope_theta": 10.0}, "unsupported rope_theta=10.0"),
        ("km_vit", {"embed_dim": 16}, "says embed_dim=16"),
        ("km_vit", {"num_heads": 5}, "multiple of num_heads"),
    ],
)
def test_a_config_of_another_model_is_refused(name, fields, sentence, unpacked, tmp_path):
    shutil.copytree(unpacked(name), tmp_path / "x")
    content = read_json(tmp_path / "x" / "zm_config.json")
    content["vision_config"] |= fields
    write_json(tmp_path / "x" / "zm_config.json", content)
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(tmp_path / "x")

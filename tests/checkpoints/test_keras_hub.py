"""Presets of keras-hub, against what keras-hub computed with them; where it is installed, it reads what is written."""

import json
import pathlib
import shutil

import h5py
import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import UserError
from keras_vit.files.hdf5 import open_hdf5
from keras_vit.files.safetensors import read_json
from tests.checkpoints.keras_libraries import FILES, golden, outputs
from tests.support import changed_folder, loaded, others_slow

GOLDEN = json.loads((FILES / "keras_hub.json").read_text())
CLASSIFIERS = ("hub_vit_rectangular", "hub_vit_gap", "hub_deit")
TOWERS = ("hub_clip", "hub_clip_erf", "hub_siglip")
WRITTEN = [name for name in GOLDEN if name != "hub_vit_gap"]


@pytest.fixture(name="changed")
def _changed(unpacked, tmp_path):
    """A copy of a preset with other fields in the config of one of its files."""

    def changed(name: str, file: str = "config.json", **fields) -> pathlib.Path:
        config = read_json(unpacked(name) / file)["config"] | fields
        return changed_folder(unpacked(name), tmp_path / name, file=file, config=config)

    return changed


@pytest.mark.parametrize("name", others_slow(WRITTEN, "hub_vit_rectangular", "hub_dinov3_gated", "hub_clip"))
def test_what_is_written_is_read_again(name, unpacked, tmp_path):
    path, model = written(name, unpacked, tmp_path)
    again, images = keras_vit.from_checkpoint(path), golden(name)["images"]
    np.testing.assert_array_equal(outputs(again, images), outputs(model, images))
    assert keras_vit.config_of(again) == keras_vit.config_of(model)
    assert keras_vit.describe(path).layout == "keras_hub"


@pytest.mark.parametrize("name", TOWERS)
def test_texts_have_the_ids_embeddings_and_logits_of_keras_hub(name, unpacked):
    recorded, texts = golden(name), GOLDEN[name]["texts"]
    ids = keras_vit.tokenizer(unpacked(name))(texts)
    np.testing.assert_array_equal(ids, recorded["token_ids"])
    embeddings = recorded["text_outputs"] / np.linalg.norm(recorded["text_outputs"], axis=1, keepdims=True)
    np.testing.assert_allclose(outputs(keras_vit.text_tower(unpacked(name)), ids), embeddings, rtol=1e-5, atol=1e-5)
    model = keras_vit.zero_shot(unpacked(name), texts)
    np.testing.assert_allclose(outputs(model, recorded["images"]), recorded["logits"], rtol=1e-4, atol=1e-4)


def written(name: str, unpacked, folder: pathlib.Path) -> tuple[pathlib.Path, keras.Model]:
    """The image tower or classifier of a preset, written again."""
    model = loaded(unpacked(name), **({"num_classes": 0} if name in TOWERS else {}))
    keras_vit.save_checkpoint(model, folder / "x", layout="keras_hub")
    return folder / "x", model


@pytest.mark.parametrize("name", WRITTEN)
def test_keras_hub_reads_what_is_written(name, unpacked, tmp_path):
    models = pytest.importorskip("keras_hub").models
    (path, model), recorded = written(name, unpacked, tmp_path), golden(name)
    path = str(path)
    if name in CLASSIFIERS:
        task = models.ImageClassifier.from_preset(path)
        np.testing.assert_allclose(task(recorded["images"]), outputs(model, recorded["images"]), rtol=1e-5, atol=1e-5)
        found = keras.ops.convert_to_numpy(task.preprocessor.image_converter(recorded["raw"]))
        np.testing.assert_allclose(found, recorded["images"], rtol=1e-5, atol=1e-5)
        return
    backbone = models.Backbone.from_preset(path)
    (key,) = backbone.input if isinstance(backbone.input, dict) else ("images",)
    found = keras.ops.convert_to_numpy(backbone({key: recorded["images"]}))
    found = found if found.ndim == 2 else found[:, 0]
    np.testing.assert_allclose(found, outputs(model, recorded["images"]), rtol=1e-5, atol=1e-5)


def both_towers(name: str, unpacked, folder: pathlib.Path) -> pathlib.Path:
    """Both towers of a preset, written again."""
    keras_vit.save_two_towers(loaded(unpacked(name)), folder / "x", unpacked(name))
    return folder / "x"


@pytest.mark.parametrize("name", others_slow(TOWERS, "hub_clip", "hub_siglip"))
def test_both_towers_are_written_with_their_tokenizer(name, unpacked, tmp_path):
    recorded, texts, path = golden(name), GOLDEN[name]["texts"], both_towers(name, unpacked, tmp_path)
    model = keras_vit.zero_shot(path, texts)
    np.testing.assert_allclose(outputs(model, recorded["images"]), recorded["logits"], rtol=1e-4, atol=1e-4)
    before, after = (open_hdf5(folder / "model.weights.h5") for folder in (unpacked(name), path))
    assert before.keys() == after.keys()
    positions = {key for key in before if not before[key].is_float}
    for key in before.keys() - positions - {key for key in before if "vision_embedding/position" in key}:
        np.testing.assert_allclose(after[key].fetch(), before[key].fetch(), rtol=1e-7, err_msg=key)
    assert keras_vit.preprocessing_of(model) == keras_vit.preprocessing_of(loaded(unpacked(name)))


@pytest.mark.filterwarnings("ignore:Exception ignored in.*vocabulary.spm")  # which keras-hub leaves open
@pytest.mark.parametrize("name", TOWERS)
def test_keras_hub_reads_both_towers(name, unpacked, tmp_path):
    models = pytest.importorskip("keras_hub").models
    recorded, path = golden(name), str(both_towers(name, unpacked, tmp_path))
    backbone = models.Backbone.from_preset(path)
    found = backbone({key: recorded[key] for key in ("images", "token_ids")})["vision_logits"]
    np.testing.assert_allclose(keras.ops.convert_to_numpy(found), recorded["logits"], rtol=1e-5, atol=1e-5)
    family = models.CLIPPreprocessor if "clip" in name else models.SigLIPPreprocessor
    size = recorded["images"].shape[1:]
    inputs = family.from_preset(path)({"images": np.zeros((4, *size), np.float32), "prompts": GOLDEN[name]["texts"]})
    np.testing.assert_array_equal(inputs["token_ids"], recorded["token_ids"])


def test_biases_that_blocks_here_cannot_leave_out_are_zeros(unpacked, tmp_path):
    model = loaded(unpacked("hub_vit_gap"))
    config = keras_vit.config_of(model)
    assert (config.qkv_bias, config.patch_bias, config.classifier) == (False, False, "gap")
    assert not np.any(
        keras_vit.checkpoints.load.values_by_key(model)["Transformer/encoderblock_0/MlpBlock_3/Dense_0/bias"]
    )
    with pytest.raises(UserError, match="keras_hub cannot express qkv_bias=False"):
        keras_vit.save_checkpoint(model, tmp_path / "x", layout="keras_hub")


@pytest.mark.parametrize(
    ("name", "file", "fields", "sentence"),
    [
        ("hub_vit_rectangular", "task.json", {"pooling": "gap"}, "unsupported pooling='gap'; supported: token"),
        ("hub_vit_gap", "task.json", {"pooling": "token"}, "unsupported pooling='token'; supported: gap"),
        ("hub_vit_rectangular", "config.json", {"num_heads": 3}, "has 2 heads"),
        ("hub_vit_rectangular", "config.json", {"hidden_dim": 16}, "says hidden_dim=16"),
        ("hub_dinov3", "config.json", {"rope_theta": 10.0}, "unsupported rope_theta=10.0"),
        ("hub_dinov2_registers", "config.json", {"num_register_tokens": 0}, "missing keys|unexpected|axes"),
        ("hub_clip", "image_converter.json", {"interpolation": "area"}, "unsupported interpolation='area'"),
        ("hub_siglip", "image_converter.json", {"scale": [1.0, "a"]}, "should give 'scale' as finite numbers"),
        ("hub_siglip", "image_converter.json", {"scale": 10**400}, "should give 'scale' as finite numbers"),
        ("hub_siglip", "image_converter.json", {"mean": [0.5], "variance": [0]}, "cannot be read as that of a model"),
        ("hub_deit", "config.json", {"image_shape": [8]}, "height, width and channels"),
    ],
)
def test_what_a_model_here_does_not_compute_is_refused(name, file, fields, sentence, changed):
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(changed(name, file, **fields))


def test_a_tower_looks_up_the_positions_that_its_file_says(unpacked, tmp_path):
    """Those of a new CLIP of keras-hub are all the first one."""
    shutil.copytree(unpacked("hub_clip"), tmp_path / "x")
    ids = "layers/clip_vision_encoder/layers/clip_vision_embedding/vars/1"
    with h5py.File(tmp_path / "x" / "model.weights.h5", "a") as file:
        assert not np.any(file[ids][()])
        file[ids][...] = 100
    with pytest.raises(UserError, match="should hold rows of the position embeddings"):
        keras_vit.from_checkpoint(tmp_path / "x")


def test_the_file_of_weights_stands_for_its_folder(unpacked):
    folder = unpacked("hub_deit")
    assert keras_vit.describe(folder / "model.weights.h5") == keras_vit.describe(folder)


def test_weights_in_bfloat16_are_read(unpacked, tmp_path):
    shutil.copytree(unpacked("hub_dinov3"), tmp_path / "x")
    arrays = open_hdf5(tmp_path / "x" / "model.weights.h5")
    with h5py.File(tmp_path / "x" / "model.weights.h5", "a") as file:
        for key in arrays:
            halves = (file[key][()].view(np.uint32) >> 16).astype(np.uint16)
            del file[key]
            file.create_dataset(key, data=halves.view("V2")).attrs["dtype"] = "bfloat16"
    found = outputs(keras_vit.from_checkpoint(tmp_path / "x"), golden("hub_dinov3")["images"])
    assert np.abs(found - golden("hub_dinov3")["outputs"]).max() < 0.2

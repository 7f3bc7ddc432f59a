"""Files of kmodels (zeromodels), against what it computed with them."""

import importlib
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
from tests.support import changed_folder, loaded, others_slow, randomize

NAMES = list(json.loads((FILES / "kmodels.json").read_text()))


@pytest.mark.parametrize("end", ["", "_other"])
@pytest.mark.parametrize("name", others_slow(["km_eomt", "km_eomt_gated"], "km_eomt_gated"))
def test_classes_and_masks_are_those_of_kmodels(name, end, unpacked):
    """At the size of the file and at another; images of kmodels' EoMT are squares."""
    recorded = golden(name)
    images = recorded[f"images{end}"]
    model = loaded(unpacked(name), **({"image_size": images.shape[1]} if end else {}))
    found = {key: keras.ops.convert_to_numpy(value) for key, value in model(images).items()}
    masks = found["mask_logits"].transpose(0, 3, 1, 2)
    np.testing.assert_allclose(found["class_logits"], recorded[f"class_logits{end}"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(masks, recorded[f"mask_logits{end}"], rtol=1e-5, atol=2e-5)


def test_a_segmentation_of_kmodels_needs_its_config_and_its_heads(unpacked, tmp_path):
    shutil.copy(unpacked("km_eomt") / "model.weights.h5", tmp_path / "x.weights.h5")
    with pytest.raises(UserError, match="should give 'depths' as the number of blocks"):
        keras_vit.from_checkpoint(tmp_path / "x.weights.h5", num_heads=3)
    with h5py.File(tmp_path / "x.weights.h5", "a") as file:
        del file["layers/dense_9"]  # the classes
    with pytest.raises(UserError, match="EoMTModel of kmodels"):
        keras_vit.from_checkpoint(tmp_path / "x.weights.h5", num_heads=3)


def test_the_text_tower_and_the_scale_of_siglip_2(unpacked, tmp_path):
    recorded, folder = golden("km_siglip2"), unpacked("km_siglip2")
    images = outputs(loaded(folder), recorded["images"])
    texts = outputs(keras_vit.text_tower(folder), recorded["token_ids"].astype(np.int32))
    text = keras_vit.text.checkpoint.open_text(folder)
    found = text.scale * (images / np.linalg.norm(images, axis=1, keepdims=True)) @ texts.T + text.bias
    np.testing.assert_allclose(found, recorded["logits"], rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="should give 'num_heads' as the number of heads of the text tower"):
        keras_vit.text_tower(changed_folder(folder, tmp_path / "x", file="zm_config.json", text_config={}))


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
        ("km_dinov3", {"hidden_act": "quick_gelu", "grid": ["a"]}, "unsupported hidden_act='quick_gelu'"),
        ("km_vit", {"embed_dim": 16}, "says embed_dim=16"),
        ("km_vit", {"num_heads": 5}, "multiple of num_heads"),
        ("km_eomt", {"depths": 4}, "the last 4 blocks, but the model has 3"),
        ("km_eomt", {"depths": None}, "should give 'depths' as the number of blocks"),
        ("km_eomt", {"num_queries": 4}, "says num_queries=4"),
    ],
)
def test_a_config_of_another_model_is_refused(name, fields, sentence, unpacked, tmp_path):
    own = read_json(unpacked(name) / "zm_config.json")["vision_config"]
    other = changed_folder(unpacked(name), tmp_path / "x", file="zm_config.json", vision_config=own | fields)
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(other)


DEIT = keras_vit.ViTConfig(
    patch_size=4,
    hidden_size=8,
    num_layers=11,  # of which names in alphabetical order would be mixed up
    num_heads=2,
    mlp_dim=32,
    gelu="erf",
    distillation="head",
    layer_scale=0.1,
)
REWRITTEN = [name for name in NAMES if name not in ("km_siglip2", "km_deit", "km_flexible")]


def written(name: str, unpacked, folder: pathlib.Path) -> tuple[pathlib.Path, keras.Model]:
    """A model of a file, or a DeiT, written again."""
    if name == "deit":  # kmodels' config of DeiT has no mlp_ratio
        model = randomize(keras_vit.build(DEIT, image_size=(8, 12), num_classes=3))
    else:
        model = loaded(unpacked(name))
    keras_vit.save_checkpoint(model, folder / "x", layout="kmodels")
    return folder / "x", model


def results(model: keras.Model, images: np.ndarray) -> dict[str, np.ndarray]:
    found = model(images, training=False)
    found = found if isinstance(found, dict) else {"outputs": found}
    return {key: keras.ops.convert_to_numpy(value) for key, value in found.items()}


def images_for(model: keras.Model) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, *model.input_shape[1:])).astype(np.float32)


@pytest.mark.filterwarnings("ignore:The image processors of kmodels")
@pytest.mark.parametrize("name", others_slow([*REWRITTEN, "deit"], *REWRITTEN[::2]))
def test_what_is_written_is_the_same_model(name, unpacked, tmp_path):
    path, model = written(name, unpacked, tmp_path)
    again = keras_vit.from_checkpoint(path)
    assert keras_vit.config_of(again) == keras_vit.config_of(model)
    assert keras_vit.describe(path).layout == "kmodels"
    found, expected = (results(each, images_for(model)) for each in (again, model))
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values)
    if name != "deit":
        before, after = (open_hdf5(each / "model.weights.h5", named=True) for each in (unpacked(name), path))
        assert before.keys() == after.keys()
        paths = ({str(array.open.args[1]) for array in each.values()} for each in (before, after))
        assert next(paths) == next(paths)


@pytest.mark.filterwarnings("ignore:The image processors of kmodels")
@pytest.mark.parametrize("name", [*REWRITTEN, "deit"])
def test_kmodels_reads_what_is_written(name, unpacked, tmp_path):
    pytest.importorskip("zeromodels")
    path, model = written(name, unpacked, tmp_path)
    content = read_json(path / "zm_config.json")
    family = getattr(importlib.import_module(content["model_module"]), content["model_class"])
    theirs = family(family.config_class.from_dict(content))
    theirs.load_weights(path / "model.weights.h5")
    images = images_for(model)
    found, expected = results(theirs, images), results(model, images)
    for key, values in expected.items():
        values = values.transpose(0, 3, 1, 2) if key == "mask_logits" else values
        own = found[key] if found[key].ndim == values.ndim else found[key][:, 0]  # the class token
        np.testing.assert_allclose(own, values, rtol=1e-5, atol=2e-5, err_msg=key)


def test_what_kmodels_does_not_have_is_not_written(unpacked, tiny_model, tmp_path):
    for model, setting in ((loaded(unpacked("km_deit")), "mlp_dim=24"), (tiny_model, "gelu='tanh'")):
        with pytest.raises(UserError, match=f"cannot express {setting}"):
            keras_vit.save_checkpoint(model, tmp_path / "x", layout="kmodels")

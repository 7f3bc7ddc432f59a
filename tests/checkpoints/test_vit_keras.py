"""Files of vit-keras on Keras 2, against what it computed with them."""

import json
import shutil

import h5py
import numpy as np
import pytest

import keras_vit
from keras_vit import UserError
from tests.checkpoints.keras_libraries import FILES, golden, outputs
from tests.support import loaded, others_slow

GOLDEN = json.loads((FILES / "vit_keras.json").read_text())
REFUSED = "vit_keras_gelu_head.h5"


def test_a_file_of_weights_needs_the_number_of_heads():
    recorded, file = golden("vit_keras_whole.h5"), FILES / "vit_keras_weights.h5"
    with pytest.raises(UserError, match="give num_heads"):
        keras_vit.from_checkpoint(file)
    model = keras_vit.from_checkpoint(file, num_heads=3, stored_grid=(2, 3), classifier_activation="softmax")
    np.testing.assert_allclose(outputs(model, recorded["images"]), recorded["outputs"], rtol=1e-5, atol=1e-5)


def test_positions_are_resized_as_vit_keras_resizes_those_of_the_released_files():
    model = keras_vit.from_checkpoint(FILES / "vit_keras_square.h5", image_size=(8, 20))
    table = keras_vit.checkpoints.load.values_by_key(model)["Transformer/posembed_input/pos_embedding"]
    with h5py.File(FILES / "vit_keras_square.h5") as file:
        stored = file["model_weights/Transformer/posembed_input/Transformer/posembed_input/pos_embedding:0"][()]
    ours = keras_vit.resize_position_embedding(stored, (3, 3), (2, 5), 1, "bilinear-aligned")
    np.testing.assert_array_equal(table, ours)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        (REFUSED, "whose head has a Dense with the activation gelu"),
        ("keras_example.h5", r"of Keras' examples \(its layer Patches\)"),
    ],
)
def test_what_models_here_do_not_compute_is_refused_by_name(file, sentence):
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(FILES / file)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text[:100], "cannot be read|damaged"),
        (lambda text: text.replace('"layers": [', '"layers": [3, '), "a config, but gives 3"),
        (lambda text: text.replace('"num_heads": 3', '"num_heads": 4', 1), "one number for all blocks"),
        (lambda text: text.replace("Custom>ClassToken", "Custom>Other"), "other layers"),
        (lambda text: text.replace("ExtractToken", "Mine"), "unsupported Lambda='Mine'"),
        (lambda text: text.replace("TransformerBlock", "Other"), "cannot be read as a model of vit-keras"),
    ],
)
def test_another_description_is_refused_without_running_its_code(change, sentence, tmp_path):
    shutil.copy(FILES / "vit_keras_whole.h5", tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "a") as file:
        file.attrs["model_config"] = change(file.attrs["model_config"])
    with pytest.raises(UserError, match=sentence):
        keras_vit.from_checkpoint(tmp_path / "x.h5")


def test_what_is_written_is_what_vit_keras_writes(tmp_path):
    """The same layers and names in the same order, with the same values: Keras 2 reads them in their order."""
    file = FILES / "vit_keras_weights.h5"
    model = keras_vit.from_checkpoint(file, num_heads=3, stored_grid=(2, 3))
    keras_vit.save_checkpoint(model, tmp_path / "x.h5", layout="vit_keras")
    with h5py.File(file) as before, h5py.File(tmp_path / "x.h5") as after:
        layers = [name for name in before.attrs["layer_names"] if len(before[name].attrs["weight_names"])]
        assert list(after.attrs["layer_names"]) == layers
        for layer in layers:
            names = list(before[layer].attrs["weight_names"])
            assert list(after[layer].attrs["weight_names"]) == names
            for name in names:
                np.testing.assert_array_equal(after[layer][name], before[layer][name])


@pytest.mark.parametrize(
    "name", others_slow([name for name in GOLDEN if name != REFUSED], "vit_keras_whole.h5", "vit_keras_features.h5")
)
def test_a_model_is_written_and_read_again(name, tmp_path):
    model = loaded(FILES / name)
    keras_vit.save_checkpoint(model, tmp_path / "x.h5", layout="vit_keras")
    config, (height, width) = keras_vit.config_of(model), model.input_shape[1:3]
    grid = height // config.patch[0], width // config.patch[1]
    again = keras_vit.from_checkpoint(tmp_path / "x.h5", num_heads=config.num_heads, stored_grid=grid)
    assert keras_vit.config_of(again) == config
    before, after = (keras_vit.checkpoints.load.values_by_key(each) for each in (model, again))
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value)


@pytest.mark.parametrize(("name", "words"), [("x.h5", "cannot express gelu='tanh'"), ("x.npz", r"should end in \.h5")])
def test_what_vit_keras_does_not_compute_is_not_written(name, words, tiny_model, tmp_path):
    with pytest.raises(UserError, match=words):
        keras_vit.save_checkpoint(tiny_model, tmp_path / name, layout="vit_keras")

"""Files of keras-hub, kmodels and vit-keras, against what these libraries computed with them."""

import json

import keras
import numpy as np
import pytest

import keras_vit
from tests.checkpoints.keras_libraries import FILES, golden, outputs
from tests.support import loaded, others_slow

NAMES = [
    name
    for library in ("keras_hub", "kmodels", "vit_keras")
    for name in json.loads((FILES / f"{library}.json").read_text())
    if "eomt" not in name and name != "vit_keras_gelu_head.h5"
]
RESIZED = [name for name in NAMES if "images_other" in golden(name)]
SLOW = {"hub_dinov2", "hub_dinov3_gated", "km_vit", "km_deit", "km_dinov2", "km_dinov3"}


@pytest.mark.parametrize("name", NAMES)
def test_the_outputs_are_those_of_the_library(name, unpacked):
    recorded, model = golden(name), loaded(unpacked(name))
    assert model.input_shape[1:] == recorded["images"].shape[1:]
    np.testing.assert_allclose(outputs(model, recorded["images"]), recorded["outputs"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", others_slow(RESIZED, *(set(RESIZED) - SLOW)))
def test_at_another_size_the_outputs_are_those_of_the_library(name, unpacked):
    recorded = golden(name)
    model = keras_vit.from_checkpoint(unpacked(name), image_size=recorded["images_other"].shape[1:3])
    found = outputs(model, recorded["images_other"])
    np.testing.assert_allclose(found, recorded["outputs_other"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["hub_vit_rectangular", "hub_vit_gap", "hub_deit", "km_vit", "km_dino", "km_eomt"])
def test_the_images_are_those_of_the_library(name, unpacked):
    recorded = golden(name)
    preprocessing = keras_vit.preprocessing_of(loaded(unpacked(name)))
    found = keras.ops.convert_to_numpy(preprocessing(recorded["raw"]))
    expected = recorded["made"][0] if "made" in recorded else recorded["images"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)

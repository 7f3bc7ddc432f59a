"""Today's Vision Transformers: agreement with transformers and timm, and everything that a ViT here can do."""

import functools
import json

import numpy as np
import pytest
import safetensors.numpy

import keras_vit
from tests.support import FIXTURES

MODERN = FIXTURES / "modern"
GOLDEN = json.loads((MODERN / "index.json").read_text())["fixtures"]
# What bare files of timm cannot tell.
UNTOLD = {name: {"num_heads": 4} for name in GOLDEN if name.startswith("timm")}
UNTOLD["timm_siglip"] = {"num_heads": 4, "gelu": "tanh"}
UNTOLD["timm_clip"] = {"num_heads": 4, "gelu": "quick"}
# The names here of what other codes recorded. CLIP's last hidden state is before the last norm, as are all of timm's
# features where that norm follows the pooling.
SAME_THING = {
    "pooler_output": "pre_logits",
    "hidden_0": "embedded",
    "hidden_last": "block_2",
    "image_embeds": "logits",
    "last_hidden_state": "encoded",
    "features": "encoded",
}
BEFORE_THE_NORM = {"hf_clip": "last_hidden_state", "hf_clip_gelu": "last_hidden_state", "timm_reg_gap": "features"}


@functools.cache
def golden_model(name: str, image_size: tuple[int, int] | None = None):
    return keras_vit.from_checkpoint(MODERN / GOLDEN[name]["checkpoint"], image_size=image_size, **UNTOLD.get(name, {}))


SIZES = [(name, "") for name in GOLDEN] + [(name, "_large") for name in GOLDEN if GOLDEN[name]["large_size"]]


@pytest.mark.parametrize(("name", "suffix"), SIZES)
def test_everything_recorded_agrees(name, suffix):
    """At the size of the file and at another, rectangular one."""
    entry, recorded = GOLDEN[name], np.load(MODERN / GOLDEN[name]["io"])
    model = golden_model(name, tuple(entry["large_size"]) if suffix else None)
    expected = {key: recorded[key] for key in recorded if key.endswith("_large") == bool(suffix)}
    images = expected.pop(f"images{suffix}")
    names = {}
    for key in expected:
        what = key.removesuffix("_large").removesuffix("_float64")
        names[key] = "block_2" if what == BEFORE_THE_NORM.get(name) else SAME_THING.get(what, what)
    if not any(layer.name == "head" for layer in model.layers):  # timm calls the features of a headless model logits
        names = {key: "pre_logits" if ours == "logits" else ours for key, ours in names.items()}
    inside = keras_vit.intermediates(model, sorted(set(names.values())))(images)
    assert names
    for key, ours in names.items():
        np.testing.assert_allclose(inside[ours], expected[key], **entry["tolerance"], err_msg=key)


@pytest.mark.parametrize("name", GOLDEN)
def test_reading_and_writing_gives_the_same_arrays(name, tmp_path):
    model = golden_model(name)
    source = MODERN / GOLDEN[name]["checkpoint"]
    layout = "huggingface" if source.is_dir() else "timm"
    keras_vit.save_checkpoint(model, written := tmp_path / source.name, layout=layout)
    original, copy = (
        safetensors.numpy.load_file(path / "model.safetensors" if path.is_dir() else path) for path in (source, written)
    )
    original = {key: array for key, array in original.items() if not key.endswith("mask_token")}
    assert copy.keys() == original.keys()
    for key, array in original.items():
        np.testing.assert_array_equal(copy[key], array, err_msg=key)
    if layout == "huggingface":
        assert keras_vit.config_of(keras_vit.from_checkpoint(written)) == keras_vit.config_of(model)

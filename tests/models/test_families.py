"""Today's Vision Transformers: agreement with transformers and timm, and everything that a ViT here can do."""

import dataclasses
import functools
import json

import keras
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

import keras_vit
from keras_vit import UserError
from keras_vit.images.files import Image, Samples
from keras_vit.inspection import inspect
from tests.exports import saved_model_of, tflite_of
from tests.support import FIXTURES, TINY, TINY_IMAGE, assert_equal_arrays, assert_equal_weights, others_slow, randomize
from training.loop.devices.kernels import with_cpu_kernels

MODERN = FIXTURES / "modern"
GOLDEN = json.loads((MODERN / "index.json").read_text())["fixtures"]
# What bare files of timm cannot tell.
OVERRIDES = {name: {"num_heads": 4} for name in GOLDEN if name.startswith("timm")}
OVERRIDES["timm_siglip"] = {"num_heads": 4, "gelu": "tanh"}
OVERRIDES["timm_clip"] = {"num_heads": 4, "gelu": "quick", "position_embedding": "learned"}
# The names here of what other codes recorded. CLIP's last hidden state is before the last norm, as are all of timm's
# features where that norm follows the pooling.
SAME_THING = {
    "pooler_output": "pre_logits", "hidden_0": "embedded", "hidden_last": "block_2", "image_embeds": "logits",
    "last_hidden_state": "encoded", "features": "encoded",
}  # fmt: skip
BEFORE_THE_NORM = {"hf_clip": "last_hidden_state", "hf_clip_gelu": "last_hidden_state", "timm_reg_gap": "features"}


@functools.cache
def golden_model(name: str, image_size: tuple[int, int] | None = None):
    file = MODERN / GOLDEN[name]["checkpoint"]
    return keras_vit.from_checkpoint(file, image_size=image_size, **OVERRIDES.get(name, {}))


# Each of these has a sibling that has all of it and more.
SIBLINGS = {"hf_dinov2", "hf_dinov3", "hf_deit", "hf_clip_gelu", "timm_dinov2"}
# The rules by which positions are resized.
OTHER_SIZES = {"hf_dinov2_registers", "hf_dinov3_gated", "hf_deit_distilled", "hf_clip", "hf_siglip"}
SIZES = [(name, "") for name in GOLDEN] + [(name, "_large") for name in GOLDEN if GOLDEN[name]["large_size"]]
FAST = [(name, suffix) for name, suffix in SIZES if name in (OTHER_SIZES if suffix else GOLDEN.keys() - SIBLINGS)]


@pytest.mark.parametrize(
    ("name", "suffix"), [size if size in FAST else pytest.param(*size, marks=pytest.mark.slow) for size in SIZES]
)
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


# What is read is written by the same rules.
@pytest.mark.parametrize(
    "name", others_slow(GOLDEN, *OTHER_SIZES, "hf_mae", "timm_dinov2_swiglu", "timm_clip", "timm_siglip")
)
def test_reading_and_writing_gives_the_same_arrays(name, tmp_path):
    model = golden_model(name)
    source = MODERN / GOLDEN[name]["checkpoint"]
    layout = "huggingface" if source.is_dir() else "timm"
    keras_vit.save_checkpoint(model, written := tmp_path / source.name, layout=layout)
    original, copy = (
        safetensors.numpy.load_file(path / "model.safetensors" if path.is_dir() else path) for path in (source, written)
    )
    for arrays in (original, copy):  # unused outside of pretraining, not read; written where transformers misses it
        arrays.pop("embeddings.mask_token", None), arrays.pop("dinov2.embeddings.mask_token", None)
    assert_equal_arrays(copy, original)
    if layout == "huggingface":
        assert keras_vit.describe(written).config == keras_vit.config_of(model)


# One tiny model of each family; the sizes are distinct.
FAMILIES = {
    "DeiT": {"distillation": "head"},
    "DeiT III": {"prefix_positions": False, "layer_scale": 0.1},
    "DINOv2": {"layer_scale": 0.1, "num_registers": 2},
    "DINOv2 SwiGLU": {"layer_scale": 0.1, "gated_mlp": True, "gelu": "silu", "classifier": "token+gap"},
    "DINOv3": {"position_embedding": "rotary", "key_bias": False, "num_registers": 2, "layer_scale": 0.1},
    "CLIP": {"pre_norm": True, "patch_bias": False, "head_bias": False, "gelu": "quick"},
    "SigLIP": {"classifier": "map"},
    "registers and mean": {"classifier": "gap", "num_registers": 2, "norm_after_pooling": True},
}
family = pytest.mark.parametrize("name", FAMILIES)
# The families that have between them all that differs from a plain ViT.
some_families = pytest.mark.parametrize("name", others_slow(FAMILIES, "DeiT", "DINOv3"))


@functools.cache
def tiny(name: str) -> keras.Model:
    return randomize(keras_vit.build(dataclasses.replace(TINY, **FAMILIES[name]), image_size=TINY_IMAGE, num_classes=7))


@some_families
def test_adapting_keeps_what_fits_and_replaces_the_head(name, tiny_images):
    model = tiny(name)
    same = keras_vit.adapt(model)
    np.testing.assert_array_equal(same(tiny_images), model(tiny_images))
    other = keras_vit.adapt(model, image_size=(20, 18), num_classes=3)
    assert other(np.zeros((1, 20, 18, 3), np.float32)).shape == (1, 3)
    for layer in other.layers:
        if layer.name not in ("Transformer.posembed_input", "head", "head_distillation"):
            assert_equal_weights(layer, model.get_layer(layer.name))


@pytest.mark.parametrize("name", others_slow(FAMILIES, "DINOv3"))
def test_the_cpu_form_has_the_same_outputs_and_gradients(name, tiny_images):
    model = tiny(name)
    results = []
    for network in (model, with_cpu_kernels(model)):
        with tf.GradientTape() as tape:
            logits = network(tf.constant(tiny_images), training=True)
            loss = tf.reduce_mean(logits**2)
        results.append((logits, tape.gradient(loss, model.trainable_weights)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    for weight, one, two in zip(model.trainable_weights, results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4 * np.abs(one).max() + 1e-7, err_msg=weight.path)


@pytest.mark.parametrize("name", others_slow(FAMILIES, "DINOv3", "DINOv2 SwiGLU", "SigLIP"))
def test_every_figure_is_drawn(name):
    photos = np.random.default_rng(5).integers(0, 256, (2, *TINY_IMAGE, 3)).astype(np.uint8)
    images = [Image(str(number), photo) for number, photo in enumerate(photos)]
    inspection = inspect(tiny(name), images, checkpoint=name)
    assert {"filters", "attention"} <= set(inspection.arrays)


@pytest.mark.parametrize("name", others_slow(FAMILIES, "DeiT", "DINOv3", "registers and mean"))
def test_feature_maps_are_the_patch_tokens_of_the_blocks(name, tiny_images):
    model = tiny(name)
    config = keras_vit.config_of(model)
    inside = keras_vit.intermediates(model)(tiny_images)
    maps = keras_vit.feature_maps(model, [-1, 0], norm=False)(tiny_images)
    prefix = config.num_prefix_tokens
    assert maps.keys() == {"block_0", "block_1"}
    for key, values in maps.items():
        assert values.shape == (5, 3, 5, 12)
        np.testing.assert_array_equal(np.reshape(values, (5, 15, 12)), inside[key][:, prefix:])
    normed = keras_vit.feature_maps(model, [1])(tiny_images)["block_1"]
    expected = inside.get("encoded", inside["block_1"])  # a norm behind the mean of the tokens is not for them
    np.testing.assert_allclose(np.reshape(normed, (5, 15, 12)), expected[:, prefix:], atol=1e-6)


@pytest.mark.parametrize("blocks", [[], [2], [-3], ["last"], [True]])
def test_blocks_that_do_not_exist_are_refused(blocks):
    with pytest.raises(UserError, match="blocks must be numbers from -2 to 1"):
        keras_vit.feature_maps(tiny("DINOv2"), blocks)


@pytest.mark.slow
@family
def test_every_family_is_exported_to_saved_model_and_tflite(name, tmp_path):
    """The exports compare themselves with the model."""
    shades = np.random.default_rng(4).integers(0, 256, (6, *TINY_IMAGE, 3)).astype(np.uint8)
    samples = Samples(tuple(tf.io.encode_png(shade).numpy() for shade in shades), np.arange(6) % 7)
    labels = [f"class {number}" for number in range(7)]
    saved_model_of(tiny(name), labels, samples, tmp_path / "served")
    tflite_of(tiny(name), labels, samples, tmp_path / "phone", ["float32"])

"""Ordinary Keras life: compile, fit, save, and load in a process that only imports keras_vit."""

import concurrent.futures
import dataclasses
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from export.inference_model import inference_model
from keras_vit import ConvStem, Preprocessing, ResNetConfig, ShiftedPatches, ViTConfig
from keras_vit.files.npz import write_npz
from keras_vit.files.safetensors import write_safetensors
from tests.support import TINY, TINY_IMAGE, TINY_STEM, others_slow, randomize

_KNOWN = """
import sys
exec(sys.argv[1])
known = set(keras.saving.get_custom_objects())
import keras_vit.models.build, keras_vit.models.self_supervised, keras_vit.text.tower
assert known == set(keras.saving.get_custom_objects()) != set()
assert not any(type(finder).__module__.startswith("keras_vit") for finder in sys.meta_path)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import keras; import keras_vit",
        "import keras_vit, tensorflow, keras",
        "import keras_vit; from keras import ops; import keras",
        "import keras_vit.models.layers, keras",
        "from keras_vit.checkpoints.load import assign; import keras",
    ],
)
def test_keras_knows_our_layers_in_whatever_order_they_are_imported(imports):
    # JAX is imported sooner, but the requirements of a TPU VM do not have it.
    backend = "tensorflow" if "tensorflow" in imports or importlib.util.find_spec("jax") is None else "jax"
    environment = os.environ | {"KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", _KNOWN, imports], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# One row for each way a model can be built; each must survive every column below.
CONFORMANCE = {
    "token": TINY,
    "gap": dataclasses.replace(TINY, classifier="gap"),
    "map": dataclasses.replace(TINY, classifier="map"),
    "unpooled": dataclasses.replace(TINY, classifier="unpooled"),
    "pre_logits": dataclasses.replace(TINY, representation_size=9),
    "erf": dataclasses.replace(TINY, gelu="erf", layer_norm_epsilon=1e-5),
    "dropouts": dataclasses.replace(TINY, dropout_rate=0.1, attention_dropout_rate=0.1, stochastic_depth_rate=0.1),
    "learned-2d": dataclasses.replace(TINY, position_embedding="learned-2d"),
    "sincos-2d": dataclasses.replace(TINY, position_embedding="sincos-2d"),
    "relative": dataclasses.replace(TINY, position_embedding="relative"),
    "no positions": dataclasses.replace(TINY, position_embedding="none"),
    "in every layer": dataclasses.replace(TINY, position_injection="every-layer"),
    "shared by the layers": dataclasses.replace(TINY, position_embedding="learned-2d", position_injection="shared"),
    "axial": dataclasses.replace(TINY, axial=True, classifier="gap", position_embedding="relative"),
    "no bias": dataclasses.replace(TINY, qkv_bias=False),
    "norm after pooling": dataclasses.replace(TINY, classifier="gap", norm_after_pooling=True),
    "token without a last norm": dataclasses.replace(TINY, final_norm=False),
    "mean without a last norm": dataclasses.replace(TINY, classifier="gap", with_class_token=True, final_norm=False),
    "no bias of key, patches and head": dataclasses.replace(TINY, key_bias=False, patch_bias=False, head_bias=False),
    "norm before the blocks": dataclasses.replace(TINY, pre_norm=True, gelu="quick"),
    "gated": dataclasses.replace(TINY, gated_mlp=True, gelu="silu", layer_scale=0.1),
    "registers": dataclasses.replace(TINY, classifier="gap", num_registers=2, norm_after_pooling=True),
    "token and mean": dataclasses.replace(TINY, classifier="token+gap", num_registers=2, prefix_positions=False),
    "two heads": dataclasses.replace(TINY, distillation="head"),
    "unread token": dataclasses.replace(TINY, distillation="token"),
    "mean beside a class token": dataclasses.replace(TINY, classifier="gap", with_class_token=True),
    "rotary beside learned positions": dataclasses.replace(
        TINY, rotary_reference=(4, 4), gated_mlp=True, gelu="silu", mlp_norm=True, attention_norm=True
    ),
    "attention pooling beside a class token": dataclasses.replace(
        TINY,
        classifier="map",
        with_class_token=True,
        pool_heads=2,
        pool_mlp_dim=10,
        rotary_reference=(4, 4),
        rotary_offset=1.0,
        rotary_columns_first=True,
    ),
    "rotary": dataclasses.replace(TINY, position_embedding="rotary", num_registers=2),
    "texts": dataclasses.replace(
        TINY, representation_size=9, representation="projection", normalized=True, head_bias=False
    ),
    "hybrid": dataclasses.replace(TINY, patch_size=1, stem=TINY_STEM),
    "early convolutions": dataclasses.replace(TINY, patch_size=1, stem=ConvStem((4, 6), (3, 5), (2, 3))),
    "shifted patches": dataclasses.replace(TINY, patch_size=1, stem=ShiftedPatches(3)),
    "locality": dataclasses.replace(TINY, locality_attention=True),
    "sequence pooling": dataclasses.replace(TINY, classifier="sequence", position_embedding="none"),
    "bit": dataclasses.replace(TINY_STEM, preactivation=True),
    "axial resnet": dataclasses.replace(TINY_STEM, axial_heads=2),
}


# Between them they have most of the layers that another form of the model rewrites; the others take minutes.
REWRITTEN = {"token", "map", "relative", "rotary", "hybrid"}
every_kind = pytest.mark.parametrize("name", others_slow(CONFORMANCE, *REWRITTEN))


@functools.cache
def tiny(name: str) -> keras.Model:
    """For tests that change nothing of it."""
    return randomize(keras_vit.build(CONFORMANCE[name], image_size=TINY_IMAGE, num_classes=7))


@every_kind
def test_every_kind_survives_saving(name, tmp_path, tiny_images):
    model = tiny(name)
    model.save(tmp_path / "x.keras")
    again = keras.models.load_model(tmp_path / "x.keras")
    np.testing.assert_array_equal(again(tiny_images), model(tiny_images))
    assert keras_vit.config_of(again) == CONFORMANCE[name]
    assert keras_vit.preprocessing_of(again) == Preprocessing(TINY_IMAGE)
    inside = keras_vit.intermediates(again)(tiny_images)
    np.testing.assert_allclose(inside["logits"], model(tiny_images), rtol=1e-5, atol=1e-5)
    for key, values in inside.items():
        if key.startswith("attention"):
            np.testing.assert_allclose(np.sum(values, axis=-1), 1.0, rtol=1e-5, err_msg=key)
    assert {key for key in inside if key.startswith("attention_1")} == ATTENTION.get(name, {"attention_1"})


ATTENTION = {"axial": {"attention_1_row", "attention_1_column"}, "bit": set(), "axial resnet": set()}


_INITIAL = """
import sys
import keras, numpy as np
import test_saving

for index, config in enumerate(test_saving.CONFORMANCE.values()):
    keras.utils.set_random_seed(4)
    model = test_saving.keras_vit.build(config, image_size=test_saving.TINY_IMAGE, num_classes=7)
    np.save(f"{sys.argv[1]}/{index}.npy", np.concatenate([weight.ravel() for weight in model.get_weights()]))
"""


@pytest.mark.slow
def test_the_seed_alone_decides_the_initial_weights_in_every_process(tmp_path):
    tests = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{tests.parents[1]}{os.pathsep}{tests}"}
    subprocess.run([sys.executable, "-c", _INITIAL, str(tmp_path)], check=True, env=environment, capture_output=True)
    for index, config in enumerate(CONFORMANCE.values()):
        keras.utils.set_random_seed(4)
        model = keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7)
        here = np.concatenate([weight.ravel() for weight in model.get_weights()])
        np.testing.assert_array_equal(np.load(tmp_path / f"{index}.npy"), here)


@every_kind
def test_every_kind_takes_a_gradient_to_every_weight(name, tiny_images):
    model = tiny(name)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(tf.constant(tiny_images), training=True) ** 2)
    for weight, gradient in zip(model.trainable_weights, tape.gradient(loss, model.trainable_weights), strict=True):
        assert np.isfinite(gradient).all(), weight.path
        # A key's bias moves all logits of a query alike, so the softmax gives it no gradient.
        assert weight.path.endswith("key/bias") or np.any(gradient), weight.path


@pytest.mark.parametrize("name", others_slow(CONFORMANCE, "token"))
def test_every_kind_compiles_under_xla(name, tiny_images):
    model = tiny(name)
    compiled = tf.function(lambda x: model(x, training=False), jit_compile=True)
    np.testing.assert_allclose(compiled(tf.constant(tiny_images)), model(tiny_images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [None, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", others_slow(CONFORMANCE, "map", "rotary", "hybrid"))
def test_every_kind_stays_the_same_in_the_form_for_tensorflow(name, batch, tiny_images):
    """Not the least where what the norms read is small: oneDNN's norm in one pass likes to take the epsilon 1e-3."""
    model = tiny.__wrapped__(name)
    for layer in model.layers:
        if layer.name in ("embedding", "cls", "Transformer.posembed_input") or layer.name.endswith((".out", "Dense_1")):
            layer.set_weights([0.02 * weight for weight in layer.get_weights()])
    rewritten = inference_model(model, for_tensorflow=True)
    served = tf.function(
        lambda images: rewritten(images, training=False),
        input_signature=[tf.TensorSpec((batch, *tiny_images.shape[1:]))],
    )
    np.testing.assert_allclose(served(tiny_images), model(tiny_images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", others_slow(CONFORMANCE, "relative", "rotary"))
def test_every_kind_shows_the_same_attention_in_the_form_for_tensorflow(name, tiny_images):
    model = tiny(name)
    rewritten = inference_model(model, for_tensorflow=True, all_tokens=True)
    names = [name for name in keras_vit.intermediates(model).output if name.startswith("attention_")]
    if not names:
        assert isinstance(CONFORMANCE[name], ResNetConfig)
        return
    expected, found = (keras_vit.intermediates(of, names)(tiny_images) for of in (model, rewritten))
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)


def test_the_form_for_tensorflow_is_the_same_in_chunks(tiny_images):
    rewritten = inference_model(tiny.__wrapped__("token"), for_tensorflow=True)
    expected = np.asarray(rewritten(tiny_images))
    keras_vit.chunk_attention(rewritten, 2)  # the queries there are scaled already
    np.testing.assert_allclose(rewritten(tiny_images), expected, atol=1e-5)


def test_every_field_of_the_configuration_is_varied_by_some_row():
    varied = {
        field.name
        for field in dataclasses.fields(ViTConfig)
        if len({getattr(config, field.name) for config in CONFORMANCE.values() if isinstance(config, ViTConfig)}) > 1
    }
    sizes = {"patch_size", "hidden_size", "num_layers", "num_heads", "mlp_dim"}
    assert varied | sizes == {field.name for field in dataclasses.fields(ViTConfig)}


def test_the_preprocessing_of_a_model_survives_saving(tmp_path):
    preprocessing = Preprocessing(TINY_IMAGE, channels=1, resize="crop", value_range=(0.0, 1.0))
    model = keras_vit.build(TINY, preprocessing=preprocessing, num_classes=3)
    model.save(tmp_path / "x.keras")
    assert keras_vit.preprocessing_of(keras.models.load_model(tmp_path / "x.keras")) == preprocessing
    assert model.input_shape == (None, *TINY_IMAGE, 1)


@pytest.mark.parametrize("write", [write_npz, write_safetensors])
def test_two_threads_that_write_one_file_do_not_disturb_each_other(write, tmp_path):
    path = tmp_path / "weights.file"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write(path, {"x": np.full(50_000, number)}), range(40)))
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.file"]

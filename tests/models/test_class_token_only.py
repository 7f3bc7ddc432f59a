"""Layers of which only the class token is read: derived from the config, computed for it alone, equal outputs."""

import dataclasses
import functools

import keras
import numpy as np
import pytest

import keras_vit
from export.inference_model import inference_model
from keras_vit.models.build import class_token_only
from keras_vit.models.self_supervised import masked_patch_model
from tests.support import TINY, TINY_IMAGE, randomize
from training.loop.devices.kernels import with_cpu_kernels

_BLOCK = "Transformer.encoderblock_1"
_ATTENTION = f"{_BLOCK}.MultiHeadDotProductAttention_1"
_MLP = {f"{_BLOCK}.residual", f"{_BLOCK}.LayerNorm_2", f"{_BLOCK}.MlpBlock_3.Dense_0", f"{_BLOCK}.MlpBlock_3.Dense_1"}
_BEHIND = {f"{_ATTENTION}.out", *_MLP, _BLOCK, "Transformer.encoder_norm"}


@functools.cache
def _build(**fields) -> keras.Model:
    config = dataclasses.replace(TINY, **fields)
    return randomize(keras_vit.build(config, image_size=TINY_IMAGE, num_classes=7))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, {f"{_ATTENTION}.query", _ATTENTION, *_BEHIND}),
        # Where positions are added by one layer in many calls.
        ({"position_injection": "shared"}, {f"{_ATTENTION}.query", _ATTENTION, *_BEHIND}),
        ({"position_embedding": "relative"}, _BEHIND),
        ({"classifier": "gap"}, set()),
        ({"classifier": "map"}, set()),
        ({"classifier": "unpooled"}, set()),
    ],
)  # fmt: skip
def test_the_class_token_alone_is_read_of_the_last_block_but_for_keys_and_values(fields, names):
    assert class_token_only(_build(**fields)) == names


def test_tokens_that_something_else_reads_are_computed():
    model = _build()
    tokens = model.get_layer("Transformer.encoder_norm").output
    assert not class_token_only(keras.Model(model.input, [model.output, tokens]))
    summed = keras.layers.GlobalAveragePooling1D()(tokens)
    joined = keras.Model(model.input, keras.layers.Concatenate()([model.get_layer("pool").output, summed]))
    assert not class_token_only(joined)
    inside = model.get_layer(f"{_BLOCK}.MlpBlock_3.Dense_0").output
    assert not class_token_only(keras.Model(model.input, [model.output, inside]))
    again = keras.layers.GlobalAveragePooling1D()(model.get_layer("head")(tokens))
    assert not class_token_only(keras.Model(model.input, again))
    assert not class_token_only(keras.Model(model.input, keras.layers.Add()([model.output, again])))
    preprocessing = keras_vit.Preprocessing(TINY_IMAGE)
    assert not class_token_only(masked_patch_model(TINY, preprocessing, outputs=3, corruption=0.5, name="masked"))


def test_a_model_without_its_head_and_one_of_a_file_compute_no_more(tmp_path):
    model = _build()
    features = keras.Model(model.input, model.get_layer("pool").output)
    assert class_token_only(features) == class_token_only(model) != set()
    model.save(tmp_path / "model.keras")
    assert class_token_only(keras.models.load_model(tmp_path / "model.keras")) == class_token_only(model)


@pytest.mark.parametrize("form", [inference_model, with_cpu_kernels])
def test_the_rest_is_not_computed_and_nothing_changes(form, tiny_images):
    model = _build()
    less = form(model)
    assert less.get_layer(_BLOCK).output.shape == (None, 1, TINY.hidden_size)
    assert model.get_layer(_BLOCK).output.shape == (None, 16, TINY.hidden_size)
    np.testing.assert_allclose(less(tiny_images), model(tiny_images), rtol=1e-5, atol=1e-6)

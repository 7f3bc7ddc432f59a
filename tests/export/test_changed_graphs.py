"""Models whose graph a user has changed: what is written of them computes what they do, or they are refused."""

import dataclasses
import json
import pathlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from export import fingerprint
from export.inference_model import inference_model
from export.saved_model.export import export_saved_model
from export.source import Provenance, check_model, open_source, random_images
from export.tflite.export import export_tflite
from keras_vit import UserError, convert
from keras_vit.checkpoints.changed_graph import changed_layer
from keras_vit.models.build import classifier_head, logits_model
from keras_vit.models.layers import gelu_erf, gelu_tanh
from keras_vit.run_directory import LABELS, MODEL, SAMPLES
from tests.support import TINY, TINY_IMAGE, TINY_STEM, randomize
from training.loop.fit import rebuilt

NAMES = ("ash", "birch", "cedar")
GAP = dataclasses.replace(TINY, classifier="gap")


def _base(config=TINY, **options) -> keras.Model:
    return randomize(keras_vit.build(config, image_size=TINY_IMAGE, **{"num_classes": 3, **options}))


def _behind(*layers: keras.layers.Layer) -> keras.Model:
    """The base with more layers behind its logits."""
    model = _base()
    x = model.output
    for layer in layers:
        x = layer(x)
    return keras.Model(model.input, x)


def _with_pooling(pooling: Callable, config=TINY) -> keras.Model:
    """The base with another pooling of its tokens, and a head of the usual name."""
    model = _base(config)
    tokens = model.get_layer("Transformer.encoder_norm").output
    return randomize(keras.Model(model.input, keras.layers.Dense(3, name="head")(pooling(tokens))))


def _before_head(*layers: keras.layers.Layer) -> keras.Model:
    model = _base()
    x = model.get_layer("pool").output
    for layer in layers:
        x = layer(x)
    return keras.Model(model.input, model.get_layer("head")(x))


def _replaced(name: str, replacement: Callable, config=TINY) -> keras.Model:
    """A clone of the base in which one call is replaced: replacement(layer, inputs) -> outputs."""
    model = _base(config)

    def call(layer, *arguments, **options):
        return replacement(layer, *arguments) if layer.name == name else layer(*arguments, **options)

    return randomize(keras.models.clone_model(model, call_function=call))


def _set(name: str, attribute: str, value: object, config=TINY) -> keras.Model:
    model = _base(config)
    setattr(model.get_layer(name), attribute, value)
    return model


def _own_head(**options) -> keras.Model:
    model = _base(num_classes=0)
    return randomize(keras.Model(model.input, keras.layers.Dense(3, **options)(model.output)))


def _two_poolings(tokens):
    return keras.layers.Concatenate()([tokens[:, 0], keras.layers.GlobalMaxPooling1D()(tokens)])


BLOCK = "Transformer.encoderblock_1"
CHANGES: dict[str, Callable[[], keras.Model]] = {
    "own mean of all tokens": lambda: _with_pooling(keras.layers.GlobalAveragePooling1D()),
    "own maximum of all tokens": lambda: _with_pooling(keras.layers.GlobalMaxPooling1D(), GAP),
    "two poolings": lambda: _with_pooling(_two_poolings),
    "an index of keras.ops": lambda: _with_pooling(lambda tokens: tokens[:, 1]),
    "a norm before the head": lambda: _before_head(keras.layers.LayerNormalization(epsilon=1e-3)),
    "a norm without scale before the head": lambda: _before_head(keras.layers.LayerNormalization(scale=False)),
    "a dense layer before the head": lambda: _before_head(keras.layers.Dense(12, "relu")),
    "a scaling behind the logits": lambda: _behind(keras.layers.Rescaling(0.1)),
    "a division of keras.ops": lambda: _behind(lambda logits: logits / 7.0),
    "a dense layer behind the logits": lambda: _behind(keras.layers.Dense(3, name="more")),
    "a softmax": lambda: _behind(keras.layers.Softmax()),
    "a softmax of keras.ops": lambda: _behind(keras.ops.softmax),
    "a sigmoid": lambda: _behind(keras.layers.Activation("sigmoid")),
    "a head with softmax": lambda: _own_head(name="head", activation="softmax"),
    "a head with relu": lambda: _own_head(name="head", activation="relu"),
    "another activation": lambda: _set(f"{BLOCK}.MlpBlock_3.Dense_0", "activation", gelu_erf),
    "another epsilon": lambda: _set("Transformer.encoder_norm", "epsilon", 0.3),
    "an epsilon inside": lambda: _set(f"{BLOCK}.LayerNorm_0", "epsilon", 0.3),
    "no residual connection": lambda: _replaced(f"{BLOCK}.residual", lambda layer, inputs: inputs[1]),
    "the tokens squared": lambda: _replaced("patches", lambda layer, x: layer(x) ** 2),
    "the images scaled behind the spec": lambda: _replaced("spec", lambda layer, x: layer(x) * 2.0),
    "the images scaled before the spec": lambda: _replaced("spec", lambda layer, x: layer(x / 127.5 - 1.0)),
    "a scaled query": lambda: _replaced(
        f"{BLOCK}.MultiHeadDotProductAttention_1.query", lambda layer, x: keras.ops.tanh(layer(x))
    ),
    "a shift of the last block's tokens": lambda: _replaced(
        f"{BLOCK}.LayerNorm_2", lambda layer, x: layer(keras.ops.roll(x, 1, axis=1))
    ),
    "a pooling of a ResNet": lambda: _replaced(
        "pool", lambda layer, x: keras.layers.GlobalMaxPooling2D(name="largest")(x), TINY_STEM
    ),
}
# The outputs are those of the model that the config describes, so that nothing needs to be refused.
EQUAL: dict[str, Callable[[], keras.Model]] = {
    "a head of Keras": lambda: _own_head(name="head"),
    "a head of another name": lambda: _own_head(name="birds"),
    "a dropout before the head": lambda: _before_head(keras.layers.Dropout(0.5)),
    "a mean of all patches": lambda: _replaced(
        "pool", lambda layer, x: keras.layers.GlobalAveragePooling1D(name="mean")(x), 
        dataclasses.replace(TINY, classifier="gap", position_injection="input"),
    ),
}


def _images(model: keras.Model) -> np.ndarray:
    return np.random.default_rng(1).uniform(-1.0, 1.0, (6, *model.input_shape[1:])).astype(np.float32)


def _right_or_refused(model: keras.Model, write_and_read: Callable[[], keras.Model]) -> str:
    try:
        other = write_and_read()
    except UserError as error:
        return str(error)
    images = _images(model)
    np.testing.assert_allclose(other(images), model(images), rtol=1e-4, atol=1e-4)
    return ""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_not_adapted_nor_written_as_another_one(change, tmp_path):
    model = CHANGES[change]()
    name = changed_layer(model)
    assert name is not None
    for rebuild in (lambda: keras_vit.adapt(model), lambda: rebuilt(model, TINY, keras_vit.preprocessing_of(model))):
        with pytest.raises(UserError, match=f"was changed after keras_vit built it: its layer {name!r} differs"):
            rebuild()
    path = tmp_path / "model.npz"
    with pytest.raises(UserError, match=f"its layer {name!r} differs .* save it with model.save"):
        keras_vit.save_checkpoint(model, path, layout="npz")
    assert not path.exists()


@pytest.mark.parametrize("change", EQUAL)
def test_a_change_that_computes_the_same_is_adapted_and_written(change, tmp_path):
    model = EQUAL[change]()
    assert _right_or_refused(model, lambda: keras_vit.adapt(model, image_size=TINY_IMAGE)) == ""

    def through_a_file() -> keras.Model:
        keras_vit.save_checkpoint(model, tmp_path / "model.safetensors", layout="timm")
        return keras_vit.from_checkpoint(tmp_path / "model.safetensors", num_heads=3, gelu="tanh")

    del through_a_file  # patches of timm are square


@pytest.mark.parametrize("change", [*CHANGES, *EQUAL])
def test_the_model_of_an_export_computes_what_the_changed_one_does(change):
    model = {**CHANGES, **EQUAL}[change]()

    def exported() -> keras.Model:
        check_model(model, NAMES, pathlib.Path("."))
        return inference_model(logits_model(model), for_tensorflow=True)

    refusal = _right_or_refused(model, exported)
    refused = ("a softmax", "a softmax of keras.ops", "a sigmoid", "a head with softmax")
    assert bool(refusal) == (change in (*refused, "the images scaled before the spec"))

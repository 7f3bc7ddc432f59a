"""Attention for some queries at a time: the same numbers and gradients, less memory."""

import dataclasses
import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import UserError, chunk_attention
from tests.support import TINY, TINY_IMAGE, WATCHED, others_slow, randomize

# Peak memory of a call over what there was before it, in bytes, for all tokens at a time and for 64.
_PEAKS = (
    WATCHED
    + """
import json
import tensorflow as tf
import keras_vit

config = keras_vit.ViTConfig(patch_size=4, hidden_size=16, num_layers=1, num_heads=4, mlp_dim=16)
model = keras_vit.build(config, image_size=256, num_classes=3)  # 4,097 tokens: 268 MB of probabilities
images = tf.zeros((1, 256, 256, 3))
peaks = []
for queries in (64, None):
    keras_vit.chunk_attention(model, queries)
    call = tf.function(lambda x: model(x, training=False))
    call.get_concrete_function(tf.TensorSpec((1, 256, 256, 3)))
    peaks.append(watched(lambda: call(images))[1])
print(json.dumps(peaks))
"""
)


def tiny(**fields) -> keras.Model:
    """16 tokens of a 3 x 5 grid and the class token."""
    return randomize(keras_vit.build(dataclasses.replace(TINY, **fields), image_size=TINY_IMAGE, num_classes=3))


def logits_and_gradients(model: keras.Model, images: np.ndarray) -> list[np.ndarray]:
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_sum(logits * tf.constant([1.0, -2.0, 0.5]))
    return [logits.numpy(), *(array.numpy() for array in tape.gradient(loss, model.trainable_weights))]


@pytest.mark.parametrize("queries", others_slow([1, 5, 8, 15, 16, 100], 5))
def test_any_chunk_gives_the_logits_and_gradients_of_the_whole(queries, tiny_images):
    model = tiny()
    expected = logits_and_gradients(model, tiny_images)
    chunk_attention(model, queries)
    for array, wanted in zip(logits_and_gradients(model, tiny_images), expected, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize("fields", [{"classifier": "map"}, {"classifier": "gap", "axial": True}])
def test_other_forms_of_attention_too(fields, tiny_images):
    model = tiny(**fields)
    expected = model(tiny_images)
    chunk_attention(model, 2)
    np.testing.assert_allclose(model(tiny_images), expected, atol=1e-5)
    chunk_attention(model, None)
    np.testing.assert_array_equal(model(tiny_images), expected)


@pytest.mark.slow
def test_no_probabilities_of_all_tokens_are_ever_in_memory():
    done = subprocess.run([sys.executable, "-c", _PEAKS], capture_output=True, text=True, check=True)
    chunked, whole = json.loads(done.stdout)
    assert whole > 250e6
    assert chunked < 0.4 * whole


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"position_embedding": "relative"}, "without relative positions"),
        ({"attention_dropout_rate": 0.1}, "dropout of the probabilities"),
    ],
)
def test_what_cannot_be_computed_in_chunks_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        chunk_attention(tiny(**fields), 4)


@pytest.mark.parametrize("queries", [0, 2.5, "4"])
def test_a_chunk_is_a_number_of_tokens(queries, tiny_model):
    with pytest.raises(UserError, match="queries must be an integer of at least 1"):
        chunk_attention(tiny_model, queries)


def test_a_model_without_attention_is_refused():
    resnet = keras_vit.ResNetConfig((1,), 4, (8,), num_groups=2)
    with pytest.raises(UserError, match="is computed in chunks"):
        chunk_attention(keras_vit.build(resnet, image_size=16, num_classes=3), 4)

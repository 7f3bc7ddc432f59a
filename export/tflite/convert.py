"""Converts a model to a float32 TFLite file, by way of a SavedModel.

A file converted from a concrete function would have no weights.
"""

import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from export.files import save_module
from export.inference_model import inference_model, inner_blocks
from export.tflite.delegate_model import delegate_model, with_four_axes
from keras_vit import preprocessing_of
from keras_vit.models.build import class_token_only
from keras_vit.scores import UNKNOWN_SCORE, UnknownScorer, features_and_logits

_Function = Callable[[tf.Tensor], Mapping[str, tf.Tensor]]


def to_tflite(
    model: keras.Model,
    *,
    uint8_input: bool = False,
    dynamic_batch: bool = False,
    all_tokens: bool = False,
    finish: Callable[[keras.Model], keras.Model] | None = None,
    unknown: UnknownScorer | None = None,
) -> bytes:
    """Convert the `inference_model` of a model, with batch 1 or a dynamic batch.

    Args:
        model: from `keras_vit.build`.
        uint8_input: take pixels and normalize them.
        dynamic_batch: take any number of images.
        all_tokens: compute all tokens of the last block.
        finish: adds what follows the model, and may give a dict of outputs.
        unknown: adds the output unknown_score (B,).

    Returns:
        The file, from image (B, h, w, C) to logits (B, K), or to the outputs of `finish`.
    """
    preprocessing = preprocessing_of(model)
    network = inference_model(model, all_tokens=all_tokens)
    network = network if finish is None else finish(network)
    scored = None if unknown is None else features_and_logits(network)

    def classify(image):
        pixels = preprocessing.normalize(image) if uint8_input else image
        if unknown is not None:
            inside = scored(pixels, training=False)
            logits = inside["logits"]
            with tf.name_scope(UNKNOWN_SCORE):
                return {"logits": logits, UNKNOWN_SCORE: unknown.score(inside["pre_logits"], logits)}
        return _by_name(network(pixels, training=False))

    shape = (None if dynamic_batch else 1, *network.input_shape[1:])
    image = tf.TensorSpec(shape, tf.uint8 if uint8_input else tf.float32, name="image")
    return converted(classify, image, network.weights)


def to_delegate_tflite(
    model: keras.Model,
    images: np.ndarray,
    *,
    all_tokens: bool = False,
    finish: Callable[[keras.Model], keras.Model] | None = None,
    first_and_last_block: bool = False,
) -> bytes:
    """Convert the `delegate_model` of a model, with batch 1 and the shapes of the model's own outputs.

    Args:
        model: from `keras_vit.build`.
        images: some inputs (n, h, w, C).
        all_tokens: compute all tokens of the last block.
        finish: adds what follows the model, and gives a dict of outputs.
        first_and_last_block: leave out all blocks of a Vision Transformer between them.
    """
    class_token = frozenset() if all_tokens else class_token_only(model)
    whole = model if finish is None else finish(model)
    left_out = inner_blocks(model) if first_and_last_block else frozenset()
    network = delegate_model(whole, images, class_token, left_out)
    shapes = {name: tensor.shape for name, tensor in _by_name(whole.output).items()}

    def compute(image):
        outputs = _by_name(network(image, training=False))
        return {name: tf.reshape(output, (1, *shapes[name][1:])) for name, output in outputs.items()}

    image = tf.TensorSpec((1, *network.input_shape[1:]), name="image")
    return with_four_axes(converted(compute, image, network.weights))


def _by_name(outputs: Any) -> Mapping[str, Any]:
    return outputs if isinstance(outputs, dict) else {"logits": outputs}


def converted(function: _Function, image: tf.TensorSpec, weights: Sequence[keras.Variable] = ()) -> bytes:
    """Convert a function from an image to outputs by name; `weights` are the variables that it reads."""
    compute = tf.function(function, autograph=False, input_signature=[image])
    module = tf.Module()
    module.weights = [weight.value for weight in weights]
    with tempfile.TemporaryDirectory() as directory:
        save_module(module, pathlib.Path(directory), {"serving_default": compute.get_concrete_function()})
        return tf.lite.TFLiteConverter.from_saved_model(directory).convert()

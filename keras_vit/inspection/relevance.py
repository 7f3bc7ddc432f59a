"""Gradients of a class's logit with respect to the last feature map, on any backend of Keras."""

import keras
import numpy as np
from keras import ops

from keras_vit.config import ResNetConfig, ViTConfig
from keras_vit.errors import UserError
from keras_vit.layers import weights_will_be_loaded
from keras_vit.models import config_of


class _Shift(keras.layers.Layer):
    """Adds a weight of zeros of the input's own shape, batch included: what it learns is the gradient."""

    def build(self, input_shape):
        self.shift = self.add_weight(name="shift", shape=input_shape, initializer="zeros")

    def call(self, features):
        return features + ops.cast(self.shift, features.dtype)


def classifies(model: keras.Model) -> bool:
    """Whether the model gives one vector of logits for an image."""
    return len(model.output_shape) == 2 and any(layer.name in ("head", "resnet.head.conv2d") for layer in model.layers)


def features_and_gradients(
    model: keras.Model, images: np.ndarray, classes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The last feature map of images, the gradients of the logit of one class each, and all logits.

    Of a ResNet it is the map that is averaged for the head, so that relevance is the class activation map. Of a ViT it
    is what the last block's attention reads: after it, only the class token would have a gradient.

    The gradient is found without the automatic differentiation of any one backend: a weight of zeros is added to the
    map, and one step of plain SGD at learning rate 1 on a copy of the layers behind it leaves there the negative
    gradient of the loss. It is exact; the model stays untouched.

    Args:
        model: built by `keras_vit.build`, with a head that gives one vector of logits.
        images: (B, height, width, channels), inputs of the model.
        classes: (B,), a class for each; None for the likeliest.

    Returns:
        Map and gradients, (B, T, D) of a ViT, class token included, or (B, h, w, C) of a ResNet; logits (B, K).
    """
    if not classifies(model):
        raise UserError(f"Relevance for a class needs a model that classifies images, but {model.name!r} has no head.")
    inputs = _last_feature_map(model)  # what bypasses the map, if anything does, and the map
    with weights_will_be_loaded():
        tail = keras.Model(inputs, model.output)
        copied = keras.models.clone_model(tail)
    copied.set_weights(tail.get_weights())
    copied.trainable = False
    outputs = keras.Model(model.input, [*inputs, model.output])(images)
    *values, logits = (ops.convert_to_numpy(output) for output in outputs)
    classes = logits.argmax(axis=-1) if classes is None else np.asarray(classes)

    shift = _Shift()
    placeholders = [keras.Input(batch_shape=value.shape) for value in values]
    shifted = keras.Model(placeholders, copied([*placeholders[:-1], shift(placeholders[-1])]))
    shifted.compile(
        keras.optimizers.SGD(1.0), loss=lambda chosen, logits: -ops.sum(chosen * logits, axis=-1), run_eagerly=True
    )
    shifted.train_on_batch(values, np.eye(model.output_shape[-1], dtype=np.float32)[classes])
    gradients = ops.convert_to_numpy(shift.shift) * len(images)  # the loss is the mean over the batch
    return values[-1], gradients, logits


def _last_feature_map(model: keras.Model) -> list:
    """Tensors of the model that, together, decide its logits; the feature map is the last of them."""
    config = config_of(model)
    if isinstance(config, ResNetConfig):
        return [model.get_layer("pool").input]
    assert isinstance(config, ViTConfig)
    block = f"Transformer.encoderblock_{config.num_layers - 1}{'.row' if config.axial else ''}"
    norm = model.get_layer(f"{block}.LayerNorm_0")
    return [norm.input, norm.output]

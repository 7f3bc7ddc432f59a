"""Gradients of a class's logit with respect to the last feature map, exact, on the backend of Keras in use."""

import keras
import numpy as np
from keras import ops

from keras_vit.errors import UserError
from keras_vit.inspection.gradients import gradient
from keras_vit.models.build import config_of
from keras_vit.models.config import ResNetConfig, ViTConfig


def classifies(model: keras.Model) -> bool:
    """Whether the model gives one vector of logits for an image."""
    return len(model.output_shape) == 2 and any(layer.name in ("head", "resnet.head.conv2d") for layer in model.layers)


def features_and_gradients(
    model: keras.Model, images: np.ndarray, classes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The last feature map of images, the gradients of the logit of one class each, and all logits.

    Of a ResNet it is the map that is averaged for the head, so that relevance is the class activation map. Of a ViT it
    is what the last block's attention reads: after it, only the class token would have a gradient.

    Everything is computed as in inference: no dropout, no stochastic depth, no batch statistics.

    Args:
        model: built by `keras_vit.build`, with a head that gives one vector of logits.
        images: (B, height, width, channels), inputs of the model.
        classes: (B,), a class for each, from 0; None for the likeliest.

    Returns:
        Map and gradients, (B, T, D) of a ViT, class token included, or (B, h, w, C) of a ResNet; logits (B, K).
        All float32, whatever the model computes in.

    Raises:
        UserError: for a model without a head, images of another shape, or classes that it does not have.
    """
    if not classifies(model):
        raise UserError(f"Relevance for a class needs a model that classifies images, but {model.name!r} has no head.")
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1:] != model.input_shape[1:]:
        expected = ", ".join(map(str, model.input_shape[1:]))
        raise UserError(f"The model takes images of shape (B, {expected}), but these are {images.shape}; resize them.")
    inputs = _last_feature_map(model)  # what bypasses the map, if anything does, and the map
    outputs = keras.Model(model.input, [*inputs, model.output])(images, training=False)
    *bypassing, features, logits = outputs
    features, logits = (ops.convert_to_numpy(ops.cast(output, "float32")) for output in (features, logits))
    classes = logits.argmax(axis=-1) if classes is None else _checked_classes(classes, *logits.shape)
    chosen = np.eye(logits.shape[-1], dtype=np.float32)[classes]  # (B, K)
    tail = keras.Model(inputs, model.output)

    def sum_of_chosen_logits(features):
        # The gradient of the sum is that of each: in inference no image sees another.
        logits = tail([*bypassing, features], training=False)
        return ops.sum(chosen * ops.cast(logits, "float32"))

    return features, gradient(sum_of_chosen_logits, features), logits


def _checked_classes(classes, num_images: int, num_classes: int) -> np.ndarray:
    """Classes (B,) as an array of integers. NumPy would take -1 for the last class."""
    classes = np.asarray(classes)
    if classes.shape != (num_images,) or not np.issubdtype(classes.dtype, np.integer):
        raise UserError(
            f"classes must be an integer for each of the {num_images} images, but is {classes.dtype} of shape "
            f"{classes.shape}."
        )
    outside = classes[(classes < 0) | (classes >= num_classes)]
    if outside.size:
        raise UserError(
            f"The model has {num_classes} classes, numbered 0 to {num_classes - 1}, but classes asks for {outside[0]}."
        )
    return classes


def _last_feature_map(model: keras.Model) -> list:
    """Tensors of the model that, together, decide its logits; the feature map is the last of them."""
    config = config_of(model)
    if isinstance(config, ResNetConfig):
        return [model.get_layer("pool").input]
    assert isinstance(config, ViTConfig)
    block = f"Transformer.encoderblock_{config.num_layers - 1}{'.row' if config.axial else ''}"
    norm = model.get_layer(f"{block}.LayerNorm_0")
    return [norm.input, norm.output]

"""Gradients of a class logit with respect to the last feature map, by the automatic differentiation of the backend.

`keras.ops` has no gradient. Only this module of keras_vit names the backends. It imports the active one on first use.
"""

from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_vit.errors import UserError
from keras_vit.models.build import classifier_head, config_of, logits_model
from keras_vit.models.config import ResNetConfig, ViTConfig
from keras_vit.models.layers import TokenDense


def classifies(model: keras.Model) -> bool:
    """Whether the model outputs one vector of logits per image; the projection of CLIP, without a bias, gives none.

    A head of texts has no bias either, but reads normalized features.
    """
    head, config = classifier_head(model), config_of(model)
    of_texts = isinstance(config, ViTConfig) and config.normalized
    is_projection = isinstance(head, TokenDense) and not head.use_bias and not of_texts
    return len(model.output_shape) == 2 and head is not None and not is_projection


def features_and_gradients(
    model: keras.Model, images: np.ndarray, classes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the last feature map, its gradients for one class per image, and the logits.

    For a ResNet, the feature map is the input of the global pooling, so relevance is the class activation map. For a
    ViT, it is the input of the last attention: after that layer, only the class token has a gradient.

    The model runs in inference mode.

    Args:
        model: a model built by `keras_vit.build` that classifies images.
        images: (B, height, width, channels), preprocessed.
        classes: (B,), class indices. Defaults to the most likely class of each image.

    Returns:
        A tuple `(features, gradients, logits)`, all float32. Features and gradients have shape (B, T, D) for a ViT,
        with the class token, or (B, h, w, C) for a ResNet. Logits have shape (B, K).

    Raises UserError if the model has no head.
    """
    if not classifies(model):
        raise UserError(f"Relevance for a class needs a model that classifies images, but {model.name!r} has no head.")
    model = logits_model(model)
    inputs = _last_feature_map(model)  # tensors that bypass the feature map, and the feature map
    outputs = keras.Model(model.input, [*inputs, model.output])(images, training=False)
    *bypassing, features, logits = outputs
    features, logits = (ops.convert_to_numpy(ops.cast(output, "float32")) for output in (features, logits))
    classes = logits.argmax(axis=-1) if classes is None else classes
    chosen = np.eye(logits.shape[-1], dtype=np.float32)[classes]  # (B, K)
    tail = keras.Model(inputs, model.output)

    def sum_of_chosen_logits(features):
        # Images are independent at inference, so one gradient of the sum gives the gradient of each.
        logits = tail([*bypassing, features], training=False)
        return ops.sum(chosen * ops.cast(logits, "float32"))

    return features, gradient(sum_of_chosen_logits, features), logits


def _last_feature_map(model: keras.Model) -> list:
    """Tensors from which the model computes its logits; the last one is the feature map."""
    config = config_of(model)
    if isinstance(config, ResNetConfig):
        return [model.get_layer("pool").input]
    assert isinstance(config, ViTConfig)
    block = f"Transformer.encoderblock_{config.num_layers - 1}{'.row' if config.axial else ''}"
    norm = model.get_layer(f"{block}.LayerNorm_0")
    return [norm.input, norm.output]


def gradient(function: Callable, point: np.ndarray) -> np.ndarray:
    """Return the gradient of a scalar function at a point, an array of the shape of `point`.

    Args:
        function: maps one tensor to a scalar tensor, with `keras.ops` and layers.
        point: floating point array of any shape.
    """
    tensor = ops.convert_to_tensor(point)
    if keras.backend.backend() == "jax":
        import jax

        return ops.convert_to_numpy(jax.grad(function)(tensor))
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(tensor)
        number = function(tensor)
    return ops.convert_to_numpy(tape.gradient(number, tensor))

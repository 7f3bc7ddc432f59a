"""The model as an artifact needs it: plain convolutions, one dtype, nothing that only training knows."""

import keras
import numpy as np

from keras_vit.layers import StandardizedConv2D, weights_will_be_loaded


def in_dtype(model: keras.Model, dtype: str) -> keras.Model:
    """The model with all weights and all arithmetic in "float32" or "bfloat16"; itself where it is so already.

    A model trained under a mixed policy has float32 weights and loses nothing in float32. Softmax and the statistics
    of the norms stay float32 in any case.
    """
    if all(layer.dtype_policy.name == dtype for layer in model.layers):
        return model
    return _rebuilt(model, dtype, bake=False)


def plain(model: keras.Model, dtype: str = "float32") -> keras.Model:
    """The model in one dtype with its standardised convolutions baked into plain ones, equal to float rounding."""
    if any(isinstance(layer, StandardizedConv2D) for layer in model.layers):
        return _rebuilt(model, dtype, bake=True)
    return in_dtype(model, dtype)


def _rebuilt(model: keras.Model, dtype: str, bake: bool) -> keras.Model:
    """A copy with layers of the same names."""

    def bakes(layer: keras.layers.Layer) -> bool:
        return bake and isinstance(layer, StandardizedConv2D)

    def copied(layer: keras.layers.Layer) -> keras.layers.Layer:
        if bakes(layer):
            return keras.layers.Conv2D(
                layer.filters,
                layer.kernel_size,
                layer.strides,
                layer.padding,
                use_bias=False,
                kernel_initializer="zeros",
                dtype=dtype,
                name=layer.name,
            )
        return type(layer).from_config({**layer.get_config(), "dtype": dtype})

    with weights_will_be_loaded():
        copy = keras.models.clone_model(model, clone_function=copied)
    for layer in model.layers:
        weights = [np.asarray(weight.value) for weight in layer.weights]
        copy.get_layer(layer.name).set_weights([standardized(layer, weights[0])] if bakes(layer) else weights)
    return copy


def standardized(layer: StandardizedConv2D, kernel: np.ndarray) -> np.ndarray:
    """The kernel (h, w, in, out) float32 that the layer convolves with."""
    centred = kernel - kernel.mean(axis=(0, 1, 2), dtype=np.float64)
    deviation = np.sqrt(np.mean(np.square(centred), axis=(0, 1, 2)) + layer.variance_epsilon)
    return (centred / (deviation + layer.deviation_epsilon)).astype(np.float32)

"""Gradients by the automatic differentiation of the Keras backend.

`keras.ops` has no gradient. Only this module of keras_vit names the backends. It imports the active one on first use.
"""

from collections.abc import Callable

import keras
import numpy as np

from keras_vit.errors import UserError


def gradient(function: Callable, point: np.ndarray) -> np.ndarray:
    """Compute the gradient of a scalar function at a point.

    Args:
        function: maps one tensor to a scalar tensor, with `keras.ops` and layers.
        point: floating point array of any shape.

    Returns:
        An array of the same shape as `point`.

    Raises:
        UserError: if the backend is neither TensorFlow nor JAX.
    """
    of_backend = {"tensorflow": _with_tensorflow, "jax": _with_jax}
    backend = keras.backend.backend()
    if backend not in of_backend:
        raise UserError(
            f"Gradients require the Keras backend {' or '.join(of_backend)}, but the backend is {backend}; "
            "set KERAS_BACKEND to one of them."
        )
    return keras.ops.convert_to_numpy(of_backend[backend](function, keras.ops.convert_to_tensor(point)))


def _with_tensorflow(function: Callable, point):
    import tensorflow as tf

    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(point)
        number = function(point)
    return tape.gradient(number, point)


def _with_jax(function: Callable, point):
    import jax

    return jax.grad(function)(point)

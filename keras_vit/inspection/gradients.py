"""The gradient of a number with respect to an array, by the automatic differentiation of Keras' backend.

`keras.ops` has no gradient. This is the one module of keras_vit that names the backends, and it imports the one in use
only when a gradient is asked for.
"""

from collections.abc import Callable

import keras
import numpy as np

from keras_vit.errors import UserError


def gradient(function: Callable, point: np.ndarray) -> np.ndarray:
    """The gradient of a function at a point.

    Args:
        function: of one tensor; gives a tensor that holds one number. Written on `keras.ops` and layers.
        point: where; floating point numbers of any shape.

    Returns:
        Of the shape of `point`.

    Raises:
        UserError: on a backend without a gradient here.
    """
    of_backend = {"tensorflow": _with_tensorflow, "jax": _with_jax}
    backend = keras.backend.backend()
    if backend not in of_backend:
        raise UserError(
            f"Gradients are computed on the backends {' and '.join(of_backend)} of Keras, but this is {backend}; "
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

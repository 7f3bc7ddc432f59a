"""Bipartite matching inside of a training step: on the host, with SciPy, whatever the backend.

On TensorFlow by `tf.numpy_function`, which XLA cannot compile; on JAX by `jax.pure_callback`. It has no gradient.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_vit.models.matching import matched_queries


def matched_in_step(costs, labels):
    """The query of each target: (B, T) int32, -1 for none.

    Args:
        costs: (B, Q, T), such as those of `mask_costs`.
        labels: (B, T) classes, -1 for no target.
    """
    costs, labels = ops.stop_gradient(ops.cast(costs, "float32")), ops.cast(labels, "int32")
    if keras.backend.backend() == "jax":
        import jax

        shape = jax.ShapeDtypeStruct(labels.shape, np.int32)
        return jax.pure_callback(_matched, shape, costs, labels)
    return tf.ensure_shape(tf.numpy_function(_matched, [costs, labels], tf.int32), labels.shape)


def _matched(costs, labels) -> np.ndarray:
    return matched_queries(np.asarray(costs), np.asarray(labels) >= 0)

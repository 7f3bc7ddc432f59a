"""Objectives whose targets are masks or boxes, matched with predictions inside of a training step.

The matching is on the host, with SciPy, whatever the backend: on TensorFlow by `tf.numpy_function`, which XLA cannot
compile; on JAX by `jax.pure_callback`. It has no gradient.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_vit.models.losses import matched_queries
from training.objectives.objective import Objective


class DenseObjective(Objective):
    """Masks or boxes, from targets {"labels": (B, T), -1 for none, ...}."""

    matches_on_host = True
    without_remat = "Training with masks or boxes"
    uncounted = ("the queries, and the heads of masks or boxes",)

    def whole_batch(self, targets, weights, total):
        """Return targets with "num_targets" (B,), their mean number in an image of the complete batch.

        It divides the losses of all replicas and micro-batches, which thus are those of the batch as a whole.
        """
        present = ops.sum(ops.cast(targets["labels"] >= 0, "float32"))
        counts = total(ops.stack([present, ops.sum(weights)]))
        mean = ops.maximum(counts[0], 1.0) / ops.maximum(counts[1], 1.0)
        return {**targets, "num_targets": ops.broadcast_to(mean, targets["labels"].shape[:1])}


def matched_in_step(costs, labels):
    """Return the query of each target: (B, T) int32, -1 for none.

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

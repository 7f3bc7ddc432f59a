"""The interface between a technique of training and the training step, and the usual one: classification."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from training.recipes.recipe import Loss

Decay = float | Callable | None


class Objective:
    """Minimized by training: it prepares the model, computes outputs and loss of a step, and acts after the step.

    Attributes:
        metrics: names of the loss and of one more metric, if there is one.
        metric_dtype: of the sum of that metric, "int32" for counts.
        matches_on_host: whether the loss matches targets on the host, which XLA cannot compile on TensorFlow.
        without_remat: the technique, as a sentence begins, if it cannot be rematerialized.
        uncounted: what the dry run does not count, as it prints it.
        constants: variables that the loss reads, beside those of the network.
        random: seeds of a step beside those of the network's layers, another value for each replica and micro-batch.
    """

    metrics: tuple[str, ...] = ("loss", "accuracy")
    metric_dtype = "int32"
    matches_on_host = False
    without_remat = ""
    uncounted: tuple[str, ...] = ()
    constants: Sequence[keras.Variable] = ()
    random: Sequence[keras.Variable] = ()

    def prepare(self, model: keras.Model) -> keras.Model:
        """Return the model to train, under the strategy of `model`, and open what the loss needs beside it."""
        return model

    def forwards(
        self, network: keras.Model, trained: Callable, step: keras.Variable, averages: Sequence[keras.Variable]
    ) -> list[Callable]:
        """Return what a training step may compute: (images, training) -> outputs for `measure`.

        Args:
            network: prepared; all alternatives share its weights.
            trained: the same network, perhaps with faster kernels.
            step: training steps done.
            averages: moving averages of the trainable variables, if there are any.
        """
        return [trained]

    def choice(self) -> Any:
        """Return which of several `forwards` this step computes, int32."""
        raise NotImplementedError

    def whole_batch(self, targets: Any, weights: Any, total: Callable) -> Any:
        """Return the targets with what depends on the complete batch. total: sums a tensor over the replicas."""
        return targets

    def measure(self, images: Any, labels: Any, outputs: Any, weights: Any) -> tuple:
        """Return the weighted loss of each image (B,), and the sums of loss, second metric and weights.

        weights: (B,), 1 for images and 0 for what fills a batch. Both metrics are divided by the sum of weights.
        """
        raise NotImplementedError

    def evaluation(self) -> "Objective":
        """Return the objective whose metrics are those of the evaluation."""
        return self

    def averaging(self, decay: float | None) -> Decay:
        """Return the decay of the moving average, or a function of the step."""
        return decay

    def after_step(self, step: Any) -> None:
        """Assign variables of the network that follow from the number of steps done."""


def averaged(network: keras.Model, averages: Sequence[keras.Variable]) -> keras.StatelessScope:
    """Return a scope in which a network computes with the averages of its trainable weights."""
    # The others, too, because in the scope they would not have their values of the step.
    others = [(variable, variable.value) for variable in network.non_trainable_variables]
    return keras.StatelessScope([*zip(network.trainable_variables, averages, strict=True), *others])


def sums_of(losses: Any, metric: Any, weights: Any) -> tuple:
    """Return the weighted losses (B,) and the sums of loss, metric and weights."""
    return weights * losses, [ops.sum(x) for x in (weights * losses, weights * metric, weights)]


def is_right(logits: Any, labels: Any) -> Any:
    """Return 1.0 where the most likely class (B, K) is that of the label (B, K), else 0.0: (B,)."""
    return ops.cast(ops.argmax(logits, axis=-1) == ops.argmax(labels, axis=-1), "float32")


class Classification(Objective):
    """Classes of each image, from logits (B, K).

    Args:
        loss: "softmax" cross-entropy, or "sigmoid" cross-entropy summed over the classes. "multi-label" is the same
            for images of several classes: its metric is the share of classes for which the model is right with the
            threshold 0.5, the binary accuracy of Keras.
        label_smoothing: probability mass taken from the label and spread over all classes.
        class_weights: factor (K,) of the loss of an image of each class in training, as `class_weight` of Keras' `fit`;
            an image of two mixed ones has their mean. The accuracy counts all images alike.
    """

    def __init__(self, loss: Loss = "softmax", label_smoothing: float = 0.0, class_weights: np.ndarray | None = None):
        self._loss, self._label_smoothing, self._class_weights = loss, label_smoothing, class_weights
        if loss == "multi-label":
            self.metrics, self.metric_dtype = ("loss", "binary_accuracy"), "float32"  # shares, not counts

    def evaluation(self):
        return Classification(self._loss, self._label_smoothing)

    def measure(self, images, labels, outputs, weights):
        logits = ops.cast(outputs, "float32")
        if self._loss == "softmax":
            losses = keras.losses.categorical_crossentropy(labels, logits, True, self._label_smoothing)
        else:
            smooth = labels * (1.0 - self._label_smoothing) + self._label_smoothing / labels.shape[-1]
            losses = ops.sum(ops.binary_crossentropy(smooth, logits, from_logits=True), axis=-1)
        if self._class_weights is not None:
            losses = losses * ops.sum(ops.cast(labels, "float32") * self._class_weights, axis=-1)
        if self._loss == "multi-label":
            right = ops.mean(ops.cast((logits > 0.0) == (labels > 0.5), "float32"), axis=-1)
        else:
            right = is_right(logits, labels)
        return sums_of(losses, right, weights)

"""Classification: cross-entropy of the classes of each image."""

import keras
import numpy as np
from keras import ops

from training.objectives.objective import Objective, is_right, sums_of
from training.recipes.recipe import Loss


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

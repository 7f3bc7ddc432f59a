"""Pseudo-labels of a moving average: a model learns from labeled images, and the average's classes of other images.

"Semi-supervised Vision Transformers at Scale" (Semi-ViT, arXiv 2208.05688), sections 3.2 and 3.3, and its code
(amazon-science/semi-vit engine_semi.py, ProbPseudoMixup). With 1% and 10% of the labels of
ImageNet, its ViT-B reaches 71.0% and 79.7%. Of the code's two mixtures, MixUp is here and CutMix is not.
"""

from typing import Any

import keras
from keras import ops

from training.objectives.objective import Objective, averaged, is_right, sums_of
from training.recipes.recipe import PseudoLabelRecipe


class PseudoLabels(Objective):
    """Cross-entropy of the labeled images, plus the weighted one of images whose pseudo-label is sure enough.

    As in the code of Semi-ViT, the mean is over all without a label, so that those below the confidence count as 0. The
    accuracy is that of the labeled images.
    """

    without_remat = "Images without labels"

    def __init__(self, recipe: PseudoLabelRecipe):
        self._recipe = recipe

    def forwards(self, network, trained, step, averages):
        """Return average and model on a batch: (labeled, weak, strong) images -> a dict.

        Labeled images (B, h, w, C), weakly and strongly changed others (B, n, h, w, C). "labeled" (B, K) are the
        model's logits; of the strong ones, mixed in pairs, "mixed" (B, n, K) are the logits, "targets" (B, n, K)
        the pseudo-labels and "confidence" (B, n) the larger probability of the pair.
        """

        def outputs(images, training):
            labeled, weak, strong = images
            rows, per_image = labeled.shape[0], weak.shape[1]
            with averaged(network, averages):
                logits = trained(_flat(weak), training=False)
            probabilities = ops.stop_gradient(ops.softmax(ops.cast(logits, "float32")))
            mixed, targets, confidence = probabilistic_mixup(_flat(strong), probabilities)
            logits = trained(ops.concatenate([labeled, mixed], axis=0), training=training)
            return {
                "labeled": logits[:rows],
                "mixed": ops.reshape(logits[rows:], (rows, per_image, -1)),
                "targets": ops.reshape(targets, (rows, per_image, -1)),
                "confidence": ops.reshape(confidence, (rows, per_image)),
            }

        return [outputs]

    def measure(self, images, labels, outputs, weights):
        """As `Objective.measure`; in evaluation, from logits (B, K), the cross-entropy alone."""
        recipe, is_training = self._recipe, isinstance(outputs, dict)
        logits = ops.cast(outputs["labeled"] if is_training else outputs, "float32")
        losses = keras.losses.categorical_crossentropy(labels, logits, True, recipe.label_smoothing)
        if is_training:
            mixed = ops.cast(outputs["mixed"], "float32")
            of_mixed = keras.losses.categorical_crossentropy(outputs["targets"], mixed, True, recipe.label_smoothing)
            sure = ops.cast(outputs["confidence"] >= recipe.confidence, "float32")
            losses += recipe.unlabelled_weight * ops.mean(sure * of_mixed, axis=-1)
        return sums_of(losses, is_right(logits, labels), weights)


def probabilistic_mixup(images: Any, probabilities: Any) -> tuple:
    """Mix each image (N, h, w, C) with the one at its place from the end, by how sure their pseudo-labels (N, K) are.

    The share of an image is p / (p + q), with its probability p and the other's q, so an unsure one hardly changes a
    sure one. The batch is shuffled, so any fixed order of partners is a random one.

    Returns: images (N, h, w, C), targets (N, K) that sum to 1, and confidence (N,), that of the surer one.
    """
    classes = ops.one_hot(ops.argmax(probabilities, axis=-1), probabilities.shape[-1])
    own = ops.max(probabilities, axis=-1)
    other = ops.flip(own, 0)
    share = own / (own + other)
    targets = share[:, None] * classes + (1.0 - share[:, None]) * ops.flip(classes, 0)
    of_pixels = ops.cast(share[:, None, None, None], images.dtype)
    mixed = of_pixels * images + (1.0 - of_pixels) * ops.flip(images, 0)
    return mixed, targets, ops.maximum(own, other)


def _flat(images):
    """(B, n, h, w, C) -> (B * n, h, w, C)."""
    return ops.reshape(images, (-1, *images.shape[2:]))

"""Training of segmentation: the loss of matched masks after each masked block, annealed mask attention, and the loss
of classes of pixels.

EoMT ("Your ViT is Secretly an Image Segmentation Model", arXiv 2503.19108) and its code (tue-mps/eomt, `training/`).
"""

from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_vit import task_of
from keras_vit.models.config import SegmentationConfig
from keras_vit.models.layers import CHANNELS_LAST
from keras_vit.models.losses import (
    SegmentationWeights,
    mask_costs,
    matched_masks,
    segmentation_sums,
    uncertain_points,
)
from training.techniques.matching import matched_in_step

# Of the decay of each block's probability (tue-mps/eomt, `mask_annealing`).
_POWER = 0.9
# Points at which EoMT compares each mask. Masks of a small picture have fewer places, and more points cost most of the
# time of a step there.
_POINTS = 12_544


class MaskSetPrediction:
    """Classes and masks of queries, from the outputs of `segmentation_model` or `block_predictions`.

    The loss is that of Mask2Former (arXiv 2112.01527): targets are matched with queries, at random points; the class,
    and the masks at points where they are uncertain. With the predictions before masked blocks, theirs are added.

    Args:
        num_points: points of each mask; default those of EoMT, or as many as a mask has places if these are fewer.
    """

    metrics = ("loss",)
    metric_dtype = "int32"

    def __init__(self, num_points: int | None = None):
        self._num_points, self._weights = num_points, SegmentationWeights()
        self.seed_generator = keras.random.SeedGenerator(0)
        """Of the points; the trainer sets it in each step."""

    def measure(self, images, targets, outputs, weights) -> tuple:
        """Return the weighted loss of each example (B,) and the sums of loss, nothing and weights.

        targets: "labels" (B, T), -1 for none; "segments" (B, H, W), the number of the target of each pixel; and
        "num_targets" (B,), their mean number in an image of the complete batch.
        """
        numbers = ops.arange(targets["labels"].shape[1], dtype="int32")[None, :, None, None]
        masks = ops.cast(targets["segments"][:, None] == numbers, "float32")  # (B, T, H, W)
        in_training = "final" in outputs
        predictions = list(outputs.values()) if in_training else [outputs]
        losses = sum(self._losses(prediction, targets, masks, in_training) for prediction in predictions)
        losses = weights * losses
        return losses, [ops.sum(losses), ops.sum(0.0 * losses), ops.sum(weights)]

    def _losses(self, prediction, targets, masks, in_training: bool):
        """Of each example (B,), divided by the mean number of targets, so that their mean is that of the batch."""
        seed = self.seed_generator if in_training else 0
        class_logits, mask_logits = (ops.cast(prediction[name], "float32") for name in ("class_logits", "mask_logits"))
        labels, weights = targets["labels"], self._weights
        num_points = self._num_points or min(_POINTS, mask_logits.shape[1] * mask_logits.shape[2])
        # The same for all images, so that evaluation does not depend on the size of its batches.
        points = keras.random.uniform((num_points, 2), dtype="float32", seed=seed)
        costs = mask_costs(class_logits, mask_logits, labels, masks, points, weights)
        matched = matched_in_step(costs, labels)
        if in_training:
            logits = ops.stop_gradient(matched_masks(mask_logits, matched))
            points = uncertain_points(logits, num_points, seed)
        sums = segmentation_sums(class_logits, mask_logits, labels, masks, matched, points, weights)
        num_targets, num_queries = targets["num_targets"], class_logits.shape[1]
        importance = num_targets + weights.no_object * (num_queries - num_targets)
        return (
            weights.cross_entropy * sums["cross_entropy"] / importance
            + (weights.mask * sums["mask"] + weights.dice * sums["dice"]) / num_targets
        )


class PixelClasses:
    """The class of each pixel, from "pixel_logits" (B, h, w, K), which are resized to the targets."""

    metrics = ("loss", "accuracy")
    metric_dtype = "float32"

    def measure(self, images, targets, outputs, weights) -> tuple:
        """As `MaskSetPrediction.measure`; the second sum is that of the shares of right pixels."""
        labels, segments = targets["labels"], targets["segments"]
        logits = ops.image.resize(
            ops.cast(outputs["pixel_logits"], "float32"),
            segments.shape[1:],
            interpolation="bilinear",
            data_format=CHANNELS_LAST,
        )
        inside = segments >= 0
        flat = ops.reshape(ops.maximum(segments, 0), (-1, segments.shape[1] * segments.shape[2]))
        classes = ops.reshape(ops.take_along_axis(labels, flat, axis=1), (-1, *segments.shape[1:]))
        counted = ops.cast(ops.logical_and(inside, classes >= 0), "float32")
        surprise = keras.losses.sparse_categorical_crossentropy(ops.maximum(classes, 0), logits, from_logits=True)
        right = ops.cast(ops.cast(ops.argmax(logits, axis=-1), "int32") == classes, "float32")
        pixels = ops.maximum(ops.sum(counted, axis=(1, 2)), 1.0)
        losses, accuracy = (weights * ops.sum(counted * x, axis=(1, 2)) / pixels for x in (surprise, right))
        return losses, [ops.sum(losses), ops.sum(accuracy), ops.sum(weights)]


def mask_annealing(model: keras.Model, num_steps: int) -> Callable | None:
    """A function that sets the probabilities of mask attention after a number of steps; None for a model without.

    Of n blocks, block i falls from 1 to 0 between (i + 1) / (n + 2) and (i + 2) / (n + 2) of the run, by a power of
    0.9, as in the configurations of EoMT.
    """
    task = task_of(model)
    if not isinstance(task, SegmentationConfig) or not task.mask_attention:
        return None
    starts = np.array([(block + 1) / (task.num_blocks + 2) for block in range(task.num_blocks)], np.float32)

    probabilities = model.get_layer("mask_attention").probabilities

    def anneal(step) -> None:
        progress = (ops.cast(step, "float32") / num_steps - starts) * (task.num_blocks + 2)
        probabilities.assign(ops.power(1.0 - ops.clip(progress, 0.0, 1.0), _POWER))

    return anneal

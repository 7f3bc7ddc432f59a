"""Masks and boxes, matched with predictions inside of a training step.

The matching is on the host, with SciPy, whatever the backend: on TensorFlow by `tf.numpy_function`, which XLA cannot
compile; on JAX by `jax.pure_callback`. It has no gradient.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_vit import task_of
from keras_vit.models import matching_losses
from keras_vit.models.config import SegmentationConfig
from keras_vit.models.detection import box_iou, to_corners
from keras_vit.models.layers import CHANNELS_LAST
from keras_vit.models.segmentation import block_predictions
from training.objectives.objective import Objective

# Of the decay of each block's probability (tue-mps/eomt, `mask_annealing`).
_POWER = 0.9
# Points at which EoMT compares each mask. Masks of a small image have fewer places, and more points cost most of the
# time of a step there.
_POINTS = 12_544


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
    """Return the query of each target, (B, T) int32, by costs (B, Q, T) and labels (B, T), all -1 for none."""
    costs, labels = ops.stop_gradient(ops.cast(costs, "float32")), ops.cast(labels, "int32")
    if keras.backend.backend() == "jax":
        import jax

        shape = jax.ShapeDtypeStruct(labels.shape, np.int32)
        return jax.pure_callback(_matched, shape, costs, labels)
    return tf.ensure_shape(tf.numpy_function(_matched, [costs, labels], tf.int32), labels.shape)


def _matched(costs, labels) -> np.ndarray:
    return matching_losses.matched_queries(np.asarray(costs), np.asarray(labels) >= 0)


class MaskSetPrediction(DenseObjective):
    """Classes and masks of queries, from the outputs of `segmentation_model` or `block_predictions`.

    EoMT ("Your ViT is Secretly an Image Segmentation Model", arXiv 2503.19108) and its code (tue-mps/eomt, `training/`)
    with the loss of Mask2Former (arXiv 2112.01527): targets are matched with queries, at random points; the class, and
    the masks at points where they are uncertain. With the predictions before masked blocks, theirs are added.

    Args:
        num_points: points of each mask; default those of EoMT, or as many as a mask has places if these are fewer.
        num_steps: of the run, for the annealing of mask attention.
    """

    metrics = ("loss",)

    def __init__(self, num_points: int | None = None, num_steps: int = 1):
        self._num_points, self._num_steps = num_points, num_steps

    def prepare(self, model):
        self._seeds = keras.random.SeedGenerator(0)  # of the points
        self.random = [self._seeds.state]
        task = task_of(model)
        self._blocks, self._probabilities = 0, None
        if isinstance(task, SegmentationConfig) and task.mask_attention:
            self._blocks = task.num_blocks
            self._probabilities = model.get_layer("mask_attention").probabilities
        return model

    def forwards(self, network, trained, step, averages):
        return [block_predictions(trained)]

    def after_step(self, step):
        """Set the probabilities of mask attention, if the model has it.

        Of n blocks, block i falls from 1 to 0 between (i + 1) / (n + 2) and (i + 2) / (n + 2) of the run, by a power
        of 0.9, as in the configurations of EoMT.
        """
        if self._probabilities is None:
            return
        starts = np.array([(block + 1) / (self._blocks + 2) for block in range(self._blocks)], np.float32)
        progress = (ops.cast(step, "float32") / self._num_steps - starts) * (self._blocks + 2)
        self._probabilities.assign(ops.power(1.0 - ops.clip(progress, 0.0, 1.0), _POWER))

    def measure(self, images, targets, outputs, weights):
        """As `Objective.measure`; targets have "segments" (B, H, W), too, the number of the target of each pixel."""
        numbers = ops.arange(targets["labels"].shape[1], dtype="int32")[None, :, None, None]
        masks = ops.cast(targets["segments"][:, None] == numbers, "float32")  # (B, T, H, W)
        in_training = "final" in outputs
        predictions = list(outputs.values()) if in_training else [outputs]
        losses = weights * sum(self._losses(prediction, targets, masks, in_training) for prediction in predictions)
        return losses, [ops.sum(losses), ops.sum(0.0 * losses), ops.sum(weights)]

    def _losses(self, prediction, targets, masks, in_training: bool):
        """Return the losses (B,), divided by the mean number of targets: their mean is that of the batch."""
        seed = self._seeds if in_training else 0
        class_logits, mask_logits = (ops.cast(prediction[name], "float32") for name in ("class_logits", "mask_logits"))
        labels, weights = targets["labels"], matching_losses.SEGMENTATION_WEIGHTS
        num_points = self._num_points or min(_POINTS, mask_logits.shape[1] * mask_logits.shape[2])
        # The same for all images, so that evaluation does not depend on the size of its batches.
        points = keras.random.uniform((num_points, 2), dtype="float32", seed=seed)
        costs = matching_losses.mask_costs(class_logits, mask_logits, labels, masks, points)
        matched = matched_in_step(costs, labels)
        if in_training:
            logits = ops.stop_gradient(matching_losses.matched_masks(mask_logits, matched))
            points = matching_losses.uncertain_points(logits, num_points, seed)
        sums = matching_losses.segmentation_sums(class_logits, mask_logits, labels, masks, matched, points)
        num_targets, num_queries = targets["num_targets"], class_logits.shape[1]
        importance = num_targets + matching_losses.NO_OBJECT_WEIGHT * (num_queries - num_targets)
        return (
            weights["cross_entropy"] * sums["cross_entropy"] / importance
            + (weights["mask"] * sums["mask"] + weights["dice"] * sums["dice"]) / num_targets
        )


class PixelClasses(DenseObjective):
    """The class of each pixel, from "pixel_logits" (B, h, w, K), which are resized to the targets."""

    metric_dtype = "float32"

    def measure(self, images, targets, outputs, weights):
        """As `MaskSetPrediction.measure`; the accuracy is the mean share of right pixels of an image."""
        labels, segments = targets["labels"], targets["segments"]
        logits = ops.cast(outputs["pixel_logits"], "float32")
        logits = ops.image.resize(logits, segments.shape[1:], interpolation="bilinear", data_format=CHANNELS_LAST)
        inside = segments >= 0
        flat = ops.reshape(ops.maximum(segments, 0), (-1, segments.shape[1] * segments.shape[2]))
        classes = ops.reshape(ops.take_along_axis(labels, flat, axis=1), (-1, *segments.shape[1:]))
        counted = ops.cast(ops.logical_and(inside, classes >= 0), "float32")
        surprise = keras.losses.sparse_categorical_crossentropy(ops.maximum(classes, 0), logits, from_logits=True)
        right = ops.cast(ops.cast(ops.argmax(logits, axis=-1), "int32") == classes, "float32")
        pixels = ops.maximum(ops.sum(counted, axis=(1, 2)), 1.0)
        losses, accuracy = (weights * ops.sum(counted * x, axis=(1, 2)) / pixels for x in (surprise, right))
        return losses, [ops.sum(losses), ops.sum(accuracy), ops.sum(weights)]


class BoxSetPrediction(DenseObjective):
    """The boxes of each image, from "class_logits" (B, N, K) and "boxes" (B, N, 4).

    The loss is that of Deformable DETR, after bipartite matching: the weighted sum of focal loss, L1 distance and
    generalized IoU, divided by the number of boxes in the batch. The metric is the overlap (IoU) of boxes and the
    predictions that are matched to them, averaged over the boxes of an image; of an image without boxes it is 1.
    """

    metrics = ("loss", "iou")
    metric_dtype = "float32"

    def measure(self, images, targets, outputs, weights):
        """As `Objective.measure`, also with "boxes" (B, T, 4) in targets."""
        logits, boxes = ops.cast(outputs["class_logits"], "float32"), ops.cast(outputs["boxes"], "float32")
        labels, wanted = targets["labels"], targets["boxes"]
        matched = matched_in_step(matching_losses.box_costs(logits, boxes, labels, wanted), labels)
        sums = matching_losses.detection_sums(logits, boxes, labels, wanted, matched)
        total = sum(matching_losses.DETECTION_WEIGHTS[name] * of_images for name, of_images in sums.items())
        losses = weights * total / targets["num_targets"]
        counts = ops.sum(ops.cast(labels >= 0, "float32"), axis=1)  # (B,)
        chosen = ops.take_along_axis(boxes, ops.maximum(matched, 0)[..., None], axis=1)  # (B, T, 4)
        ious = box_iou(to_corners(chosen), to_corners(wanted))[0] * ops.cast(matched >= 0, "float32")
        iou = ops.where(counts > 0.0, ops.sum(ious, axis=1) / ops.maximum(counts, 1.0), 1.0)
        return losses, [ops.sum(losses), ops.sum(weights * iou), ops.sum(weights)]

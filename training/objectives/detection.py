"""The objective of training a detector: bipartite matching, focal loss, L1 distance and generalised IoU."""

from keras import ops

from keras_vit.models.detection import overlaps, to_corners
from keras_vit.models.losses import DetectionWeights, box_costs, detection_sums
from training.objectives.dense import DenseObjective, matched_in_step
from training.recipes.dense import DetectRecipe

_WEIGHTS = DetectionWeights()


class BoxSetPrediction(DenseObjective):
    """The boxes of each picture, from "class_logits" (B, N, K) and "boxes" (B, N, 4).

    The loss is that of Deformable DETR: the weighted sum of its parts, divided by the number of boxes in the batch. The
    metric is the overlap (IoU) of boxes and the predictions that are matched to them, averaged over the boxes of a
    picture; of a picture without boxes it is 1.
    """

    metrics = ("loss", "iou")
    metric_dtype = "float32"

    @classmethod
    def of(cls, recipe, num_steps):
        return cls() if isinstance(recipe, DetectRecipe) else None

    def measure(self, images, targets, outputs, weights):
        """As `Objective.measure`. targets: {"labels": (B, T), "boxes": (B, T, 4), "num_targets": (B,)}."""
        logits, boxes = ops.cast(outputs["class_logits"], "float32"), ops.cast(outputs["boxes"], "float32")
        labels, wanted = targets["labels"], targets["boxes"]
        matched = matched_in_step(box_costs(logits, boxes, labels, wanted, _WEIGHTS), labels)
        sums = detection_sums(logits, boxes, labels, wanted, matched)
        total = sum(getattr(_WEIGHTS, name) * of_images for name, of_images in sums.items())
        losses = weights * total / targets["num_targets"]
        counts = ops.sum(ops.cast(labels >= 0, "float32"), axis=1)  # (B,)
        chosen = ops.take_along_axis(boxes, ops.maximum(matched, 0)[..., None], axis=1)  # (B, T, 4)
        ious = overlaps(to_corners(chosen), to_corners(wanted))[0] * ops.cast(matched >= 0, "float32")
        iou = ops.where(counts > 0.0, ops.sum(ious, axis=1) / ops.maximum(counts, 1.0), 1.0)
        return losses, [ops.sum(losses), ops.sum(weights * iou), ops.sum(weights)]

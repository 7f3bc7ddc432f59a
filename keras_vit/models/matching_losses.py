"""The losses of segmentation and detection after bipartite matching, on keras.ops.

Segmentation: transformers' `EomtLoss`, which is that of Mask2Former (arXiv 2112.01527). Detection: transformers'
`DeformableDetrImageLoss` (arXiv 2010.04159). Targets are padded to one number T for each image of a batch: a label of
-1 fills it. Matching runs on the host (`matched_queries`) and has no gradient.

Axes: B batch, Q queries or patches, T targets, K classes, P points.
"""

import keras
import numpy as np
from keras import ops
from scipy.optimize import linear_sum_assignment

from keras_vit.models.detection import box_iou, to_corners

# Points that are drawn for each one of PointRend, and the share of these that is taken where masks are least certain.
_OVERSAMPLE, _UNCERTAIN = 3, 0.75
# Added before a logarithm in the matching cost of the original.
_LOG_EPSILON = 1e-8
# Weights of the parts of cost and loss as EoMT was trained, and of queries without a target in the cross-entropy.
SEGMENTATION_WEIGHTS = {"cross_entropy": 2.0, "mask": 5.0, "dice": 5.0}
NO_OBJECT_WEIGHT = 0.1
# The same as Deformable DETR was trained: of the focal loss, the L1 distance and the generalized IoU.
DETECTION_WEIGHTS = {"classes": 2.0, "boxes": 5.0, "overlap": 2.0}


def sampled(masks, points):
    """Masks (..., h, w) at points, x and y in [0, 1], bilinearly between pixels and 0 outside: (..., P).

    points: (..., P, 2), or (P, 2), the same for all masks.

    As torch's grid_sample(align_corners=False): the center of the first pixel is at half a pixel.
    """
    (rows, columns), shared = masks.shape[-2:], len(points.shape) == 2
    places = points * ops.convert_to_tensor([columns, rows], points.dtype) - 0.5
    first = ops.floor(places)
    shares = places - first  # (..., P, 2)
    x, y = (ops.cast(first[..., axis], "int32") for axis in (0, 1))
    flat = ops.reshape(masks, (*_shape(masks)[:-2], rows * columns))
    total = 0.0
    for right in (0, 1):
        for below in (0, 1):
            weight = ops.abs(1 - right - shares[..., 0]) * ops.abs(1 - below - shares[..., 1])
            column, row = x + right, y + below
            inside = (column >= 0) & (column < columns) & (row >= 0) & (row < rows)
            index = ops.clip(row, 0, rows - 1) * columns + ops.clip(column, 0, columns - 1)
            value = ops.take(flat, index, axis=-1) if shared else ops.take_along_axis(flat, index, axis=-1)
            total = total + ops.where(inside, weight * value, 0.0)
    return total


def _shape(tensor) -> tuple:
    dynamic = ops.shape(tensor)
    return tuple(dynamic[axis] if side is None else side for axis, side in enumerate(tensor.shape))


def matched_queries(costs: np.ndarray, present: np.ndarray) -> np.ndarray:
    """The query of each target by bipartite matching on the host, as in DETR (arXiv 2005.12872).

    The sum of the costs is least; each query has at most one target.

    Args:
        costs: (B, Q, T), of every query for every target. A cost that is not finite is chosen last.
        present: (B, T), whether there is such a target, or it only fills the batch.

    Returns:
        (B, T) int32: the number of the query; -1 for a target that is not present, or for which no query is left.
    """
    costs, present = np.asarray(costs, np.float64), np.asarray(present, bool)
    worst = float(np.finfo(np.float32).max)
    matched = np.full(present.shape, -1, np.int32)
    for cost, targets, row in zip(costs, present, matched, strict=True):
        numbers = np.flatnonzero(targets)
        queries, columns = linear_sum_assignment(np.nan_to_num(cost[:, numbers], nan=worst, posinf=worst, neginf=worst))
        row[numbers[columns]] = queries
    return matched


def match_masks(class_logits, mask_logits, labels, masks, points) -> np.ndarray:
    """The query of each target mask: (B, T) int32, -1 for none. Runs on the host; see `mask_costs`."""
    costs = mask_costs(class_logits, mask_logits, labels, masks, points)
    return matched_queries(ops.convert_to_numpy(costs), np.asarray(labels) >= 0)


def mask_costs(class_logits, mask_logits, labels, masks, points):
    """The cost of each query for each target mask: (B, Q, T).

    Args:
        class_logits: (B, Q, K + 1).
        mask_logits: (B, h, w, Q).
        labels: (B, T) classes, -1 for no target.
        masks: (B, T, H, W), 1 inside, of any size.
        points: (P, 2) or (B, P, 2), x and y in [0, 1], at which the masks are compared.
    """
    logits = _at_points(ops.transpose(mask_logits, (0, 3, 1, 2)), points)  # (B, Q, P)
    targets = _at_points(ops.cast(masks, "float32"), points)  # (B, T, P)
    probabilities = ops.softmax(ops.cast(class_logits, "float32"), axis=-1)
    class_cost = -ops.take_along_axis(probabilities, _present(labels)[:, None], axis=-1)
    targets_last = ops.transpose(targets, (0, 2, 1))  # (B, P, T)
    num_points = logits.shape[-1]
    positive, negative = ops.softplus(-logits) / num_points, ops.softplus(logits) / num_points
    mask_cost = ops.matmul(positive, targets_last) + ops.matmul(negative, 1.0 - targets_last)
    inside = ops.sigmoid(logits)
    sizes = ops.sum(inside, axis=-1)[..., None] + ops.sum(targets, axis=-1)[:, None]
    dice_cost = 1.0 - (2.0 * ops.matmul(inside, targets_last) + 1.0) / (sizes + 1.0)
    weights = SEGMENTATION_WEIGHTS
    return weights["cross_entropy"] * class_cost + weights["mask"] * mask_cost + weights["dice"] * dice_cost


def _present(labels):
    """Labels (B, T) with 0 for -1: the classes whose probabilities are read."""
    return ops.maximum(ops.convert_to_tensor(labels, "int32"), 0)


def _at_points(masks, points):
    """Masks (B, M, h, w) at points (P, 2), (B, P, 2) or (B, M, P, 2): (B, M, P)."""
    points = ops.cast(ops.convert_to_tensor(points), "float32")
    if len(points.shape) == 3:
        points = ops.broadcast_to(points[:, None], (*_shape(masks)[:2], *points.shape[-2:]))
    return sampled(ops.cast(masks, "float32"), points)


def uncertain_points(mask_logits, count: int, seed):
    """Random points, most of them where a mask is least certain, as in PointRend (arXiv 1912.08193).

    Args:
        mask_logits: (B, T, h, w), of the matched queries.
        count: P, 12,544 in EoMT.
        seed: an integer or a keras.random.SeedGenerator.

    Returns:
        (B, T, P, 2), x and y in [0, 1], without a gradient.
    """
    leading, num_uncertain = _shape(mask_logits)[:2], int(_UNCERTAIN * count)
    drawn = keras.random.uniform((*leading, count * _OVERSAMPLE, 2), dtype="float32", seed=seed)
    certainty = ops.abs(sampled(ops.cast(mask_logits, "float32"), drawn))
    _, least = ops.top_k(-certainty, num_uncertain)
    chosen = ops.take_along_axis(drawn, ops.cast(least, "int32")[..., None], axis=2)
    anywhere = keras.random.uniform(
        (*leading, count - num_uncertain, 2), dtype="float32", seed=seed if not isinstance(seed, int) else seed + 1
    )
    return ops.stop_gradient(ops.concatenate([chosen, anywhere], axis=2))


def matched_masks(mask_logits, matched):
    """The mask logits (B, h, w, Q) of the matched queries (B, T): (B, T, h, w), zeros for none."""
    chosen = ops.one_hot(matched, mask_logits.shape[-1], dtype=mask_logits.dtype)  # (B, T, Q), zeros for -1
    return ops.einsum("bhwq,btq->bthw", mask_logits, chosen)


def segmentation_losses(class_logits, mask_logits, labels, masks, matched, points) -> dict:
    """The three parts of the loss, each a scalar without its weight: "cross_entropy", "mask", "dice".

    Args beside those of `mask_costs`:
        matched: (B, T) queries, of `match_masks`.
        points: also (B, T, P, 2), such as those of `uncertain_points`.

    The masks' parts are sums over the matched targets divided by the number of all targets, at least 1.
    """
    sums = segmentation_sums(class_logits, mask_logits, labels, masks, matched, points)
    num_masks = ops.maximum(ops.sum(ops.cast(ops.convert_to_tensor(labels) >= 0, "float32")), 1.0)
    totals = {"cross_entropy": ops.sum(sums["importance"]), "mask": num_masks, "dice": num_masks}
    return {name: ops.sum(sums[name]) / total for name, total in totals.items()}


def segmentation_sums(class_logits, mask_logits, labels, masks, matched, points) -> dict:
    """The sums of which `segmentation_losses` are quotients, of each image: "cross_entropy", "mask", "dice" (B,).

    Also "importance" (B,): the weights of the queries within the cross-entropy. For the arguments see there.
    """
    labels, matched = ops.convert_to_tensor(labels, "int32"), ops.convert_to_tensor(matched, "int32")
    class_logits = ops.cast(class_logits, "float32")
    _, num_queries, outputs = class_logits.shape
    chosen = ops.one_hot(matched, num_queries, dtype="float32")  # (B, T, Q)
    classes = ops.einsum("btq,btk->bqk", chosen, ops.one_hot(labels, outputs, dtype="float32"))
    nothing = 1.0 - ops.sum(chosen, axis=1)  # (B, Q)
    importance = 1.0 - nothing + NO_OBJECT_WEIGHT * nothing
    no_object = ops.one_hot(ops.full((1, 1), outputs - 1, "int32"), outputs, dtype="float32")  # (1, 1, K + 1)
    classes = classes + nothing[..., None] * no_object
    surprise = -ops.sum(classes * ops.log_softmax(class_logits, axis=-1), axis=-1)
    counts = ops.cast(matched >= 0, "float32")
    logits = _at_points(matched_masks(mask_logits, matched), points)  # (B, T, P)
    targets = ops.stop_gradient(_at_points(masks, points))
    mask = ops.mean(_binary_cross_entropy(logits, targets), axis=-1)
    inside = ops.sigmoid(logits)
    sizes = ops.sum(inside, axis=-1) + ops.sum(targets, axis=-1)
    dice = 1.0 - (2.0 * ops.sum(inside * targets, axis=-1) + 1.0) / (sizes + 1.0)
    return {
        "cross_entropy": ops.sum(importance * surprise, axis=-1),
        "mask": ops.sum(counts * mask, axis=-1),
        "dice": ops.sum(counts * dice, axis=-1),
        "importance": ops.sum(importance, axis=-1),
    }


def _binary_cross_entropy(logits, targets):
    return ops.softplus(logits) - targets * logits


def match_boxes(class_logits, boxes, labels, target_boxes):
    """The prediction of each target box: (B, T) int32, -1 for none. Runs on the host; see `box_costs`."""
    costs = box_costs(class_logits, boxes, labels, target_boxes)
    return matched_queries(ops.convert_to_numpy(costs), np.asarray(labels) >= 0)


def box_costs(class_logits, boxes, labels, target_boxes):
    """The cost of each prediction for each target box: (B, Q, T).

    Args:
        class_logits: (B, Q, K), of independent classes.
        boxes: (B, Q, 4), center x and y, width and height as shares of the image.
        labels: (B, T) classes, -1 for no target.
        target_boxes: (B, T, 4), likewise.
    """
    boxes, target_boxes = ops.cast(boxes, "float32"), ops.convert_to_tensor(target_boxes, "float32")
    p = ops.sigmoid(ops.cast(class_logits, "float32"))
    absent = 0.75 * p**2 * -ops.log(1.0 - p + _LOG_EPSILON)
    present = 0.25 * (1.0 - p) ** 2 * -ops.log(p + _LOG_EPSILON)
    class_cost = ops.take_along_axis(present - absent, _present(labels)[:, None], axis=-1)  # (B, Q, T)
    distance = ops.sum(ops.abs(boxes[:, :, None] - target_boxes[:, None]), axis=-1)
    _, generalized = box_iou(to_corners(boxes)[:, :, None], to_corners(target_boxes)[:, None])
    weights = DETECTION_WEIGHTS
    return weights["classes"] * class_cost + weights["boxes"] * distance - weights["overlap"] * generalized


def detection_losses(
    class_logits, boxes, labels, target_boxes, matched, alpha: float | None = 0.25, gamma: float = 2.0
) -> dict:
    """The three parts of the loss, each a scalar without a weight: "classes", "boxes" (L1), "overlap" (1 - GIoU).

    All are sums divided by the number of all targets, at least 1.

    Args beside those of `box_costs`:
        matched: (B, T) predictions, of `match_boxes`.
        alpha: weight of present classes in the focal loss (arXiv 1708.02002), 1 - alpha of absent ones; None for equal
            weights.
        gamma: exponent of the focal loss; 0, with alpha None, is the sigmoid loss of OWL-ViT's first version.
    """
    sums = detection_sums(class_logits, boxes, labels, target_boxes, matched, alpha, gamma)
    num_boxes = ops.maximum(ops.sum(ops.cast(ops.convert_to_tensor(labels) >= 0, "float32")), 1.0)
    return {name: ops.sum(of_images) / num_boxes for name, of_images in sums.items()}


def detection_sums(
    class_logits, boxes, labels, target_boxes, matched, alpha: float | None = 0.25, gamma: float = 2.0
) -> dict:
    """The sums of which `detection_losses` are quotients, of each image: (B,). For the arguments see there."""
    labels, matched = ops.convert_to_tensor(labels, "int32"), ops.convert_to_tensor(matched, "int32")
    logits, boxes = ops.cast(class_logits, "float32"), ops.cast(boxes, "float32")
    target_boxes = ops.convert_to_tensor(target_boxes, "float32")
    _, num_predictions, num_classes = logits.shape
    chosen = ops.one_hot(matched, num_predictions, dtype="float32")  # (B, T, Q)
    classes = ops.einsum("btq,btk->bqk", chosen, ops.one_hot(labels, num_classes, dtype="float32"))
    p = ops.sigmoid(logits)
    right = p * classes + (1.0 - p) * (1.0 - classes)
    surprise = _binary_cross_entropy(logits, classes)
    if gamma:
        surprise = surprise * (1.0 - right) ** gamma
    if alpha is not None:
        surprise = surprise * (alpha * classes + (1.0 - alpha) * (1.0 - classes))
    counts = ops.cast(matched >= 0, "float32")
    matched_boxes = ops.einsum("bqc,btq->btc", boxes, chosen)  # (B, T, 4)
    distance = ops.sum(ops.abs(matched_boxes - target_boxes), axis=-1)
    _, generalized = box_iou(to_corners(matched_boxes), to_corners(target_boxes))
    return {
        "classes": ops.sum(surprise, axis=(1, 2)),
        "boxes": ops.sum(counts * distance, axis=-1),
        "overlap": ops.sum(counts * (1.0 - generalized), axis=-1),
    }

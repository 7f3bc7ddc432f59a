"""From the outputs of a segmentation model to label maps, masks and segments, on keras.ops, for graphs too.

As transformers' `EomtImageProcessor.post_process_semantic_segmentation`, `…instance_segmentation` and
`…panoptic_segmentation`, but for a batch, and for images that the preprocessing of the model has placed in its input.

Axes: B batch, Q queries, K classes, h and w rows and columns of the masks, H and W those of the picture.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_vit.errors import UserError
from keras_vit.images.preprocessing import Preprocessing
from keras_vit.models.config import LinearSegmentationConfig, SegmentationConfig
from keras_vit.models.layers import CHANNELS_LAST

# Least probability of a pixel of a segment, and share of a mask above which it must be visible, as in transformers.
_MASK_THRESHOLD, LEAST_VISIBLE = 0.5, 0.8


def resize_maps(maps, size):
    """Maps (B, h, w, C) resized bilinearly to (B, height, width, C), without antialiasing; size: two integers."""
    return ops.image.resize(maps, size, interpolation="bilinear", data_format=CHANNELS_LAST)


def segment_outputs(
    outputs: Mapping[str, Any],
    task: SegmentationConfig | LinearSegmentationConfig,
    preprocessing: Preprocessing,
    picture_size=None,
    *,
    threshold: float = 0.0,
    resize: Callable = resize_maps,
) -> dict[str, Any]:
    """Return label maps, masks or segments on images of one size.

    Args:
        outputs: of the model: "pixel_logits" (B, h, w, K), or "class_logits" (B, Q, K + 1) and "mask_logits" (B, h, w,
            Q).
        task: of the model.
        preprocessing: of the model, whose resize is stretch or pad.
        picture_size: height and width of the pictures, seen upright, numbers or tensors; None for the maps of the
            model's input.
        threshold: least score of a segment of panoptic.
        resize: of maps, to sizes that are tensors where picture_size is.

    Returns:
        For semantic, "label_map" (B, H, W) int32. For instance, "masks" (B, Q, H, W) bool, "classes" (B, Q) int32 and
        "scores" (B, Q). For panoptic, "segment_map" (B, H, W) int32, the number of the query, -1 for none, with
        "classes" and "scores" likewise.
    """

    def at_input(maps):
        maps = resize(ops.cast(maps, "float32"), preprocessing.image_size)
        if picture_size is None:
            return maps
        rows, columns = shown_part(preprocessing, picture_size)
        return maps[:, rows, columns]

    def in_picture(maps):
        return maps if picture_size is None else resize(maps, picture_size)

    if isinstance(task, LinearSegmentationConfig):
        return {"label_map": _largest(in_picture(at_input(outputs["pixel_logits"])))}
    probabilities = ops.softmax(ops.cast(outputs["class_logits"], "float32"), axis=-1)
    masks = at_input(outputs["mask_logits"])
    if task.task == "semantic":
        scores = ops.einsum("bhwq,bqk->bhwk", ops.sigmoid(masks), probabilities[..., :-1])
        return {"label_map": _largest(in_picture(scores))}
    masks = in_picture(masks)
    if task.task == "instance":
        return _instances(probabilities, masks)
    return _panoptic(probabilities, masks, task, threshold)


def shown_part(preprocessing: Preprocessing, picture_size) -> tuple[slice, slice]:
    """The rows and columns of a model's input that show the picture. Raises UserError where it shows only a part."""
    if preprocessing.resize not in ("stretch", "pad") or preprocessing.crop_from is not None:
        raise UserError(
            f"Segments need whole pictures, but the preprocessing of this model is {preprocessing.resize!r} with a "
            "crop; train one with keras-vit segment fit."
        )
    static = all(isinstance(side, int | np.integer) for side in picture_size)
    if static:
        places = preprocessing.placements([np.float64(side) for side in picture_size], np)
        spans = [(int(place.before), int(place.before + place.resized)) for place in places]
    else:
        places = preprocessing.placements([ops.cast(side, "float64") for side in picture_size], ops)
        spans = [(ops.cast(p.before, "int32"), ops.cast(p.before + p.resized, "int32")) for p in places]
    rows, columns = (slice(*span) for span in spans)
    return rows, columns


def _instances(probabilities, masks) -> dict[str, Any]:
    inside = masks > 0.0
    sums = ops.sum(ops.where(inside, ops.sigmoid(masks), 0.0), axis=(1, 2))
    mean = sums / (ops.sum(ops.cast(inside, "float32"), axis=(1, 2)) + 1e-6)
    classes = probabilities[..., :-1]
    scores = ops.max(classes, axis=-1) * mean
    return {"masks": ops.transpose(inside, (0, 3, 1, 2)), "classes": _largest(classes), "scores": scores}


def _panoptic(probabilities, masks, task: SegmentationConfig, threshold: float) -> dict[str, Any]:
    labels, scores = _largest(probabilities), ops.max(probabilities, axis=-1)  # (B, Q)
    queries, nothing = ops.arange(ops.shape(labels)[1], dtype="int32"), probabilities.shape[-1] - 1
    kept = ops.logical_and(labels != nothing, scores > threshold)
    inside = ops.sigmoid(masks)
    weighted = ops.where(kept[:, None, None], scores[:, None, None] * inside, -1.0)
    own = ops.logical_and(_largest(weighted)[..., None] == queries, kept[:, None, None])
    whole = ops.logical_and(inside >= _MASK_THRESHOLD, kept[:, None, None])
    visible = ops.logical_and(own, whole)
    areas = [ops.sum(ops.cast(each, "float32"), axis=(1, 2)) for each in (own, whole, visible)]
    valid = ops.logical_and(areas[2] > 0.0, areas[0] > LEAST_VISIBLE * areas[1])  # (B, Q)
    seen = ops.logical_and(visible, valid[:, None, None])
    # All masks of a class of stuff have the number of its first.
    same = ops.logical_and(labels[:, :, None] == labels[:, None], valid[:, None])  # (B, Q, Q)
    first = _largest(ops.cast(same, "float32"))
    is_stuff = ops.zeros_like(kept)
    for number in task.stuff:
        is_stuff = ops.logical_or(is_stuff, labels == number)
    numbers = ops.where(is_stuff, first, queries)
    segment_map = ops.max(ops.where(seen, numbers[:, None, None], -1), axis=-1)
    return {"segment_map": segment_map, "classes": labels, "scores": ops.where(valid, scores, 0.0)}


def _largest(scores):
    """The first place of the largest score; not by ops.argmax, which has operations that TFLite does not."""
    return ops.cast(ops.top_k(scores, 1)[1][..., 0], "int32")

"""The segments of one image in NumPy, to compare `keras_vit.models.segmentation` with.

As transformers' `EomtImageProcessor.post_process_semantic_segmentation`, `…instance_segmentation` and
`…panoptic_segmentation`.

Axes: Q queries, K classes, h and w rows and columns of the masks.
"""

import dataclasses
from collections.abc import Collection

import numpy as np

# Least probability of a pixel of a mask: transformers' mask_threshold.
_LEAST_MASK = 0.5


@dataclasses.dataclass(frozen=True)
class Segment:
    """One segment of a map."""

    id: int
    """Its number in the map."""
    label: int
    """Its class."""
    score: float
    """In [0, 1]."""


def semantic_scores(class_logits, mask_logits, image_size: tuple[int, int], target_size: tuple[int, int]) -> np.ndarray:
    """How much each pixel of one image is of each class: (height, width, K); the map of classes is its argmax.

    Args:
        class_logits: (Q, K + 1).
        mask_logits: (h, w, Q).
        image_size: height and width of the model's input.
        target_size: height and width of the map, those of the image, which was stretched to image_size.
    """
    masks = _sigmoid(_resized(mask_logits, image_size))
    return _resized(masks @ _softmax(class_logits)[:, :-1], target_size)


def instance_segments(
    class_logits,
    mask_logits,
    image_size: tuple[int, int],
    target_size: tuple[int, int],
    threshold: float = 0.8,
) -> tuple[np.ndarray, list[Segment]]:
    """(map of segments (height, width) int32, -1 for none; the segments) of one image; later ones hide earlier ones.

    Args:
        class_logits: (Q, K + 1).
        mask_logits: (h, w, Q).
        image_size: height and width of the model's input, into which the image was fitted with its upper left corner.
        target_size: height and width of the image.
        threshold: least probability of the class times mean probability of the mask inside of it.
    """
    masks = _unpadded(mask_logits, image_size, target_size)  # (height, width, Q)
    classes = _softmax(class_logits)[:, :-1]
    inside = masks > 0
    mean = (_sigmoid(masks) * inside).sum(axis=(0, 1)) / (inside.sum(axis=(0, 1)) + 1e-6)
    scores = classes.max(axis=-1) * mean
    found = np.full(target_size, -1, np.int32)
    segments: list[Segment] = []
    for query, score in enumerate(scores):
        if inside[..., query].any() and score >= threshold:
            found[inside[..., query]] = len(segments)
            segments.append(Segment(len(segments), int(classes[query].argmax()), round(float(score), 6)))
    return found, segments


def panoptic_segments(
    class_logits,
    mask_logits,
    image_size: tuple[int, int],
    target_size: tuple[int, int],
    threshold: float = 0.8,
    *,
    least_visible: float = 0.8,
    stuff: Collection[int] = (),
) -> tuple[np.ndarray, list[Segment]]:
    """(map of segments (height, width) int32, -1 for none; the segments) of one image, which do not overlap.

    Args:
        class_logits: (Q, K + 1).
        mask_logits: (h, w, Q).
        image_size: see `instance_segments`.
        target_size: height and width of the image.
        threshold: the probability of the class must be above it.
        least_visible: share of a mask above which it must be visible among the others.
        stuff: classes all of whose masks are one segment.
    """
    masks = _unpadded(mask_logits, image_size, target_size)
    probabilities = _softmax(class_logits)
    labels, scores = probabilities.argmax(axis=-1), probabilities.max(axis=-1)
    kept = np.flatnonzero((labels != class_logits.shape[1] - 1) & (scores > threshold))
    found = np.full(target_size, -1, np.int32)
    segments: list[Segment] = []
    if not len(kept):
        return found, segments
    masks, labels, scores = _sigmoid(masks[..., kept]), labels[kept], scores[kept]
    winner = (scores * masks).argmax(axis=-1)
    of_stuff: dict[int, int] = {}
    for number, label in enumerate(labels.tolist()):
        own, whole = winner == number, masks[..., number] >= _LEAST_MASK
        visible = own & whole
        if not visible.any() or not own.sum() / whole.sum() > least_visible:
            continue
        if label in stuff and label in of_stuff:
            found[visible] = of_stuff[label]
            continue
        if label in stuff:
            of_stuff[label] = len(segments)
        found[visible] = len(segments)
        segments.append(Segment(len(segments), label, round(float(scores[number]), 6)))
    return found, segments


def _resized(maps: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Maps (h, w, C) resized bilinearly to (height, width, C), without antialiasing, as torch's interpolate does."""
    rows, columns = (_weights(old, new) for old, new in zip(maps.shape[:2], size, strict=True))
    return np.einsum("yh,hwc,xw->yxc", rows, np.asarray(maps, np.float32), columns, optimize=True)


def _weights(old: int, new: int) -> np.ndarray:
    """(new, old) float32."""
    places = np.clip((np.arange(new) + 0.5) * (old / new) - 0.5, 0.0, None)
    first = np.minimum(places.astype(int), old - 1)
    shares = places - first
    weights = np.zeros((new, old), np.float32)
    weights[np.arange(new), first] += 1.0 - shares
    weights[np.arange(new), np.minimum(first + 1, old - 1)] += shares
    return weights


def _unpadded(mask_logits: np.ndarray, image_size: tuple[int, int], target_size: tuple[int, int]) -> np.ndarray:
    """Mask logits (h, w, Q) of an image in the upper left corner of the model's input -> (height, width, Q)."""
    height, width = _fitted_size(target_size, image_size)
    return _resized(_resized(mask_logits, image_size)[:height, :width], target_size)


def _fitted_size(image: tuple[int, int], image_size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image that is resized into image_size, keeping its aspect ratio, as transformers rounds.

    The shorter side becomes image_size[0], or less, so that the longer one is at most image_size[1].
    """
    small, large = min(image), max(image)
    exact = float(image_size[0])
    if large / small * image_size[0] > image_size[1]:
        exact = image_size[1] * small / large
    side = round(exact)
    if small == side:
        return image
    other = int(exact * large / small)
    return (side, other) if image[0] <= image[1] else (other, side)


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))

"""The average precision of Pascal VOC.

Source: `VOCevaldet.m` and `VOCap.m` of the development kit of VOC 2010 and later.
"""

from collections.abc import Sequence

import numpy as np

from training.data.annotations.boxes import Picture
from training.detection.detector import Objects

_LEAST_OVERLAP = 0.5


def voc_average_precision(pictures: Sequence[Picture], found: Sequence[Objects], num_classes: int) -> float:
    """Return the mean over the classes of the area under the curve of precision, at IoU 0.5.

    A detection belongs to the object that it overlaps most. Difficult objects count neither as found nor as missed.
    Classes without other objects are left out; at least one must have some.
    """
    return float(np.nanmean([_of_class(pictures, found, label) for label in range(num_classes)]))


def _of_class(pictures: Sequence[Picture], found: Sequence[Objects], label: int) -> float:
    """The average precision of a class; NaN if all of its objects are difficult."""
    count, scores, hits = 0, list[float](), list[bool]()
    for picture, objects in zip(pictures, found, strict=True):
        boxes = [box for box in picture.boxes if box.label == label]
        count += sum(not box.is_difficult for box in boxes)
        overlaps = _overlaps(
            objects.corners[objects.classes == label], np.array([box.corners for box in boxes]).reshape(-1, 4)
        )
        taken: set[int] = set()
        for row, score in zip(overlaps, objects.scores[objects.classes == label].tolist(), strict=True):
            best = int(row.argmax()) if len(row) and row.max() >= _LEAST_OVERLAP else None
            if best is not None and boxes[best].is_difficult:
                continue
            scores.append(score)
            hits.append(best is not None and best not in taken)
            taken |= set() if best is None else {best}
    if not count:
        return float("nan")
    right = np.array(hits, bool)[np.argsort(-np.array(scores), kind="stable")]
    true = np.cumsum(right)
    precision = true / np.arange(1, len(right) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(envelope[right]) / count)


def _overlaps(corners: np.ndarray, others: np.ndarray) -> np.ndarray:
    """IoU of boxes (n, 4) and (m, 4), left, top, right, bottom -> (n, m)."""
    first, second = corners.astype(np.float64)[:, None], others[None]
    sides = np.minimum(first[..., 2:], second[..., 2:]) - np.maximum(first[..., :2], second[..., :2])
    common = np.prod(np.maximum(sides, 0.0), axis=-1)
    areas = [np.prod(each[..., 2:] - each[..., :2], axis=-1) for each in (first, second)]
    return common / (areas[0] + areas[1] - common)

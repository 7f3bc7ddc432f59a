"""The segments of an image, and those that a task trains on and measures. No TensorFlow."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_vit.models.config import SegmentationTask
from training.data.annotations.run_lengths import RunLengths

# In the segments of a picture: pixels that belong to none, and those that are not counted, such as crowds.
NONE, UNCOUNTED = -1, -2
# Share of ignored pixels above which a report begins with it.
MUCH_IGNORED = 0.2


class Segments(NamedTuple):
    """The segments of an image (h, w), seen upright, as its annotations have them."""

    labels: np.ndarray
    """(n,) int32: the class of each."""
    objects: np.ndarray
    """(n,) bool: whether each is an object of its own; else it is all that the image has of its class."""
    crowds: np.ndarray
    """(n,) bool: whether each is a group of objects in which no object is marked."""
    areas: np.ndarray
    """(n,) float64: pixels of each, as the file states them."""
    map: np.ndarray
    """(h, w) int32: the number of the segment of each pixel, or NONE, or UNCOUNTED for pixels marked as ignored."""
    masks: Sequence[RunLengths] | None = None
    """The run-length encodings of the whole objects, where these may overlap; the map shows the smaller one."""


def of_task(segments: Segments, task: SegmentationTask) -> tuple[np.ndarray, np.ndarray]:
    """The classes (n,) and the map of a task's targets: for semantic one of each class, for instance the objects.

    Pixels of crowds are UNCOUNTED.
    """
    kept = ~segments.crowds & (segments.objects | (task != "instance"))
    labels, places = segments.labels[kept], np.arange(np.count_nonzero(kept))
    if task == "semantic":
        labels, places = np.unique(labels, return_inverse=True)
    table = np.where(segments.crowds, UNCOUNTED, NONE)
    table[kept] = places
    return labels, np.append(table, [UNCOUNTED, NONE]).astype(np.int32)[segments.map]  # by -2 and -1


def ignored_pixels(target: np.ndarray, task: SegmentationTask) -> np.ndarray:
    """Count pixels of the map of a task's targets: all, those that nothing annotates, those marked as ignored.

    Pixels outside of all objects are the background of instance.
    """
    outside = 0 if task == "instance" else np.count_nonzero(target == NONE)
    return np.array([target.size, outside, np.count_nonzero(target == UNCOUNTED)], np.int64)


def ignored_sentence(pixels: np.ndarray, which: str) -> str:
    """The share of `ignored_pixels` in the masks of a split, as a sentence; "" if there are none."""
    total, outside, marked = pixels.tolist()
    if not outside + marked:
        return ""
    reasons = [(outside, "have no annotation"), (marked, "are marked as ignored or belong to crowds")]
    listed = " and ".join(f"{count / total:.1%} {reason}" for count, reason in reasons if count)
    return f"{(outside + marked) / total:.1%} of the pixels of the {which} masks are ignored: {listed}."

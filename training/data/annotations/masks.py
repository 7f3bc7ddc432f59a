"""The segments of an image, those that a task trains on and measures, and masks: PNGs with classes or with objects.

No TensorFlow. No file is trusted.
"""

import contextlib
import os
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import PIL.Image
import PIL.ImageOps

from keras_vit import UserError
from keras_vit.errors import explained
from keras_vit.images.decode import open_image
from keras_vit.images.formats import orientation
from keras_vit.models.config import SegmentationTask

# In the segments of an image: pixels that belong to none, and those that are not counted, such as crowds.
NONE, UNCOUNTED = -1, -2
MUCH_IGNORED = 0.2  # share of ignored pixels above which a report begins with it
IGNORED, _IGNORED_16 = 255, 65_535  # the pixels of a mask with this value are ignored; in 16 bits with this one
# Of 16-bit masks: values below it are classes, others 1000 * class + number of the object, as Cityscapes' instanceIds.
OBJECTS = 1000
# Formats that keep values, and those that may not.
_FORMATS, _LOSSY_FORMATS = ("PNG", "BMP", "GIF", "TIFF"), ("JPEG", "MPO", "WEBP")
_SCALES = {2: 85, 4: 17}  # by which Pillow multiplies gray samples of 2 and 4 bits
# Tags of TIFF: bits of a sample; what the values mean, and those of inverted gray. Its compressions that lose values.
_TIFF_BITS, _TIFF_MEANING, _INVERTED, _LOSSY = 258, 262, 0, ("jpeg", "tiff_jpeg", "webp")

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip


class RunLengths(TypedDict):
    """A mask as pycocotools reads it."""

    size: list[int]  # height and width in pixels
    counts: bytes


class Segments(NamedTuple):
    """The segments of an image (h, w), seen upright, as its annotations have them."""

    labels: np.ndarray  # (n,) int32: the class of each
    objects: np.ndarray
    """(n,) bool: whether each is an object of its own; else it is all that the image has of its class."""
    crowds: np.ndarray  # (n,) bool: whether each is a group of objects in which no object is marked
    areas: np.ndarray  # (n,) float64: pixels of each, as the file states them
    map: np.ndarray
    """(h, w) int32: the number of the segment of each pixel, or NONE, or UNCOUNTED for pixels marked as ignored."""
    masks: Sequence[RunLengths] | None = None
    """The run-length encodings of the whole objects, where these may overlap; the map shows the smaller one."""


def of_task(segments: Segments, task: SegmentationTask) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes (n,) and the map of a task's targets: of semantic one of each class, of instance the objects.

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
    """Return the share of `ignored_pixels` in the masks of a split, as a sentence; "" if there are none."""
    total, outside, marked = pixels.tolist()
    if not outside + marked:
        return ""
    reasons = [(outside, "have no annotation"), (marked, "are marked as ignored or belong to crowds")]
    listed = " and ".join(f"{count / total:.1%} {reason}" for count, reason in reasons if count)
    return f"{(outside + marked) / total:.1%} of the pixels of the {which} masks are ignored: {listed}."


@contextlib.contextmanager
def open_mask(path: pathlib.Path, size: tuple[int, int] | None, formats: Collection[str]) -> Iterator[PIL.Image.Image]:
    """Yield the image of a mask, seen upright and not decoded yet. Raises UserError unless it is one of the size."""
    unreadable = explained(lambda reason: f"its mask {path.name} cannot be read ({reason})", Exception)
    with unreadable, open_image(path, formats=formats) as image:  # decoders raise exceptions of many types
        turns = orientation(path.read_bytes())  # 1 for a TIFF file, which Pillow turns
        height, width = image.size if turns >= 5 else image.size[::-1]
        if size not in (None, (height, width)):
            raise UserError(f"its mask {path.name} has {height}x{width} pixels, but the image {size[0]}x{size[1]}")
        if turns > 1:
            PIL.ImageOps.exif_transpose(image, in_place=True)
        yield image


def png_samples(path: pathlib.Path) -> tuple[int, int]:
    """Return the bits of a sample and the color type (0 gray, 2 RGB, 3 palette) in the header of a PNG file."""
    with path.open("rb") as file:
        header = file.read(26)
    return header[24], header[25]


def read_mask(path: str | os.PathLike, size: tuple[int, int] | None = None) -> np.ndarray:
    """Return the samples of a mask: (h, w) uint8 or uint16, of a palette its indices. Raises UserError if it is none.

    size: height and width that it must have, compared before it is decoded.
    """
    path = pathlib.Path(path)
    with open_mask(path, size, (*_FORMATS, *_LOSSY_FORMATS)) as image:
        scale, kind, values = _scale(image, path), image.format, np.asarray(image)
    are_numbers = values.ndim == 2 and values.dtype.kind != "f" and 0 <= values.min() <= values.max() <= _IGNORED_16
    if scale is None or not are_numbers:
        raise UserError(
            f"its mask {path.name} should be a PNG, or another file without loss, of one channel with class numbers, "
            f"but is a {kind} of the shape {values.shape} with {values.dtype} values up to {values.max()}; convert it"
        )
    return values.astype(np.uint8 if values.dtype.itemsize == 1 else np.uint16) // scale


def _scale(image: PIL.Image.Image, path: pathlib.Path) -> int | None:
    """Return by which Pillow multiplies the samples; None for a lossy file, and a TIFF of 2 or 4 bits or inverted."""
    if image.format == "PNG":
        bits, color = png_samples(path)
        return _SCALES.get(bits, 1) if color == 0 else 1
    tags = getattr(image, "tag_v2", {})
    is_scaled = tags.get(_TIFF_BITS, (8,))[0] in _SCALES or tags.get(_TIFF_MEANING) == _INVERTED
    is_lossy = image.format in _LOSSY_FORMATS or image.info.get("compression") in _LOSSY
    return None if is_lossy or (image.format == "TIFF" and is_scaled) else 1


def segments_of_mask(path: pathlib.Path, size: tuple[int, int] | None = None) -> Segments:
    """Return the segments of a mask with classes or, in 16 bits, objects; see `read_mask`."""
    return segments_of_values(read_mask(path, size))


def segments_of_values(mask: np.ndarray) -> Segments:
    """Return the segments of a mask (h, w) uint8 or uint16; see `segments_of_mask`."""
    counts = np.bincount(mask.ravel(), minlength=_IGNORED_16 + 1)
    counts[IGNORED if mask.dtype == np.uint8 else _IGNORED_16] = 0
    values = np.flatnonzero(counts).astype(np.int32)
    table = np.full(len(counts), UNCOUNTED, np.int32)
    table[values] = np.arange(len(values))
    objects = values >= OBJECTS
    return whole_segments(np.where(objects, values // OBJECTS, values), objects, counts[values], table[mask])


def voc_segments(classes: pathlib.Path, objects: pathlib.Path | None, size: tuple[int, int] | None = None) -> Segments:
    """Return the background and the objects of two masks; without that of objects, the classes."""
    if objects is None:
        return segments_of_mask(classes, size)
    of_pixels = read_mask(classes, size)
    numbers = read_mask(objects, of_pixels.shape)
    segments = np.full(of_pixels.shape, NONE, np.int32)
    segments[(of_pixels == IGNORED) | (numbers == IGNORED)] = UNCOUNTED
    labels: list[int] = []
    for part in (of_pixels == 0, *(numbers == number for number in np.setdiff1d(numbers, [0, IGNORED]))):
        inside = part & (segments == NONE)
        if inside.any():
            segments[inside] = len(labels)
            labels.append(int(np.bincount(of_pixels[inside]).argmax()))
    own = np.array(labels, np.int32)
    return whole_segments(own, own > 0, np.bincount(segments[segments >= 0], minlength=len(own)), segments)


def whole_segments(labels: np.ndarray, objects: np.ndarray, areas: np.ndarray, numbers: np.ndarray) -> Segments:
    """Return segments that are no crowds."""
    return Segments(labels.astype(np.int32), objects, np.zeros(len(labels), bool), areas.astype(np.float64), numbers)


def two_values(values: Collection[int], num_names: int) -> int | None:
    """Return the value of class 1 in masks of two classes that are not 0 and 1, such as 0 and 255; None in other masks.

    values: classes of all masks, and UNCOUNTED if any pixel is marked as ignored.
    num_names: of the classes; 0 if none is named.
    """
    if set(values) == {0, UNCOUNTED} and num_names in (0, 2):
        return UNCOUNTED
    classes = sorted(set(values) - {UNCOUNTED})
    return classes[1] if len(classes) == 2 and classes[0] == 0 and classes[1] > 1 and num_names == 2 else None


def two_classes(segments: Segments, value: int) -> Segments:
    """Return segments in which the class of a value, see `two_values`, is 1."""
    if value != UNCOUNTED:
        return segments._replace(labels=np.where(segments.labels == value, 1, segments.labels).astype(np.int32))
    inside = segments.map == UNCOUNTED
    if not inside.any():
        return segments
    labels, objects, areas = np.append(segments.labels, 1), np.append(segments.objects, False), segments.areas
    numbers = np.where(inside, len(segments.labels), segments.map).astype(np.int32)
    return whole_segments(labels, objects, np.append(areas, inside.sum()), numbers)


def check_classes_of_masks(
    classes: Collection[int],
    labels: Sequence[str],
    path: object,
    task: SegmentationTask = "semantic",
    are_numbers=False,
) -> None:
    """Raise UserError for masks whose classes are too few to learn from, or more than their names.

    are_numbers: whether the labels are the numbers up to the largest class, not names of classes that should occur.
    """
    if max(classes, default=-1) >= len(labels):
        raise UserError(
            f"{path} names {len(labels)} classes, 0 to {len(labels) - 1}, but the masks have the class {max(classes)}; "
            "add names, or correct the masks (255 is ignored)."
        )
    if not classes or (task == "semantic" and len(classes if are_numbers else labels) < 2):
        raise UserError(
            f"The masks of {path} have {len(classes)} of {len(labels)} classes, which is too few to learn from; "
            "correct them (255 is ignored)."
        )

"""Files of masks: PNGs with classes, with objects, and those of Pascal VOC. No file is trusted."""

import os
import pathlib

import numpy as np
import PIL.Image

from keras_vit import UserError
from keras_vit.errors import explained
from training.input.coco import NONE, PICTURE_ERRORS, UNCOUNTED, Segments

# The pixels of a mask with this value are not counted; in 16 bits with this one.
IGNORED, _IGNORED_16 = 255, 65_535
# Of 16-bit masks: values below it are classes, others 1000 * class + number of the object, as Cityscapes' instanceIds.
OBJECTS = 1000
VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip


def read_mask(path: str | os.PathLike) -> np.ndarray:
    """The values of a mask: (h, w) uint8 or uint16, of a palette its indices. Raises UserError if it is no mask."""
    path = pathlib.Path(path)
    unreadable = explained(lambda reason: f"its mask {path.name} cannot be read ({reason})", *PICTURE_ERRORS)
    with unreadable, PIL.Image.open(path) as image:
        values = np.asarray(image)
    if values.ndim != 2 or values.dtype.kind == "f" or values.min() < 0 or values.max() > _IGNORED_16:
        raise UserError(
            f"its mask {path.name} should have one channel with class numbers, but has the shape {values.shape} and "
            f"{values.dtype} values up to {values.max()}; convert colors or fractions to numbers"
        )
    return values.astype(np.uint8 if values.dtype.itemsize == 1 else np.uint16)


def segments_of_mask(path: pathlib.Path) -> Segments:
    """The segments of a mask with classes or, in 16 bits, objects."""
    mask = read_mask(path)
    values, places = np.unique(mask, return_inverse=True)
    counted = values != (IGNORED if mask.dtype == np.uint8 else _IGNORED_16)
    values = values.astype(np.int32)
    objects = values >= OBJECTS
    classes = np.where(objects, values // OBJECTS, values)
    numbers = np.where(counted, np.cumsum(counted) - 1, UNCOUNTED).astype(np.int32)
    return Segments(classes[counted], objects[counted], numbers[places].reshape(mask.shape))


def voc_segments(classes: pathlib.Path, objects: pathlib.Path | None) -> Segments:
    """The background and the objects of two masks; without that of objects, the classes."""
    if objects is None:
        return segments_of_mask(classes)
    of_pixels, numbers = read_mask(classes), read_mask(objects)
    if of_pixels.shape != numbers.shape:
        raise UserError(f"its masks {classes.name} of classes and objects have two sizes")
    segments = np.full(of_pixels.shape, NONE, np.int32)
    segments[(of_pixels == IGNORED) | (numbers == IGNORED)] = UNCOUNTED
    labels: list[int] = []
    background = (of_pixels == 0) & (segments != UNCOUNTED)
    if background.any():
        segments[background] = 0
        labels.append(0)
    for number in np.setdiff1d(numbers, [0, IGNORED]):
        inside = (numbers == number) & (segments == NONE)
        if inside.any():
            segments[inside] = len(labels)
            labels.append(int(np.bincount(of_pixels[inside]).argmax()))
    own = np.array(labels, np.int32)
    return Segments(own, own > 0, segments)

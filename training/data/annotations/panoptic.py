"""COCO's panoptic format: a file, and a PNG of each image whose colors are ids of segments. No TensorFlow."""

import pathlib
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from keras_vit import UserError
from training.data.annotations.coco import check_ids, names_and_files, segment_area
from training.data.annotations.masks import open_mask, png_samples
from training.data.annotations.segments import NONE, Segments
from training.data.listed_files import check_inside, listed_file

# Of the segments of a panoptic PNG; 0 is none.
_PANOPTIC_IDS = range(1, 2**24)
_PANOPTIC = [{"image_id": int, "file_name": str, "segments_info": [{"id": int, "category_id": int}]}]


class PanopticSegment(NamedTuple):
    """A segment as a panoptic.json has it."""

    category: int
    """Its id."""
    is_crowd: bool
    area: Any
    """In pixels, unchecked; None if the file does not state it."""


class PanopticPicture(NamedTuple):
    """An image with its segments as a panoptic.json has them."""

    file: pathlib.Path
    png: pathlib.Path
    segments: Mapping[int, PanopticSegment]
    """By their ids in the PNG."""
    stuff: Set[int]
    """Ids of the categories that are no objects."""


def read_panoptic(
    file: pathlib.Path, folder: pathlib.Path, allow_outside: bool = False
) -> tuple[Mapping[int, str], list[PanopticPicture]]:
    """Read a panoptic.json with its PNGs in the folder of the same name: names of the categories, and the images."""
    names, files, document = names_and_files(file, folder, _PANOPTIC, allow_outside)
    stuff = {each["id"] for each in document["categories"] if not each.get("isthing", 1)}
    pictures, root = [], file.with_suffix("")
    for each in document["annotations"]:
        infos = each["segments_info"]
        segments = {
            info["id"]: PanopticSegment(info["category_id"], bool(info.get("iscrowd")), info.get("area"))
            for info in infos
        }
        if len(segments) < len(infos) or not all(number in _PANOPTIC_IDS for number in segments):
            raise UserError(
                f"{file} should give each segment of {each['file_name']:.80} an id of its own from 1 to "
                f"{_PANOPTIC_IDS[-1]:,}; correct it."
            )
        check_ids({segment.category for segment in segments.values()}, names, "category", file)
        png = listed_file(root, each["file_name"])
        pictures.append(PanopticPicture(files[each["image_id"]], png, segments, stuff))
    check_inside([picture.png for picture in pictures], file, root, allow_outside)
    return names, pictures


def segments_of_png(
    picture: PanopticPicture, numbers: Mapping[int, int], size: tuple[int, int] | None = None
) -> Segments:
    """The segments of an image, those without pixels among them; pixels of the id 0 belong to none.

    Args:
        picture: of a file.
        numbers: as of `coco_segments`.
        size: height and width of the upright image, which the PNG must have.
    """
    name = picture.png.name
    with open_mask(picture.png, size, ("PNG",)) as image:
        if png_samples(picture.png)[0] > 8:
            raise UserError(f"its {name} should hold ids of segments as colors of 8 bits, but has more bits")
        red, green, blue = (np.asarray(channel, np.int32) for channel in image.convert("RGB").split())
    ids, places = np.unique(red + 256 * green + 65_536 * blue, return_inverse=True)
    if unknown := sorted(set(ids.tolist()) - {0} - picture.segments.keys()):
        raise UserError(f"its {name} has the segment {unknown[0]}, which segments_info does not list")
    order = {number: place for place, number in enumerate(picture.segments)}
    table = np.array([order.get(number, NONE) for number in ids.tolist()], np.int32)
    segments, infos = table[places].reshape(red.shape), picture.segments.values()
    pixels = np.bincount(segments[segments >= 0], minlength=len(infos)).tolist()
    return Segments(
        np.array([numbers[info.category] for info in infos], np.int32),
        np.array([info.category not in picture.stuff for info in infos], bool),
        np.array([info.is_crowd for info in infos], bool),
        np.array([segment_area(info.area, count) for info, count in zip(infos, pixels, strict=True)], np.float64),
        segments,
    )


def write_panoptic_png(segments: np.ndarray, path: pathlib.Path) -> None:
    """Write a map of segments (h, w), NONE for none, as a PNG in which segment n has the id n + 1."""
    ids = segments.astype(np.int64) + 1
    if not 0 <= ids.min() <= ids.max() <= _PANOPTIC_IDS[-1]:
        raise ValueError(f"Ids of segments are from 0 to {_PANOPTIC_IDS[-1]:,}, not {ids.min():,} to {ids.max():,}.")
    colors = np.stack([ids % 256, ids // 256 % 256, ids // 65_536], axis=-1).astype(np.uint8)
    PIL.Image.fromarray(colors).save(path)

"""Files in COCO's format: images with boxes and the segments of objects. No TensorFlow.

Boxes and segments are those of the upright image, turned by its EXIF orientation. No file is trusted.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as rle

from keras_vit import UserError
from keras_vit.errors import shown
from keras_vit.files.documents import LARGEST, Schema, read_json, validated
from keras_vit.files.labels import composed
from training.data.annotations.boxes import Annotated, Annotations, Box
from training.data.annotations.listed_images import number_of, upright_size
from training.data.annotations.run_lengths import run_lengths
from training.data.annotations.segments import NONE, Segments
from training.data.listed_files import check_listed, listed_file

# Fields of a file; the further ones of an annotation depend on its kind.
_CATEGORIES = [{"id": int, "name": str}]
_IMAGES = [{"id": int, "file_name": str}]
_ANNOTATIONS = [{"image_id": int, "category_id": int}]


class CocoObject(NamedTuple):
    """An object as a file has it; box and segmentation are unchecked."""

    category: int
    """Its id."""
    box: Any
    """Left, top, width and height."""
    segmentation: Any
    """Polygons, or a run-length encoding."""
    is_crowd: bool
    area: Any
    """In pixels; None if the file does not state it."""


class CocoPicture(NamedTuple):
    """A picture with its objects."""

    file: pathlib.Path
    stated_size: tuple
    """Height and width as the file says, unchecked."""
    objects: list[CocoObject]
    """In the order of the file."""
    id: int


@dataclasses.dataclass(frozen=True)
class Coco:
    """A file in COCO's format."""

    names: Mapping[int, str]
    """The names of the categories by id."""
    pictures: Sequence[CocoPicture]

    @property
    def numbers(self) -> dict[int, int]:
        """The number of each category by its id, in the order of the ids."""
        return {number: place for place, number in enumerate(sorted(self.names))}


def read_coco(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool = False) -> Coco:
    """Read an instances.json: `images`, `annotations`, `categories`.

    Raises UserError for what is no such file, and for images that are missing or outside of their folder.
    """
    names, files, document = names_and_files(file, folder, _ANNOTATIONS, allow_outside)
    sizes = [(each.get("height"), each.get("width")) for each in document["images"]]
    objects: dict[int, list[CocoObject]] = {number: [] for number in files}
    for each in document["annotations"]:
        if (is_crowd := each.get("iscrowd") or 0) not in (0, 1):
            raise UserError(f"iscrowd in {file} should be 0 or 1, but is {shown(is_crowd)}; correct it.")
        box, segmentation, area = (each.get(name) for name in ("bbox", "segmentation", "area"))
        objects[each["image_id"]].append(CocoObject(each["category_id"], box, segmentation, bool(is_crowd), area))
    pictures = zip(files.items(), sizes, strict=True)
    return Coco(names, [CocoPicture(path, size, objects[number], number) for (number, path), size in pictures])


def read_coco_boxes(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool) -> Annotations:
    """An instances.json of COCO: `images`, `annotations` with a bbox, `categories`."""
    coco = read_coco(file, folder, allow_outside)
    pictures = []
    for picture in coco.pictures:
        boxes = []
        for each in picture.objects:
            if not isinstance(each.box, list) or len(each.box) != 4:
                raise UserError(
                    f"A bbox in {file} should be left, top, width and height, but is {shown(each.box)}; correct it."
                )
            x, y, w, h = (number_of(side, f"Each number of a bbox in {file}") for side in each.box)
            area = None if each.area is None else number_of(each.area, f"Each area in {file}")
            label = coco.names.get(each.category, f"category {each.category}")
            boxes.append(Box(label, (x, y, w, h), area, each.is_crowd))
        size = upright_size(picture.file, picture.stated_size)
        pictures.append(Annotated(picture.file, size, boxes, picture.id))
    return Annotations(tuple(coco.names[number] for number in sorted(coco.names)), {"train": pictures})


def coco_segments(picture: CocoPicture, numbers: Mapping[int, int], size: tuple[int, int]) -> Segments:
    """The objects of an image in the order of the file; on the map a smaller one lies on a larger one.

    Args:
        picture: of a file.
        numbers: of the categories, see `Coco.numbers`.
        size: height and width of the upright image.

    Raises UserError for a segmentation that is none, or of an unknown category.
    """
    if unknown := [each.category for each in picture.objects if each.category not in numbers]:
        raise UserError(f"the category {unknown[0]} of an object is not listed under categories")
    masks = [run_lengths(each.segmentation, size) for each in picture.objects]
    pixels = [float(rle.area(mask)) for mask in masks]
    crowds = np.array([each.is_crowd for each in picture.objects], bool)
    segments = np.full(size, NONE, np.int32)
    for number in sorted(range(len(masks)), key=lambda n: (not crowds[n], -pixels[n])):
        segments[rle.decode(masks[number]).astype(bool)] = number
    stated = zip((each.area for each in picture.objects), pixels, strict=True)
    return Segments(
        np.array([numbers[each.category] for each in picture.objects], np.int32),
        np.ones(len(masks), bool),
        crowds,
        np.array([segment_area(area, count) for area, count in stated], np.float64),
        segments,
        masks,
    )


def segment_area(stated: Any, pixels: float) -> float:
    """The area of a segment as its file states it, else its pixels."""
    return pixels if stated is None else number_of(stated, "the area of a segment")


def names_and_files(
    file: pathlib.Path, folder: pathlib.Path, annotations: Schema, allow_outside: bool
) -> tuple[dict[int, str], dict[int, pathlib.Path], dict]:
    """The names of the categories and the pictures by their ids, and all of the file."""
    document = read_json(file, LARGEST)
    validated(document, {"images": _IMAGES, "annotations": annotations, "categories": _CATEGORIES}, file)
    images, categories = document["images"], document["categories"]
    names = {each["id"]: composed(each["name"]) for each in categories}
    files = {each["id"]: listed_file(folder, each["file_name"]) for each in images}
    if len(names) < len(categories) or len(files) < len(images) or len(set(files.values())) < len(images):
        raise UserError(f"{file} has two images or two categories with one id or file; give each its own.")
    check_listed(files.values(), file, folder, allow_outside)
    check_ids({each["image_id"] for each in document["annotations"]}, files, "image", file)
    return names, files, document


def check_ids(used: Set[int], listed: Mapping[int, object], what: str, file: pathlib.Path) -> None:
    if unknown := sorted(used - listed.keys()):
        raise UserError(f"{file} uses the {what} {unknown[0]}, which it does not list; add it.")

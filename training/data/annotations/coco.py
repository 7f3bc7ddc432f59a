"""Files in COCO's formats: objects with boxes and masks, and panoptic files with a PNG for each image. No TensorFlow.

Boxes and segments are those of the upright image, turned by its EXIF orientation. No file is trusted.
"""

import pathlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from pycocotools import mask as rle

from keras_vit import UserError
from keras_vit.files.documents import LARGEST, NUMBER, Rule, Schema, optional, read_json, validated
from keras_vit.files.labels import composed
from training.data.annotations.images import Box, BoxedImage, BoxedImages, upright_size
from training.data.annotations.masks import NONE, Segments, open_mask, png_samples
from training.data.annotations.run_lengths import run_lengths
from training.data.listed_files import check_inside, check_listed, listed_file

# Of the segments of a panoptic PNG; 0 is none.
_PANOPTIC_IDS = range(1, 2**24)
# Fields of a file; those that must be there, and those that may.
_CATEGORIES = [{"id": int, "name": str}]
_IMAGES = [{"id": int, "file_name": str}]
_SEGMENT = {
    "category_id": int,
    "iscrowd": optional(Rule("0 or 1", lambda value: value in (0, 1))),
    "area": optional(NUMBER),
}
_OBJECT = {"image_id": int, **_SEGMENT}
_ID = Rule("a number from 1 to 16,777,215", lambda value: type(value) is int and value in _PANOPTIC_IDS)
_PANOPTIC = {"image_id": int, "file_name": str, "segments_info": [{"id": _ID, **_SEGMENT}]}


class CocoImage(NamedTuple):
    """An image with its objects."""

    file: pathlib.Path
    objects: list[dict[str, Any]]
    """The annotations in the order of the file; boxes are checked, segmentations are not."""
    id: int
    stated_size: tuple
    """Height and width as the file says, unchecked."""

    def segments(self, numbers: Mapping[int, int], size: tuple[int, int]) -> Segments:
        """Return the objects in the order of the file; on the map a smaller one lies on a larger one.

        Args:
            numbers: the class of each category by its id.
            size: height and width of the upright image.

        Raises UserError for a segmentation that is none.
        """
        masks = [run_lengths(each.get("segmentation"), size) for each in self.objects]
        pixels = [float(rle.area(mask)) for mask in masks]
        labels, crowds, areas = _columns(self.objects, numbers, pixels)
        segments = np.full(size, NONE, np.int32)
        for number in sorted(range(len(masks)), key=lambda n: (not crowds[n], -pixels[n])):
            segments[rle.decode(masks[number]).astype(bool)] = number
        return Segments(labels, np.ones(len(masks), bool), crowds, areas, segments, masks)


class PanopticImage(NamedTuple):
    """An image with its segments as a panoptic.json has them."""

    file: pathlib.Path
    objects: list[dict[str, Any]]
    """Its segments_info."""
    png: pathlib.Path
    stuff: Set[int]
    """Ids of the categories that are no objects."""
    stated_size: tuple = (None, None)

    def segments(self, numbers: Mapping[int, int], size: tuple[int, int] | None = None) -> Segments:
        """Return the segments, those without pixels among them; pixels of the id 0 belong to none.

        Arguments as of `CocoImage.segments`; the PNG must have the size.
        """
        with open_mask(self.png, size, ("PNG",)) as mask:
            if png_samples(self.png)[0] > 8:
                raise UserError(f"its {self.png.name} should hold ids of segments as colors of 8 bits, but has more")
            red, green, blue = (np.asarray(channel, np.int32) for channel in mask.convert("RGB").split())
        order = {each["id"]: place for place, each in enumerate(self.objects)}
        ids, places = np.unique(red + 256 * green + 65_536 * blue, return_inverse=True)
        if unknown := sorted(set(ids.tolist()) - {0} - order.keys()):
            raise UserError(f"its {self.png.name} has the segment {unknown[0]}, which segments_info does not list")
        table = np.array([order.get(number, NONE) for number in ids.tolist()], np.int32)
        segments = table[places].reshape(red.shape)
        pixels = np.bincount(segments[segments >= 0], minlength=len(order)).tolist()
        labels, crowds, areas = _columns(self.objects, numbers, pixels)
        are_objects = np.array([each["category_id"] not in self.stuff for each in self.objects], bool)
        return Segments(labels, are_objects, crowds, areas, segments)


def read_coco(
    file: pathlib.Path, folder: pathlib.Path, allow_outside: bool = False, **fields: Schema
) -> tuple[dict[int, str], list[CocoImage]]:
    """Read an instances.json: the names of the categories by id, and the images.

    fields: further ones of each annotation.

    Raises UserError for what is no such file, and for images that are missing or outside of their folder.
    """
    names, files, document = _open(file, folder, _OBJECT | fields, allow_outside)
    objects: dict[int, list] = {number: [] for number in files}
    for each in document["annotations"]:
        objects[each["image_id"]].append(each)
    rows = zip(files.items(), document["images"], strict=True)
    return names, [
        CocoImage(path, objects[number], number, (row.get("height"), row.get("width"))) for (number, path), row in rows
    ]


def read_coco_boxes(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool) -> BoxedImages:
    """Read an instances.json: `images`, `annotations` with a bbox, `categories`."""
    names, coco_images = read_coco(file, folder, allow_outside, bbox=(NUMBER,) * 4)
    images = []
    for path, objects, number, stated_size in coco_images:
        boxes = []
        for each in objects:
            x, y, w, h = map(float, each["bbox"])
            area = None if each.get("area") is None else float(each["area"])
            label = names.get(each["category_id"], f"category {each['category_id']}")
            boxes.append(Box(label, (x, y, w, h), area, bool(each.get("iscrowd"))))
        images.append(BoxedImage(path, upright_size(path, stated_size), boxes, number))
    return BoxedImages(tuple(names[number] for number in sorted(names)), {"train": images})


def read_panoptic(
    file: pathlib.Path, folder: pathlib.Path, allow_outside: bool = False
) -> tuple[dict[int, str], list[PanopticImage]]:
    """Read a panoptic.json with its PNGs in the folder of the same name: names of the categories, and the images."""
    names, files, document = _open(file, folder, _PANOPTIC, allow_outside)
    stuff = {each["id"] for each in document["categories"] if not each.get("isthing", 1)}
    images, root = [], file.with_suffix("")
    for each in document["annotations"]:
        infos, png = each["segments_info"], listed_file(root, each["file_name"])
        if len({info["id"] for info in infos}) < len(infos):
            raise UserError(f"{file} should give each segment of {each['file_name']:.80} an id of its own; correct it.")
        images.append(PanopticImage(files[each["image_id"]], infos, png, stuff))
    check_inside([image.png for image in images], file, root, allow_outside)
    return names, images


def write_panoptic_png(segments: np.ndarray, path: pathlib.Path) -> None:
    """Write a map of segments (h, w), NONE for none, as a PNG in which segment n has the id n + 1."""
    ids = segments.astype(np.int64) + 1
    assert 0 <= ids.min() <= ids.max() <= _PANOPTIC_IDS[-1]
    colors = np.stack([ids % 256, ids // 256 % 256, ids // 65_536], axis=-1).astype(np.uint8)
    PIL.Image.fromarray(colors).save(path)


def _columns(
    rows: Sequence[dict[str, Any]], numbers: Mapping[int, int], pixels: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return of segments the classes, whether they are crowds, and the areas that the file states, else the pixels."""
    areas = [count if row.get("area") is None else float(row["area"]) for row, count in zip(rows, pixels, strict=True)]
    return (
        np.array([numbers[row["category_id"]] for row in rows], np.int32),
        np.array([bool(row.get("iscrowd")) for row in rows], bool),
        np.array(areas, np.float64),
    )


def _open(
    file: pathlib.Path, folder: pathlib.Path, annotation: Schema, allow_outside: bool
) -> tuple[dict[int, str], dict[int, pathlib.Path], dict]:
    """Return the names of the categories and the images by their ids, and all of the file."""
    document = read_json(file, LARGEST)
    validated(document, {"images": _IMAGES, "annotations": [annotation], "categories": _CATEGORIES}, file)
    images, categories = document["images"], document["categories"]
    names = {each["id"]: composed(each["name"]) for each in categories}
    files = {each["id"]: listed_file(folder, each["file_name"]) for each in images}
    if len(names) < len(categories) or len(files) < len(images) or len(set(files.values())) < len(images):
        raise UserError(f"{file} has two images or two categories with one id or file; give each its own.")
    check_listed(files.values(), file, folder, allow_outside)
    check_ids((each["image_id"] for each in document["annotations"]), files, "image", file)
    return names, files, document


def check_ids(used: Iterable[int], listed: Mapping[int, object], what: str, file: pathlib.Path) -> None:
    """Raise UserError for an id that a file uses and does not list."""
    if unknown := sorted({*used} - listed.keys()):
        raise UserError(f"{file} uses the {what} {unknown[0]}, which it does not list; add it.")

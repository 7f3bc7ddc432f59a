"""Files in COCO's formats: objects with boxes and masks, and panoptic files with a PNG for each image. No TensorFlow.

Boxes and segments are those of the upright image, turned by its EXIF orientation. No file is trusted: polygons and
run-length encodings are checked before pycocotools reads them. Its C code checks nothing: it reads behind the end of a
damaged encoding, returns uninitialized memory for one that ends too early, and takes memory in proportion to the
perimeter of a polygon.
"""

import collections
import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from pycocotools import mask as rle

from keras_vit import UserError
from keras_vit.errors import shown
from keras_vit.files.documents import LARGEST, NUMBER, Rule, Schema, optional, read_json, validated
from keras_vit.files.labels import composed
from training.data.annotations.images import Box, BoxedImage, BoxedImages, upright_size
from training.data.annotations.masks import NONE, RunLengths, Segments, open_mask, png_samples
from training.data.listed_files import check_inside, check_listed, listed_file

_PANOPTIC_IDS = range(1, 2**24)  # of the segments of a panoptic PNG; 0 is none
# Fields of a file; those that must be there, and those that may.
_CATEGORIES = [{"id": int, "name": str}]
_IMAGES = [{"id": int, "file_name": str, "height": optional(NUMBER), "width": optional(NUMBER)}]
_IS_CROWD = optional(Rule("0 or 1", lambda value: value in (0, 1)))
_SEGMENT = {"category_id": int, "iscrowd": _IS_CROWD, "area": optional(NUMBER)}
_OBJECT = {"image_id": int, **_SEGMENT}
_ID = Rule("a number from 1 to 16,777,215", lambda value: type(value) is int and value in _PANOPTIC_IDS)
_PANOPTIC = {"image_id": int, "file_name": str, "segments_info": [{"id": _ID, **_SEGMENT}]}

_OUTSIDE = 1.0  # pixels that a point may lie outside of its image by rounding
_LONGEST_PERIMETER = 2**20  # of one polygon, in pixels, for each of which pycocotools takes about 100 bytes
_MOST_POLYGONS = 10_000  # polygons of one object, which pycocotools merges in a time that grows with their square
_LONGEST_RUN = 6  # characters of a run in a compressed encoding: five bits each, so that C's 32 bits do not overflow


class CocoImage(NamedTuple):
    """An image with its objects."""

    file: pathlib.Path
    objects: list[dict[str, Any]]  # the annotations in the order of the file; boxes are checked, segmentations are not
    id: int
    stated_size: tuple  # height and width as the file says, unchecked
    group: str = ""  # the name of its group in the data; "" without one

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
    objects: list[dict[str, Any]]  # its segments_info
    png: pathlib.Path
    stuff: Set[int]  # ids of the categories that are no objects
    stated_size: tuple = (None, None)
    group: str = ""

    def segments(self, numbers: Mapping[int, int], size: tuple[int, int] | None = None) -> Segments:
        """Return the segments as `CocoImage.segments` does; pixels of the id 0 belong to none. The PNG has the size."""
        with open_mask(self.png, size, ("PNG",)) as mask:
            if png_samples(self.png)[0] > 8:
                raise UserError(f"its {self.png.name} should hold ids of segments as colors of 8 bits, but has more")
            red, green, blue = (np.asarray(channel, np.int32) for channel in mask.convert("RGB").split())
        order = {each["id"]: place for place, each in enumerate(self.objects)}
        ids, places = np.unique(red + 256 * green + 65_536 * blue, return_inverse=True)
        check_ids({*ids.tolist()} - {0}, order, "segment", f"its {self.png.name}")
        table = np.array([order.get(number, NONE) for number in ids.tolist()], np.int32)
        segments = table[places].reshape(red.shape)
        pixels = np.bincount(segments[segments >= 0], minlength=len(order)).tolist()
        labels, crowds, areas = _columns(self.objects, numbers, pixels)
        are_objects = np.array([each["category_id"] not in self.stuff for each in self.objects], bool)
        return Segments(labels, are_objects, crowds, areas, segments)


def read_coco(
    file: pathlib.Path, folder: pathlib.Path, allow_outside: bool = False, **fields: Schema
) -> tuple[dict[int, str], list[CocoImage]]:
    """Read an instances.json: the names of the categories by id, and the images in the order of their ids.

    pycocotools has this order, which decides between equal scores.

    fields: further ones of each annotation.

    Raises UserError for what is no such file, and for images that are missing or outside of their folder.
    """
    names, files, document = _open(file, folder, _OBJECT | fields, allow_outside)
    objects: dict[int, list] = {number: [] for number in files}
    for each in document["annotations"]:
        objects[each["image_id"]].append(each)
    rows = sorted(zip(files.items(), document["images"], strict=True), key=lambda row: row[0][0])
    images = []
    for (number, path), row in rows:
        size = _number(row, "height"), _number(row, "width")
        images.append(CocoImage(path, objects[number], number, size, _group(row)))
    return names, images


def read_coco_boxes(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool) -> BoxedImages:
    """Read an instances.json: `images`, `annotations` with a bbox, `categories`."""
    names, coco_images = read_coco(file, folder, allow_outside, bbox=(NUMBER,) * 4)
    images = []
    for path, objects, number, stated_size, group in coco_images:
        boxes = []
        for each in objects:
            x, y, w, h = map(float, each["bbox"])
            label = names.get(each["category_id"], f"category {each['category_id']}")
            boxes.append(Box(label, (x, y, w, h), _number(each, "area"), bool(each.get("iscrowd"))))
        images.append(BoxedImage(path, upright_size(path, stated_size), boxes, number, group))
    return BoxedImages(tuple(names[number] for number in sorted(names)), {"train": images})


def read_panoptic(
    file: pathlib.Path, folder: pathlib.Path, allow_outside: bool = False
) -> tuple[dict[int, str], list[PanopticImage]]:
    """Read a panoptic.json with its PNGs in the folder of the same name: names of the categories, and the images."""
    names, files, document = _open(file, folder, _PANOPTIC, allow_outside)
    _check_distinct((each["image_id"] for each in document["annotations"]), "annotations of an image", file)
    stuff = {each["id"] for each in document["categories"] if not each.get("isthing", 1)}
    groups = {row["id"]: _group(row) for row in document["images"]}
    images, root = [], file.with_suffix("")
    for each in document["annotations"]:
        infos, png = each["segments_info"], listed_file(root, each["file_name"])
        _check_distinct((info["id"] for info in infos), f"segments of {each['file_name']:.80}", file)
        number = each["image_id"]
        images.append(PanopticImage(files[number], infos, png, stuff, group=groups[number]))
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
    stated = (_number(row, "area") for row in rows)
    areas = [count if area is None else area for area, count in zip(stated, pixels, strict=True)]
    classes, crowds = [numbers[row["category_id"]] for row in rows], [bool(row.get("iscrowd")) for row in rows]
    return np.array(classes, np.int32), np.array(crowds, bool), np.array(areas, np.float64)


def _number(row: dict[str, Any], field: str) -> float | None:
    return None if row.get(field) is None else float(row[field])


def _open(
    file: pathlib.Path, folder: pathlib.Path, annotation: Schema, allow_outside: bool
) -> tuple[dict[int, str], dict[int, pathlib.Path], dict]:
    """Return the names of the categories and the images by their ids, and all of the file."""
    document = read_json(file, LARGEST)
    validated(document, {"images": _IMAGES, "annotations": [annotation], "categories": _CATEGORIES}, file)
    images, categories = document["images"], document["categories"]
    names = {each["id"]: composed(each["name"]) for each in categories}
    files = {each["id"]: listed_file(folder, each["file_name"]) for each in images}
    _check_distinct((each["id"] for each in categories), "categories", file)
    _check_distinct((each["id"] for each in images), "images", file)
    _check_distinct(files.values(), "images", file)
    check_listed(files.values(), file, folder, allow_outside)
    check_ids((each["image_id"] for each in document["annotations"]), files, "image", file)
    return names, files, document


def _group(row: dict[str, Any]) -> str:
    """Return the name of the group of an image; "" without one. COCO knows no such field, so others may use it."""
    group = row.get("group")
    return str(group) if isinstance(group, str | int) else ""


def _check_distinct(values: Iterable[object], what: str, file: pathlib.Path) -> None:
    """Raise UserError for an id, or a file, that two entries have."""
    value, count = collections.Counter(values).most_common(1)[0] if (values := [*values]) else ("", 0)
    if count > 1:
        raise UserError(f"{file} has two {what} with {shown(str(value))}; give each its own.")


def check_ids(used: Iterable[int], listed: Mapping[int, object], what: str, file: object) -> None:
    """Raise UserError for an id that a file uses and that is not listed."""
    if unknown := sorted({*used} - listed.keys()):
        raise UserError(f"{file} uses the {what} {unknown[0]}, which is not listed; add it.")


def run_lengths(segmentation: Any, size: tuple[int, int]) -> RunLengths:
    """Return the run-length encoding of an object's mask, as pycocotools makes it.

    Args:
        segmentation: of an annotation: polygons, or an encoding with counts as a list or compressed to a text. Any
            value that JSON can have.
        size: height and width of the upright image in pixels.

    Raises UserError, which does not name the image, for what is none of them.
    """
    height, width = size
    counts, problem = None, None
    if isinstance(segmentation, list) and segmentation and all(map(_is_polygon, segmentation)):
        problem = _polygon_problem(segmentation, size)
        if problem is None:
            return rle.merge(rle.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation, dict) and segmentation.get("size") == [height, width]:
        counts = segmentation.get("counts")
    if isinstance(counts, str) and _fills(_lengths(counts), height * width):
        return {"size": [height, width], "counts": counts.encode("ascii")}
    if isinstance(counts, list) and _fills(counts, height * width):
        return rle.frPyObjects({"size": [height, width], "counts": counts}, height, width)
    raise UserError(
        problem
        or "a segmentation should be polygons of 3 points or more, x and y of each, or a run-length encoding of all of "
        f"the size {[height, width]}, but is {shown(segmentation) if segmentation else 'missing'}"
    )


def _is_polygon(numbers: Any) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) >= 6
        and len(numbers) % 2 == 0
        and all(type(number) in (int, float) and abs(number) < 1e9 for number in numbers)
    )


def _polygon_problem(polygons: list[list[float]], size: tuple[int, int]) -> str | None:
    """Say which polygon is too long, lies outside, or is given in shares of the image; None if none is."""
    height, width = size
    if len(polygons) > _MOST_POLYGONS:
        return f"an object has {len(polygons):,} polygons, but at most {_MOST_POLYGONS:,} are read; merge them"
    numbers = np.fromiter(itertools.chain.from_iterable(polygons), np.float64)
    points = numbers.reshape(-1, 2)
    outside = max(float(-points.min()), float((points - [width, height]).max()))
    if outside > _OUTSIDE:
        return f"a polygon reaches {outside:,.0f} pixels out of the image of {width} x {height}; correct or cut it"
    if numbers.max() <= 1.0 and max(size) > 1:
        return (
            "no coordinate of a polygon is above 1, as if they were shares of the image instead of pixels; multiply x "
            "by its width and y by its height"
        )
    for polygon in polygons:
        corners = np.array([*polygon, *polygon[:2]], np.float64).reshape(-1, 2)
        if (perimeter := np.abs(np.diff(corners, axis=0)).max(axis=1).sum()) > _LONGEST_PERIMETER:
            return f"a polygon has a perimeter of {perimeter:,.0f} pixels, which no outline has; correct it"
    return None


def _fills(lengths: list, pixels: int) -> bool:
    """Whether the lengths of runs are those of all pixels."""
    return all(type(each) is int and 0 <= each <= pixels for each in lengths) and sum(lengths) == pixels


def _lengths(counts: str) -> list[int]:
    """Return the lengths of the runs of a compressed encoding; [-1] for a damaged one.

    Source: `rleFrString` of pycocotools: little-endian groups of five bits, each a character from "0" on, with bit 5
    where another follows, and the sign in bit 4 of the last. From the fourth length on, they are differences.
    """
    codes = np.frombuffer(counts.encode("utf-8", "replace"), np.uint8).astype(np.int64) - ord("0")
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 32:
        return [-1]
    ends = np.flatnonzero(codes & 32 == 0)
    begins = np.append(0, ends[:-1] + 1)
    digits = ends + 1 - begins
    if digits.max() > _LONGEST_RUN:
        return [-1]
    place = np.arange(len(codes)) - np.repeat(begins, digits)
    lengths = np.add.reduceat((codes & 31) << 5 * place, begins)
    lengths -= (codes[ends] & 16 > 0) * (1 << 5 * digits)
    for begin in (1, 2):
        lengths[begin::2] = np.cumsum(lengths[begin::2])
    return lengths.tolist()

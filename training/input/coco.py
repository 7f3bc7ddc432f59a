"""Files in COCO's format: pictures with boxes and segments, which detection and segmentation read. No TensorFlow.

Boxes and segments are those of the upright picture, turned by its EXIF orientation. No file is trusted.
"""

import dataclasses
import io
import math
import pathlib
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import PIL.Image
from pycocotools import mask as rle

from keras_vit import UserError
from keras_vit.errors import explained, shown
from keras_vit.files.documents import LARGEST, read_json
from keras_vit.files.labels import LABELS, read_labels
from keras_vit.files.schema import Schema, validated
from keras_vit.images.formats import format_problem, orientation
from training.input.coco_masks import run_lengths
from training.options.common import composed
from training.options.listed_files import check_listed, listed_file

# In the segments of a picture: pixels that belong to none, and those that are not counted, such as crowds.
NONE, UNCOUNTED = -1, -2
# Without a split of their own, every tenth picture by name is evaluated.
_HOLD_OUT = 10
# What Pillow raises for a file that is no picture, or a broken one.
PICTURE_ERRORS = (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError)

# Fields of a file; the further ones of an annotation depend on its kind.
_CATEGORIES = [{"id": int, "name": str}]
_IMAGES = [{"id": int, "file_name": str}]
_ANNOTATIONS = [{"image_id": int, "category_id": int}]
_PANOPTIC = [{"image_id": int, "file_name": str, "segments_info": [{"id": int, "category_id": int}]}]


class Segments(NamedTuple):
    """The segments of a picture (h, w), seen upright."""

    labels: np.ndarray
    """(n,) int32: the class of each."""
    objects: np.ndarray
    """(n,) bool: whether each is an object of its own; else it is all that the picture has of its class."""
    map: np.ndarray
    """(h, w) int32: the number of the segment of each pixel, or NONE, or UNCOUNTED."""


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
    """Of the categories, by id."""
    pictures: Sequence[CocoPicture]

    @property
    def numbers(self) -> dict[int, int]:
        """The number of each category by its id, in the order of the ids."""
        return {number: place for place, number in enumerate(sorted(self.names))}


class Listed(Protocol):
    """A picture that data name."""

    @property
    def file(self) -> pathlib.Path:
        """Where it is."""


AnyListed = TypeVar("AnyListed", bound=Listed)


def read_coco(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool = False) -> Coco:
    """Read an instances.json: `images`, `annotations`, `categories`.

    Raises UserError for what is no such file, and for images that are missing or outside of their folder.
    """
    names, files, document = _names_and_files(file, folder, _ANNOTATIONS, allow_outside)
    sizes = [(each.get("height"), each.get("width")) for each in document["images"]]
    objects: dict[int, list[CocoObject]] = {number: [] for number in files}
    for each in document["annotations"]:
        if (is_crowd := each.get("iscrowd") or 0) not in (0, 1):
            raise UserError(f"iscrowd in {file} should be 0 or 1, but is {shown(is_crowd)}; correct it.")
        box, segmentation, area = (each.get(name) for name in ("bbox", "segmentation", "area"))
        objects[each["image_id"]].append(CocoObject(each["category_id"], box, segmentation, bool(is_crowd), area))
    pictures = zip(files.items(), sizes, strict=True)
    return Coco(names, [CocoPicture(path, size, objects[number], number) for (number, path), size in pictures])


def coco_segments(picture: CocoPicture, numbers: Mapping[int, int], size: tuple[int, int]) -> Segments:
    """The objects of a picture; a smaller one lies on a larger one.

    Args:
        picture: of a file.
        numbers: of the categories, see `Coco.numbers`.
        size: height and width of the upright picture.

    Raises UserError for a segmentation that is none, or of an unknown category.
    """
    masks = []
    for each in picture.objects:
        if each.category not in numbers:
            raise UserError(f"the category {each.category} of an object is not listed under categories")
        mask = _mask(each.segmentation, size)
        masks.append((int(mask.sum()), -1 if each.is_crowd else numbers[each.category], mask))
    segments, labels = np.full(size, NONE, np.int32), list[int]()
    for _, label, mask in sorted(masks, key=lambda each: (each[1] >= 0, -each[0])):
        segments[mask] = UNCOUNTED if label < 0 else len(labels)
        labels += [label] if label >= 0 else []
    return Segments(np.array(labels, np.int32), np.ones(len(labels), bool), segments)


def _mask(segmentation: Any, size: tuple[int, int]) -> np.ndarray:
    """The mask (h, w) bool of an object; see `run_lengths`."""
    return rle.decode(run_lengths(segmentation, size)).astype(bool)


class PanopticPicture(NamedTuple):
    """A picture with its segments as a panoptic.json has them."""

    file: pathlib.Path
    png: pathlib.Path
    categories: Mapping[int, tuple[int, bool]]
    """The id of the category of each segment, and whether it is a crowd, by its number in the PNG."""
    stuff: Set[int]
    """Ids of the categories that are no objects."""


def read_panoptic(
    file: pathlib.Path, folder: pathlib.Path, allow_outside: bool = False
) -> tuple[Mapping[int, str], list[PanopticPicture]]:
    """Read a panoptic.json with its PNGs in the folder of the same name: names of the categories, and the pictures."""
    names, files, document = _names_and_files(file, folder, _PANOPTIC, allow_outside)
    stuff = {each["id"] for each in document["categories"] if not each.get("isthing", 1)}
    pictures = []
    for each in document["annotations"]:
        png = file.with_suffix("") / pathlib.PurePath(each["file_name"]).name
        infos = each["segments_info"]
        categories = {info["id"]: (info["category_id"], bool(info.get("iscrowd"))) for info in infos}
        _check_ids({category for category, _ in categories.values()}, names, "category", file)
        pictures.append(PanopticPicture(files[each["image_id"]], png, categories, stuff))
    return names, pictures


def segments_of_png(picture: PanopticPicture, numbers: Mapping[int, int]) -> Segments:
    """The segments of a picture; `numbers` as of `coco_segments`."""
    name = picture.png.name
    unreadable = explained(lambda reason: f"its {name} cannot be read ({reason})", *PICTURE_ERRORS)
    with unreadable, PIL.Image.open(picture.png) as image:
        colors = np.asarray(image.convert("RGB"), np.int64)
    ids, places = np.unique(colors @ [1, 256, 65536], return_inverse=True)
    if unknown := sorted(set(ids.tolist()) - {0} - picture.categories.keys()):
        raise UserError(f"its {name} has the segment {unknown[0]}, which segments_info does not list")
    categories, table = list[int](), np.full(len(ids), NONE, np.int32)
    for place, number in enumerate(ids.tolist()):
        category, is_crowd = picture.categories.get(number, (0, True))
        table[place] = UNCOUNTED if is_crowd else len(categories)
        categories += [] if is_crowd else [category]
    labels = np.array([numbers[category] for category in categories], np.int32)
    objects = np.array([category not in picture.stuff for category in categories], bool)
    return Segments(labels, objects, table[places].reshape(colors.shape[:2]))


def upright_size(file: pathlib.Path, stated: tuple = (None, None)) -> tuple[int, int]:
    """Height and width in pixels of a picture as it is seen.

    Raises UserError if it is no picture that we read, or not of the size that an annotation states; zeros state none.
    """
    with explained(
        lambda reason: f"The picture {file} cannot be read ({reason}); repair it, or remove it and its annotation.",
        *PICTURE_ERRORS,
    ):
        data = file.read_bytes()
        if problem := format_problem(data):
            raise ValueError(problem)
        with PIL.Image.open(io.BytesIO(data)) as image:
            width, height = image.size
    size = (width, height) if orientation(data) >= 5 else (height, width)
    if None not in stated and stated not in (size, (0, 0)):
        raise UserError(
            f"The picture {file}, seen upright, is {size[1]} wide and {size[0]} high, but it was annotated as one "
            f"{stated[1]!s:.20} wide and {stated[0]!s:.20} high; annotate the upright picture at its size."
        )
    return size


def number_of(value: object, where: str) -> float:
    """A finite number. Raises UserError for anything else."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where} should be a finite number, but is {shown(value)}; correct it.")
    return number


def held_out(pictures: Sequence[AnyListed], path: pathlib.Path) -> tuple[list[AnyListed], list[AnyListed]]:
    """All but every tenth picture by name, and these. Raises UserError for a single picture."""
    if len(pictures) < 2:
        count = f"{len(pictures)} picture" if pictures else "no picture"
        raise UserError(f"{path} holds {count}; it needs two, to train on and to evaluate on.")
    pictures = sorted(pictures, key=lambda picture: picture.file)
    return [each for number, each in enumerate(pictures) if number % _HOLD_OUT], pictures[::_HOLD_OUT]


def own_labels(folder: pathlib.Path) -> tuple[str, ...]:
    """The names of labels.txt in the folder of the data; none without it."""
    return tuple(map(composed, read_labels(folder / LABELS))) if (folder / LABELS).is_file() else ()


def _names_and_files(
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
    _check_ids({each["image_id"] for each in document["annotations"]}, files, "image", file)
    return names, files, document


def _check_ids(used: Set[int], listed: Mapping[int, object], what: str, file: pathlib.Path) -> None:
    if unknown := sorted(used - listed.keys()):
        raise UserError(f"{file} uses the {what} {unknown[0]}, which it does not list; add it.")

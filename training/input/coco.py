"""Files in COCO's format: pictures with boxes and segments, which detection and segmentation read. No TensorFlow.

Boxes and segments are those of the upright picture, turned by its EXIF orientation. No file is trusted.
"""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import PIL.Image
from pycocotools import mask as rle

from keras_vit import UserError
from keras_vit.errors import explained, shown
from keras_vit.files.documents import LARGEST, read_json
from keras_vit.files.labels import LABELS, read_labels
from keras_vit.files.schema import Schema, validated
from keras_vit.images import open_image
from keras_vit.images.formats import format_problem, orientation
from training.input.coco_masks import RunLengths, run_lengths
from training.input.listed_files import check_inside, check_listed, listed_file
from training.options.common import composed

# In the segments of a picture: pixels that belong to none, and those that are not counted, such as crowds.
NONE, UNCOUNTED = -1, -2
# Without a split of their own, every tenth picture by name is evaluated.
_HOLD_OUT = 10

# Fields of a file; the further ones of an annotation depend on its kind.
_CATEGORIES = [{"id": int, "name": str}]
_IMAGES = [{"id": int, "file_name": str}]
_ANNOTATIONS = [{"image_id": int, "category_id": int}]
# Of the segments of a panoptic PNG; 0 is none.
_PANOPTIC_IDS = range(1, 2**24)
_PANOPTIC = [{"image_id": int, "file_name": str, "segments_info": [{"id": int, "category_id": int}]}]


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
        np.array([_area(area, count) for area, count in stated], np.float64),
        segments,
        masks,
    )


def _area(stated: Any, pixels: float) -> float:
    """The area of a segment as its file states it, else its pixels."""
    return pixels if stated is None else number_of(stated, "the area of a segment")


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
    names, files, document = _names_and_files(file, folder, _PANOPTIC, allow_outside)
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
        _check_ids({segment.category for segment in segments.values()}, names, "category", file)
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
        np.array([_area(info.area, count) for info, count in zip(infos, pixels, strict=True)], np.float64),
        segments,
    )


def write_panoptic_png(segments: np.ndarray, path: pathlib.Path) -> None:
    """Write a map of segments (h, w), NONE for none, as a PNG in which segment n has the id n + 1."""
    ids = segments.astype(np.int64) + 1
    if not 0 <= ids.min() <= ids.max() <= _PANOPTIC_IDS[-1]:
        raise ValueError(f"Ids of segments are from 0 to {_PANOPTIC_IDS[-1]:,}, not {ids.min():,} to {ids.max():,}.")
    colors = np.stack([ids % 256, ids // 256 % 256, ids // 65_536], axis=-1).astype(np.uint8)
    PIL.Image.fromarray(colors).save(path)


@contextlib.contextmanager
def open_mask(path: pathlib.Path, size: tuple[int, int] | None, formats: Collection[str]) -> Iterator[PIL.Image.Image]:
    """Yield the image of a mask, which is decoded when its pixels are read.

    Raises UserError for a file that cannot be read, and one whose height and width, by its header, are not `size`.
    """
    unreadable = explained(lambda reason: f"its mask {path.name} cannot be read ({reason})", Exception)
    with unreadable, open_image(path, formats=formats) as image:  # decoders raise exceptions of many types
        if size is not None and image.size != size[::-1]:
            raise UserError(
                f"its mask {path.name} has {image.height}x{image.width} pixels, but the image {size[0]}x{size[1]}"
            )
        yield image


def png_samples(path: pathlib.Path) -> tuple[int, int]:
    """The bits of a sample and the color type (0 gray, 2 RGB, 3 palette) in the header of a PNG file."""
    with path.open("rb") as file:
        header = file.read(26)
    return header[24], header[25]


def upright_size(file: pathlib.Path, stated: tuple = (None, None)) -> tuple[int, int]:
    """Height and width in pixels of a picture as it is seen.

    Raises UserError if it is no picture that we read, or not of the size that an annotation states; zeros state none.
    """
    with explained(
        lambda reason: f"The picture {file} cannot be read ({reason}); repair it, or remove it and its annotation.",
        OSError,
        ValueError,
    ):
        data = file.read_bytes()
        if problem := format_problem(data):
            raise ValueError(problem)
        with open_image(data) as image:
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

"""`--data` of detection: images with boxes, read from a file of any of the formats, and checked. No TensorFlow.

COCO's are read by `coco.py`, those of CSV, Pascal VOC and Ultralytics' YOLO here. No file is trusted.

Every reader gives boxes as left, top, width and height in pixels of the upright image (turned by its EXIF orientation),
with the name or number of a class. All of them are checked here.
"""

import collections
import csv
import dataclasses
import io
import itertools
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_vit import UserError
from keras_vit.errors import reading, shown
from keras_vit.files.documents import LARGEST, is_number, read_text, read_xml, read_yaml, validated
from keras_vit.files.labels import composed, distinct_names
from keras_vit.files.tables import cell_of_csv
from keras_vit.images.formats import is_image_name, looks_like_image, visible_files
from keras_vit.run import Run
from training.data.annotations.coco import read_coco_boxes
from training.data.annotations.images import (
    Box,
    BoxedImage,
    BoxedImages,
    boxed_images,
    check_names,
    train_and_val,
    upright_size,
)
from training.data.listed_files import check_inside, check_listed, listed_file
from training.options.dense import BadBoxes, BoxesOptions

# Columns of a CSV file.
_SIDES = ("x", "y", "w", "h")
_COLUMNS = ("path", *_SIDES, "label")
_ROUNDING = 1.0  # pixels that a box may reach over the edge of its image by rounding
# Share of the image that the center and the size of a box may have at most, outside of it or not; above are pixels.
_LARGEST_SHARE = 1.5
_NO_VALUE: tuple = ("", "~", "null", "Null", "NULL", [], {})  # a value of a data.yaml that says nothing
_MOST_NAMED = 3  # files that a message names

# What is wrong with boxes in the units of another kind of file; it is refused where all boxes have it.
_SHARES = "with no value above 1, as if they were shares of the image instead of pixels"
_PIXELS = f"with a value above {_LARGEST_SHARE}, as if they were pixels instead of shares of the image"


@dataclasses.dataclass(frozen=True)
class BoxData:
    """Images with boxes to train and to evaluate on, and the names of their classes."""

    labels: tuple[str, ...]
    train: Sequence[BoxedImage]
    evaluation: Sequence[BoxedImage]
    """Those of the data themselves, such as val of a data.yaml; else every tenth image by name."""
    has_split: bool  # whether the evaluation images were not drawn
    kind: str  # coco, yolo, voc or csv

    @property
    def all(self) -> list[BoxedImage]:
        """All images."""
        return [*self.train, *self.evaluation]


def read_csv_boxes(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool) -> BoxedImages:
    """Read rows of path, x, y, w, h, label and perhaps group; one with a path alone for an image without objects."""
    boxes: dict[pathlib.Path, list[Box]] = {}
    group_of: dict[pathlib.Path, str] = {}
    for path, sides, label, group in _csv_rows(file):
        of_image = boxes.setdefault(image := listed_file(folder, path), [])
        group_of[image] = group_of.get(image) or group
        if label:
            x, y, w, h = map(float, sides)
            of_image.append(Box(composed(label), (x, y, w, h)))
    check_listed(boxes, file, folder, allow_outside)
    images = [BoxedImage(image, upright_size(image), own, group=group_of[image]) for image, own in boxes.items()]
    return boxed_images(images, file.parent)


def _csv_rows(file: pathlib.Path) -> Iterator[tuple[str, list[str], str, str]]:
    """Yield path, sides, label and group of the rows that are not empty; sides and label are empty without a box."""
    reader = csv.DictReader(io.StringIO(read_text(file, LARGEST), newline=""))
    with reading(file, "CSV", csv.Error):
        names = [name.strip().lower() for name in reader.fieldnames or ()]
        reader.fieldnames = names
        rows = [(reader.line_num, row) for row in reader]
    if any(names.count(name) != 1 for name in _COLUMNS):
        raise UserError(
            f"{file} should begin with the columns {','.join(_COLUMNS)}, once each and with commas between them, but "
            f"begins with {','.join(names)!r:.60}; correct it."
        )
    for number, row in rows:
        if not any(row.values()):
            continue
        is_whole = None not in row and None not in row.values()
        path, *sides, label = (cell_of_csv((row[name] or "").strip()) for name in _COLUMNS)
        is_box = label and all(map(is_number, sides))
        if not is_whole or not path or not (is_box or not any((*sides, label))):
            raise UserError(
                f"Line {number} of {file} should have {len(names)} values: the path of an image and, for a box, finite "
                "numbers as x, y, w and h, and a class; correct it."
            )
        yield path, sides, label, (row.get("group") or "").strip()


def read_voc_boxes(folder: pathlib.Path, _: pathlib.Path, allow_outside: bool) -> BoxedImages:
    """Read Annotations/a.xml for JPEGImages/a.jpg or images/a.jpg, or both kinds of files side by side.

    Pixels count from 1, as in VOC. An image without a file is not annotated, and is left out.
    """
    annotations = folder / "Annotations" if (folder / "Annotations").is_dir() else folder
    places = [folder / name for name in ("JPEGImages", "images", "Images") if (folder / name).is_dir()] or [folder]
    images = {composed(file.stem): file for place in places for file in place.iterdir() if is_image_name(file.name)}
    of_file = {file: composed(file.stem) for file in sorted(annotations.glob("*.xml"))}
    check_names({name: file for file, name in of_file.items()}, images, places[0])
    if others := images.keys() - set(of_file.values()):
        print(f"Left out, because they have no .xml: {len(others):,} images, such as {images[min(others)].name}.")
    check_inside([*of_file, *map(images.__getitem__, of_file.values())], folder, folder, allow_outside)
    return boxed_images([_voc_image(file, images[name]) for file, name in of_file.items()], folder)


def _voc_image(file: pathlib.Path, image: pathlib.Path) -> BoxedImage:
    root = read_xml(file)
    stated = [root.findtext(f"size/{side}", "0") for side in ("height", "width")]
    is_stated = all(map(is_number, stated))
    size = upright_size(image, tuple(round(float(text)) for text in stated) if is_stated else (None, None))
    boxes = []
    # The root of another kind of file is refused as an object.
    for element in root.findall("object") if root.tag == "annotation" else [root]:
        name, difficult = ((element.findtext(tag) or "").strip() for tag in ("name", "difficult"))
        edges = [element.findtext(f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax")]
        if not name or not all(map(is_number, edges)) or difficult not in ("", "0", "1"):
            raise UserError(
                f"Each object of the annotation {file} should have a name, a bndbox of four finite numbers, and 0 or 1 "
                f"as difficult, but one has {shown([name, *edges, difficult])}; correct or remove it."
            )
        left, top, right, bottom = (float(text or "") for text in edges)
        bbox = (left - 1, top - 1, right - left + 1, bottom - top + 1)
        boxes.append(Box(composed(name), bbox, is_difficult=difficult == "1"))
    return BoxedImage(image, size, boxes)


def read_yolo_boxes(file: pathlib.Path, _: pathlib.Path, allow_outside: bool) -> BoxedImages:
    """Read a data.yaml of Ultralytics: `names`, `train`, perhaps `val` or `test`, whose images have labels beside them.

    The labels of images/a.jpg are in labels/a.txt: in each line a class number, the center x and y, the width and the
    height, as shares of the image. An image without such a file has no objects.
    """
    fields = {name: value for name, value in validated(read_yaml(file), {}, file).items() if value not in _NO_VALUE}
    names: Any = fields.get("names")
    if isinstance(names, dict):  # numbered from 0 on
        names = [names.get(str(number)) for number in range(len(names))]
    places: dict[str, Any] = {"train": fields.get("train")}
    if evaluation := next((fields[name] for name in ("val", "test") if name in fields), None):
        places["val"] = evaluation
    places = {split: place if isinstance(place, list) else [place] for split, place in places.items()}
    schema = {"names": [str], "path": str} | {split: [str] for split in places}
    validated({"names": names, "path": fields.get("path", ""), **places}, schema, file)
    root = file.parent / fields.get("path", "")
    files = {split: _yolo_files(place, root, file, allow_outside) for split, place in places.items()}
    labels = {image: _yolo_labels(image) for images in files.values() for image in images}
    check_inside(filter(os.path.lexists, [*labels, *labels.values()]), file, file.parent, allow_outside)
    splits = {split: [_yolo_image(image, labels[image]) for image in images] for split, images in files.items()}
    return BoxedImages(tuple(map(composed, names)), splits)


def _yolo_files(places: list[str], root: pathlib.Path, file: pathlib.Path, allow_outside: bool) -> list[pathlib.Path]:
    """Return the images of folders, of text files that list them, or of several of these."""
    images: list[pathlib.Path] = []
    for name in places:
        # Roboflow writes ../train/images beside the folder train.
        paths = [listed_file(root, each) for each in dict.fromkeys((name.removeprefix("../"), name))]
        path = next(filter(os.path.exists, paths), paths[-1])
        check_inside([path], file, file.parent, allow_outside)
        if os.path.isdir(path):  # False, too, where a name is too long
            images += map(pathlib.Path, map(os.path.normpath, filter(looks_like_image, visible_files(path))))
        else:
            lines = filter(None, map(str.strip, read_text(path, LARGEST).splitlines()))
            images += [listed_file(path.parent, line) for line in lines]
    return sorted(dict.fromkeys(images))


def _yolo_labels(image: pathlib.Path) -> pathlib.Path:
    """Return the file with the boxes of an image, which need not exist."""
    parts = list(image.parts)
    if "images" in parts:  # the last of them, as Ultralytics
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return listed_file(pathlib.Path(*parts[:-1]), f"{image.stem}.txt")


def _yolo_image(image: pathlib.Path, labels: pathlib.Path) -> BoxedImage:
    height, width = upright_size(image)
    boxes = []
    for number, line in enumerate(read_text(labels).splitlines() if os.path.isfile(labels) else [], 1):
        words = line.split()
        if not words:
            continue
        values = [float(word) if is_number(word) else math.nan for word in words]
        if len(values) != 5 or not values[0].is_integer() or any(map(math.isnan, values)):
            raise UserError(
                f"Line {number} of {labels} should be a class number, center x and y, width and height, but is "
                f"{line.strip()!r:.60}; write it so, and polygons as boxes."
            )
        label, x, y, w, h = values
        boxes.append(Box(int(label), ((x - w / 2) * width, (y - h / 2) * height, w * width, h * height)))
    return BoxedImage(image, (height, width), boxes)


_READERS = {"coco": read_coco_boxes, "csv": read_csv_boxes, "voc": read_voc_boxes, "yolo": read_yolo_boxes}


def open_boxes(options: BoxesOptions, run: Run | None = None) -> BoxData:
    """Read what `--data` names; `run` as of `train_and_val`. Raises UserError for bad files and bad boxes."""
    path = options.path
    labels, splits = _READERS[options.kind](path, options.folder, options.allow_outside)
    splits = {name: sorted(images, key=lambda image: image.file) for name, images in splits.items()}
    if options.kind in ("yolo", "csv"):
        splits = _without_repeats(splits)
    _check_any_box(labels, splits, path)
    labels = distinct_names(labels, path)
    numbers: dict[str | int, int] = dict(zip(labels, range(len(labels)), strict=True))
    numbers |= {number: number for number in range(len(labels))}  # YOLO's
    boxes = [box for images in splits.values() for image in images for box in image.boxes]
    units = options.kind, all(_is_within_one(box) for box in boxes)
    wrong: dict[str, list[str]] = collections.defaultdict(list)
    checked = {name: [_checked(image, numbers, wrong, units) for image in images] for name, images in splits.items()}
    _report(wrong, options.bad_boxes, len(boxes))
    train, evaluation = train_and_val(checked, options, run)
    return BoxData(labels, train, evaluation, "val" in checked or train is evaluation, options.kind)


def _check_any_box(labels: Sequence[str], splits: Mapping[str, Sequence[BoxedImage]], path: pathlib.Path) -> None:
    """Raise UserError for data without classes, and without any box that is no crowd."""
    boxes = [box for image in itertools.chain.from_iterable(splits.values()) for box in image.boxes]
    if not labels or all(box.is_crowd for box in boxes):
        missing = "categories" if boxes and not labels else "box"
        raise UserError(f"{path} has no {missing}, so there is nothing to find; annotate some of its images.")


def _without_repeats(splits: Mapping[str, Sequence[BoxedImage]]) -> dict[str, list[BoxedImage]]:
    """Return the images without the rows that a file has twice; print how many there were."""
    repeated = collections.Counter[str]()
    kept: dict[str, list[BoxedImage]] = {}
    for name, images in splits.items():
        kept[name] = [dataclasses.replace(image, boxes=list(dict.fromkeys(image.boxes))) for image in images]
        for image, other in zip(images, kept[name], strict=True):
            repeated[str(image.file)] += len(image.boxes) - len(other.boxes)
    if files := [file for file in repeated if repeated[file]]:
        print(f"Repeated rows count once: {sum(repeated.values()):,}, such as one of {min(files)}.")
    return kept


def _checked(
    image: BoxedImage, numbers: Mapping[str | int, int], wrong: Mapping[str, list[str]], units: tuple[str, bool]
) -> BoxedImage:
    """Return the image with its boxes sorted, clipped, or left out; add to what is wrong."""
    (height, width), file = image.size, str(image.file)
    boxes = []
    for box in image.boxes:
        left, top, right, bottom = box.corners
        if box.label not in numbers:
            wrong["of an unknown class"].append(f"{shown(box.label)} in {file}")
            continue
        if problem := _other_units(box, image.size, *units):
            wrong[problem].append(file)
            continue
        if right < left or bottom < top:
            wrong["with swapped corners"].append(file)
            left, right, top, bottom = min(left, right), max(left, right), min(top, bottom), max(top, bottom)
            box = box._replace(bbox=(left, top, right - left, bottom - top))
        if right == left or bottom == top:
            wrong["without area"].append(file)
            continue
        if min(left, top) < -_ROUNDING or right > width + _ROUNDING or bottom > height + _ROUNDING:
            wrong["outside of the image"].append(file)
            left, right, top, bottom = max(left, 0.0), min(right, width), max(top, 0.0), min(bottom, height)
            if left >= right or top >= bottom:
                continue
            box = box._replace(bbox=(left, top, right - left, bottom - top), area=None)
        boxes.append(box._replace(label=numbers[box.label]))
    return dataclasses.replace(image, boxes=tuple(boxes))


def _other_units(box: Box, size: tuple[int, int], kind: str, all_within_one: bool) -> str | None:
    """Say what is wrong with a box in shares of the image in a file of pixels, or the other way round; else None.

    A box of whole numbers beside larger ones is a box of one pixel.
    """
    left, top, width, height = box.bbox
    if kind == "yolo":
        shares = (left + width / 2) / size[1], (top + height / 2) / size[0], width / size[1], height / size[0]
        return _PIXELS if max(shares) > _LARGEST_SHARE else None
    is_share = _is_within_one(box) and (all_within_one or any(number % 1 for number in box.bbox))
    return _SHARES if is_share and max(size) > 1 and min(width, height) > 0 else None


def _is_within_one(box: Box) -> bool:
    return max(box.bbox) <= 1.0 or max(box.corners) <= 1.0  # VOC's have 1 subtracted from left and top


def _report(wrong: Mapping[str, list[str]], mode: BadBoxes, count: int) -> None:
    """Print what was wrong, or raise UserError for it."""
    if not wrong:
        return
    listed = "; ".join(
        f"{len(names)} {what} ({', '.join(dict.fromkeys(names[:_MOST_NAMED]))}{', …' * (len(names) > _MOST_NAMED)})"
        for what, names in wrong.items()
    )
    is_of_other_units = count in (len(wrong.get(_SHARES, [])), len(wrong.get(_PIXELS, [])))
    if is_of_other_units or mode == "refuse":
        advice = "coco:, csv: and voc: take pixels, yolo: takes shares"
        if not is_of_other_units:
            advice = (
                "correct them, or give --bad-boxes clip, which cuts and sorts them, and leaves out what remains "
                "without area, class or unit"
            )
        raise UserError(f"Of {count:,} boxes, {listed}; {advice}.")
    print(f"Corrected or left out, of {count:,} boxes: {listed}.")

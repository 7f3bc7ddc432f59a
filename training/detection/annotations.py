"""Pictures with boxes: read from COCO JSON, YOLO, Pascal VOC or a CSV file, and checked. Imports no TensorFlow.

Every reader gives boxes as left, top, right and bottom in pixels of the upright picture (turned by its EXIF
orientation), with the name or number of a class. `open_boxes` checks all of them in one place. No file is trusted.
"""

import collections
import csv
import dataclasses
import io
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from keras_vit import UserError
from keras_vit.errors import is_or_are, reading, shown
from keras_vit.files.documents import LARGEST, read_text, read_xml, read_yaml
from keras_vit.files.labels import distinct_names
from keras_vit.files.schema import validated
from keras_vit.images.formats import is_picture, is_picture_name, visible_files
from training.input.coco import (
    check_listed,
    held_out,
    number_of,
    own_labels,
    read_coco,
    upright_size,
)
from training.options.detect import BadBoxes, BoxesOptions

# A value of a data.yaml that says nothing.
_NO_VALUE = ("", "~", "null", "Null", "NULL", [], {})
# Pixels that a box may reach over the edge of its picture by rounding.
_ROUNDING = 1.0
# Of what is wrong, how many are named.
_MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture with its boxes, perhaps none."""

    file: pathlib.Path
    size: tuple[int, int]
    """Height and width in pixels, upright."""
    corners: np.ndarray
    """(n, 4) float32: left, top, right, bottom in pixels, inside of the picture."""
    classes: np.ndarray
    """(n,) int32."""


@dataclasses.dataclass(frozen=True)
class BoxData:
    """Pictures with boxes to train and to evaluate on, and the names of their classes."""

    labels: tuple[str, ...]
    train: tuple[Picture, ...]
    evaluation: tuple[Picture, ...]
    """Those of the data themselves, such as val of a data.yaml; else every tenth picture by name."""
    has_split: bool

    @property
    def all(self) -> tuple[Picture, ...]:
        """All pictures."""
        return self.train + self.evaluation


class Box(NamedTuple):
    """A box as a file has it, unchecked."""

    label: str | int
    corners: tuple[float, float, float, float]


class Annotated(NamedTuple):
    """A picture as a file annotates it."""

    file: pathlib.Path
    size: tuple[int, int]
    boxes: list[Box]


def open_boxes(options: BoxesOptions) -> BoxData:
    """Read what `--data` names. Raises UserError for files that cannot be read, and for bad boxes unless clipped."""
    path, folder = options.path, pathlib.Path(options.images or options.path.parent)
    if options.kind == "yolo":
        labels, splits = _yolo(path)
    else:
        read = {"voc": _voc, "csv": lambda file: _csv(file, folder), "coco": lambda file: _coco(file, folder)}
        labels, pictures = read[options.kind](path)
        splits = {"train": sorted(pictures)}
        if not labels and options.kind != "coco":
            labels = tuple(sorted({str(box.label) for picture in pictures for box in picture.boxes}))
    count = sum(len(picture.boxes) for each in splits.values() for picture in each)
    if not labels or not count:
        missing = "box" if not count else "categories"
        raise UserError(f"{path} has no {missing}, so there is nothing to find; annotate some of its pictures.")
    labels = distinct_names(labels, path)
    numbers: dict[str | int, int] = {name: number for number, name in enumerate(labels)}
    numbers |= {number: number for number in range(len(labels))}  # YOLO's
    wrong: dict[str, list[str]] = collections.defaultdict(list)
    checked = {name: tuple(_picture(picture, numbers, wrong) for picture in split) for name, split in splits.items()}
    _report(wrong, options.bad_boxes, count)
    if "val" in checked:
        if both := {picture.file for picture in checked["train"]} & {picture.file for picture in checked["val"]}:
            print(f"{len(both)} of the evaluation pictures are also trained on, which flatters the detector.")
        return BoxData(labels, checked["train"], checked["val"], has_split=True)
    train, evaluation = held_out(checked["train"], path)
    return BoxData(labels, tuple(train), tuple(evaluation), has_split=False)


def _picture(picture: Annotated, numbers: Mapping[str | int, int], wrong: Mapping[str, list[str]]) -> Picture:
    """The picture with its boxes sorted, clipped, or left out; adds to what is wrong."""
    height, width = picture.size
    corners, classes = [], []
    for label, (left, top, right, bottom) in picture.boxes:
        if label not in numbers:
            wrong["of an unknown class"].append(f"{label!r:.40} in {picture.file}")
            continue
        if right < left or bottom < top:
            wrong["with swapped corners"].append(str(picture.file))
        left, right, top, bottom = min(left, right), max(left, right), min(top, bottom), max(top, bottom)
        if right == left or bottom == top:
            wrong["without area"].append(str(picture.file))
            continue
        if min(left, top) < -_ROUNDING or right > width + _ROUNDING or bottom > height + _ROUNDING:
            wrong["outside of the picture"].append(str(picture.file))
        box = [max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))]
        if box[0] < box[2] and box[1] < box[3]:
            corners.append(box)
            classes.append(numbers[label])
    boxes = np.array(corners, np.float32).reshape(-1, 4)
    return Picture(picture.file, picture.size, boxes, np.array(classes, np.int32))


def _report(wrong: Mapping[str, list[str]], mode: BadBoxes, count: int) -> None:
    """Print what was wrong, or raise UserError for it."""
    if not wrong:
        return
    kinds = "; ".join(
        f"{len(names)} {kind} ({', '.join(dict.fromkeys(names[:_MOST_NAMED]))}{', …' * (len(names) > _MOST_NAMED)})"
        for kind, names in wrong.items()
    )
    if mode == "refuse":
        raise UserError(
            f"Of {count:,} boxes, {kinds}; correct them, or give --bad-boxes clip, which cuts and sorts them, and "
            "leaves out what remains without area or class."
        )
    print(f"Of {count:,} boxes, cut, sorted or left out: {kinds}.")


def _yolo(file: pathlib.Path) -> tuple[tuple[str, ...], dict[str, list[Annotated]]]:
    """A data.yaml of Ultralytics: `names`, `train`, perhaps `val` or `test`, whose pictures have labels beside them.

    The labels of images/a.jpg are in labels/a.txt: in each line a class number, the centre x and y, the width and the
    height, as shares of the picture. A picture without such a file has no objects.
    """
    fields = {name: value for name, value in validated(read_yaml(file), {}, file).items() if value not in _NO_VALUE}
    names = fields.get("names")
    listed = names
    if isinstance(names, dict) and names.keys() == {str(number) for number in range(len(names))}:
        listed = [names[str(number)] for number in range(len(names))]
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise UserError(
            f"{file} should list the names of its classes as names, or number them from 0 on, but has {shown(names)}; "
            "correct it."
        )
    evaluation = next((fields[name] for name in ("val", "test") if name in fields), None)
    named = {"train": fields.get("train")} | ({} if evaluation is None else {"val": evaluation})
    places = {split: place if isinstance(place, list) else [place] for split, place in named.items()}
    validated(places, {split: [str] for split in places}, file)
    root = file.parent / validated(fields.get("path", ""), str, file, "path")
    return tuple(listed), {
        split: [_yolo_picture(picture) for picture in _yolo_files(place, root, file)] for split, place in places.items()
    }


def _yolo_files(places: list[str], root: pathlib.Path, file: pathlib.Path) -> list[pathlib.Path]:
    """The pictures of folders, of text files that list them, or of several of these."""
    found: list[pathlib.Path] = []
    for name in places:
        # Roboflow writes ../train/images beside the folder train.
        path = next((each for each in (root / name, root / name.removeprefix("../")) if each.exists()), root / name)
        if path.is_dir():
            found += filter(is_picture, visible_files(path))
        else:
            lines = filter(None, map(str.strip, read_text(path, LARGEST).splitlines()))
            found += [path.parent / line for line in lines]
    if not found:
        raise UserError(f"{file} names {shown(places)}, but no picture is there; correct its path.")
    return sorted(dict.fromkeys(found))


def _yolo_picture(picture: pathlib.Path) -> Annotated:
    height, width = upright_size(picture)
    parts = list(picture.parts)
    if "images" in parts:  # the last of them, as Ultralytics
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    labels = pathlib.Path(*parts).with_suffix(".txt")
    boxes = []
    for number, line in enumerate(read_text(labels).splitlines() if labels.is_file() else [], 1):
        if not line.strip():
            continue
        words = line.split()
        if len(words) != 5 or not re.fullmatch(r"-?\d+(\.0*)?", words[0], re.ASCII):
            raise UserError(
                f"Line {number} of {labels} should be a class number, centre x and y, width and height, but is "
                f"{line.strip()!r:.60}; write it so, and polygons as boxes."
            )
        label, x, y, w, h = (number_of(word, f"Each word of line {number} of {labels}") for word in words)
        corners = ((x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height)
        boxes.append(Box(int(label), corners))
    return Annotated(picture, (height, width), boxes)


def _voc(folder: pathlib.Path) -> tuple[tuple[str, ...], list[Annotated]]:
    """Pascal VOC: Annotations/a.xml for JPEGImages/a.jpg or images/a.jpg, or both kinds of files side by side.

    Pixels count from 1, as in VOC. A picture without a file is not annotated, and is left out.
    """
    annotations = folder / "Annotations" if (folder / "Annotations").is_dir() else folder
    places = [folder / name for name in ("JPEGImages", "images", "Images") if (folder / name).is_dir()] or [folder]
    files = sorted(annotations.glob("*.xml"))
    if not files:
        raise UserError(f"{annotations} should hold a file .xml for each picture, but has none; correct the path.")
    pictures = {file.stem: file for place in places for file in place.iterdir() if is_picture_name(file.name)}
    if missing := [file.name for file in files if file.stem not in pictures]:
        raise UserError(
            f"{len(missing)} of {len(files)} files in {annotations} {is_or_are(len(missing))} of no picture in "
            f"{places[0]}: {', '.join(missing[:_MOST_NAMED])}; add the pictures, or remove the files."
        )
    if others := pictures.keys() - {file.stem for file in files}:
        print(f"Left out, since no .xml annotates them: {len(others)} pictures such as {pictures[min(others)].name}.")
    return own_labels(folder), [_voc_picture(file, pictures[file.stem]) for file in files]


def _voc_picture(file: pathlib.Path, picture: pathlib.Path) -> Annotated:
    root = read_xml(file)
    if root.tag != "annotation":
        raise UserError(f"{file} should be an <annotation> of Pascal VOC, but is a <{root.tag:.40}>; remove it.")
    stated = [root.findtext(f"size/{side}", "0") for side in ("height", "width")]
    size = upright_size(picture, tuple(round(number_of(text, f"The size in {file}")) for text in stated))
    boxes = []
    for element in root.findall("object"):
        name = (element.findtext("name") or "").strip()
        edges = [element.findtext(f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax")]
        if not name or None in edges:
            raise UserError(f"Each object of {file} should have a name and a bndbox of four edges; correct it.")
        left, top, right, bottom = (number_of(text, f"Each edge in {file}") for text in edges)
        boxes.append(Box(name, (left - 1, top - 1, right, bottom)))
    return Annotated(picture, size, boxes)


def _csv(file: pathlib.Path, folder: pathlib.Path) -> tuple[tuple[str, ...], list[Annotated]]:
    """A row for each box: path, x, y, w, h, label; one with a path alone for a picture without objects."""
    boxes: dict[str, list[Box]] = {}
    for number, row in _csv_rows(file):
        of_picture, texts = boxes.setdefault(row["path"], []), [row[name] for name in ("x", "y", "w", "h")]
        has_box = any((*texts, row["label"]))
        if not row["path"] or (has_box and not row["label"]):
            raise UserError(f"Line {number} of {file} should name a picture, and the class of a box; complete it.")
        if not has_box:
            continue
        x, y, w, h = (number_of(text, f"Each of x, y, w and h in line {number} of {file}") for text in texts)
        of_picture.append(Box(row["label"], (x, y, x + w, y + h)))
    check_listed([folder / name for name in boxes], file, folder)
    return own_labels(folder), [
        Annotated(folder / name, upright_size(folder / name), found) for name, found in boxes.items()
    ]


def _csv_rows(file: pathlib.Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    reader = csv.reader(io.StringIO(read_text(file, LARGEST), newline=""))
    needed = ("path", "x", "y", "w", "h", "label")
    with reading(file, "CSV", csv.Error):
        header, *rows = [(reader.line_num, row) for row in reader] or [(1, [])]
    names = [name.strip().lower() for name in header[1]]
    if any(names.count(name) != 1 for name in needed):
        raise UserError(
            f"{file} should begin with the columns {','.join(needed)}, once each and with commas between them, but "
            f"begins with {','.join(names)!r:.60}; correct it."
        )
    for number, row in rows:
        if any(row):
            if len(row) != len(names):
                raise UserError(
                    f"Line {number} of {file} has {len(row)} values, but the header {len(names)}; correct it."
                )
            yield number, {name: text.strip() for name, text in zip(names, row, strict=True)}


def _coco(file: pathlib.Path, folder: pathlib.Path) -> tuple[tuple[str, ...], list[Annotated]]:
    """An instances.json of COCO: `images`, `annotations` with a bbox, `categories`. Crowds are left out."""
    coco = read_coco(file, folder)
    pictures = []
    for picture in coco.pictures:
        boxes = []
        for each in picture.objects:
            if not isinstance(each.box, list) or len(each.box) != 4:
                raise UserError(
                    f"A bbox in {file} should be left, top, width and height, but is {shown(each.box)}; correct it."
                )
            x, y, w, h = (number_of(side, f"Each number of a bbox in {file}") for side in each.box)
            if not each.is_crowd:
                boxes.append(Box(coco.names.get(each.category, f"category {each.category}"), (x, y, x + w, y + h)))
        pictures.append(Annotated(picture.file, upright_size(picture.file, picture.stated_size), boxes))
    return tuple(coco.names[number] for number in sorted(coco.names)), pictures

"""Images with boxes: read from COCO JSON, YOLO, Pascal VOC or a CSV file, and checked. Imports no TensorFlow.

Every reader gives boxes as left, top, width and height in pixels of the upright image (turned by its EXIF orientation),
with the name or number of a class. `open_boxes` checks all of them in one place. No file is trusted.
"""

import collections
import csv
import dataclasses
import functools
import io
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from keras_vit import UserError
from keras_vit.errors import is_or_are, reading, shown
from keras_vit.files.documents import LARGEST, read_text, read_xml, read_yaml
from keras_vit.files.labels import distinct_names
from keras_vit.files.schema import validated
from keras_vit.files.tables import cell_of_csv
from keras_vit.images.formats import is_picture, is_picture_name, visible_files
from training.input.coco import held_out, number_of, own_labels, read_coco, upright_size
from training.input.listed_files import check_inside, check_listed, listed_file
from training.options.common import composed
from training.options.detect import BadBoxes, BoxesOptions

# A value of a data.yaml that says nothing.
_NO_VALUE: tuple = ("", "~", "null", "Null", "NULL", [], {})
# Pixels that a box may reach over the edge of its image by rounding.
_ROUNDING = 1.0
# Share of the image that the center and the size of a box may have at most, outside of it or not; above are pixels.
_LARGEST_SHARE = 1.5
# Of what is wrong, how many are named.
_MOST_NAMED = 3


class Box(NamedTuple):
    """An object as its file annotates it; unchecked before `open_boxes`."""

    label: str | int
    """Name or number of the class; after the check the number."""
    bbox: tuple[float, float, float, float]
    """Left, top, width and height in pixels of the upright image, as the file has them or, in a YOLO file, means."""
    area: float | None = None
    """Pixels of the object, if the file states them; else those of the box count."""
    is_crowd: bool = False
    """Whether it is a group in which no object is marked, COCO's iscrowd. It is no target of training."""
    is_difficult: bool = False
    """Whether it counts neither as found nor as missed, VOC's difficult."""

    @property
    def corners(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom in pixels."""
        left, top, width, height = self.bbox
        return left, top, left + width, top + height


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image with its boxes, perhaps none."""

    file: pathlib.Path
    size: tuple[int, int]
    """Height and width in pixels, upright."""
    boxes: tuple[Box, ...]
    """All that the file annotates, in its order: the truth of an evaluation."""
    id: int = 0
    """Of the image in a COCO file, whose order decides between equal scores."""

    @functools.cached_property
    def targets(self) -> tuple[np.ndarray, np.ndarray]:
        """What training is for: corners (n, 4) float32 inside of the image, in pixels, and classes (n,) int32."""
        boxes = [box for box in self.boxes if not box.is_crowd]
        corners = np.array([box.corners for box in boxes]).reshape(-1, 4)
        corners = np.clip(corners, 0, [*self.size[::-1]] * 2)
        has_area = (corners[:, :2] < corners[:, 2:]).all(axis=1)
        return corners[has_area].astype(np.float32), np.array([box.label for box in boxes], np.int32)[has_area]

    @property
    def corners(self) -> np.ndarray:
        """(n, 4) float32 of `targets`."""
        return self.targets[0]

    @property
    def classes(self) -> np.ndarray:
        """(n,) int32 of `targets`."""
        return self.targets[1]


@dataclasses.dataclass(frozen=True)
class BoxData:
    """Images with boxes to train and to evaluate on, and the names of their classes."""

    labels: tuple[str, ...]
    train: tuple[Picture, ...]
    evaluation: tuple[Picture, ...]
    """Those of the data themselves, such as val of a data.yaml; else every tenth image by name."""
    has_split: bool
    kind: str
    """coco, yolo, voc or csv."""

    @property
    def all(self) -> tuple[Picture, ...]:
        """All images."""
        return self.train + self.evaluation


class Annotated(NamedTuple):
    """An image as a file annotates it."""

    file: pathlib.Path
    size: tuple[int, int]
    boxes: list[Box]
    id: int = 0


def open_boxes(options: BoxesOptions) -> BoxData:
    """Read what `--data` names. Raises UserError for files that cannot be read, and for bad boxes unless clipped."""
    path, folder = options.path, pathlib.Path(options.images or options.path.parent)
    allow, kind = options.allow_outside, options.kind
    if kind == "yolo":
        labels, splits = _yolo(path, allow)
    else:
        read = {
            "voc": lambda: _voc(path, allow), "csv": lambda: _csv(path, folder, allow),
            "coco": lambda: _coco(path, folder, allow),
        }  # fmt: skip
        labels, pictures = read[kind]()
        splits = {"train": sorted(pictures, key=lambda picture: picture.file)}
        if not labels and kind != "coco":
            labels = tuple(sorted({str(box.label) for picture in pictures for box in picture.boxes}))
    if kind in ("yolo", "csv"):
        splits = _without_repeats(splits)
    count = sum(len(picture.boxes) for each in splits.values() for picture in each)
    if not labels or all(box.is_crowd for each in splits.values() for picture in each for box in picture.boxes):
        missing = "categories" if count and not labels else "box"
        raise UserError(f"{path} has no {missing}, so there is nothing to find; annotate some of its images.")
    labels = distinct_names(labels, path)
    numbers: dict[str | int, int] = {name: number for number, name in enumerate(labels)}
    numbers |= {number: number for number in range(len(labels))}  # YOLO's
    wrong: dict[str, list[str]] = collections.defaultdict(list)
    checked = {
        name: tuple(_picture(picture, numbers, wrong, kind) for picture in split) for name, split in splits.items()
    }
    _report(wrong, options.bad_boxes, count)
    if "val" in checked:
        if both := {picture.file for picture in checked["train"]} & {picture.file for picture in checked["val"]}:
            print(f"{len(both)} of the evaluation images are also trained on, which flatters the detector.")
        return BoxData(labels, checked["train"], checked["val"], has_split=True, kind=kind)
    train, evaluation = held_out(checked["train"], path)
    return BoxData(labels, tuple(train), tuple(evaluation), has_split=False, kind=kind)


def _without_repeats(splits: Mapping[str, Sequence[Annotated]]) -> dict[str, list[Annotated]]:
    """The images without the rows that a file has twice; says how many there were."""
    kept = {
        name: [image._replace(boxes=list(dict.fromkeys(image.boxes))) for image in images]
        for name, images in splits.items()
    }
    counts = collections.Counter(
        {str(image.file): len(image.boxes) for images in splits.values() for image in images}
    ) - collections.Counter({str(image.file): len(image.boxes) for images in kept.values() for image in images})
    if counts:
        print(f"{counts.total()} rows repeat another one, such as of {min(counts)}; they count once.")
    return kept


# What is wrong with boxes in the units of another kind of file; it is refused where all boxes have it.
_SHARES = "with no value above 1, as if they were shares of the image instead of pixels"
_PIXELS = f"with a value above {_LARGEST_SHARE}, as if they were pixels instead of shares of the image"


def _picture(
    picture: Annotated, numbers: Mapping[str | int, int], wrong: Mapping[str, list[str]], kind: str
) -> Picture:
    """The image with its boxes sorted, clipped, or left out; adds to what is wrong."""
    height, width = picture.size
    boxes = []
    for box in picture.boxes:
        left, top, right, bottom = box.corners
        if box.label not in numbers:
            wrong["of an unknown class"].append(f"{shown(box.label)} in {picture.file}")
            continue
        if problem := _other_units(box, picture.size, kind):
            wrong[problem].append(str(picture.file))
            continue
        if right < left or bottom < top:
            wrong["with swapped corners"].append(str(picture.file))
            left, right, top, bottom = min(left, right), max(left, right), min(top, bottom), max(top, bottom)
            box = box._replace(bbox=(left, top, right - left, bottom - top))
        if right == left or bottom == top:
            wrong["without area"].append(str(picture.file))
            continue
        if min(left, top) < -_ROUNDING or right > width + _ROUNDING or bottom > height + _ROUNDING:
            wrong["outside of the picture"].append(str(picture.file))
            left, right, top, bottom = max(left, 0.0), min(right, width), max(top, 0.0), min(bottom, height)
            if left >= right or top >= bottom:
                continue
            box = box._replace(bbox=(left, top, right - left, bottom - top), area=None)
        boxes.append(box._replace(label=numbers[box.label]))
    return Picture(picture.file, picture.size, tuple(boxes), picture.id)


def _other_units(box: Box, size: tuple[int, int], kind: str) -> str | None:
    """What is wrong with a box that is in shares of the image in a file of pixels, or the other way round."""
    left, top, width, height = box.bbox
    if kind == "yolo":
        shares = (left + width / 2) / size[1], (top + height / 2) / size[0], width / size[1], height / size[0]
        return _PIXELS if max(shares) > _LARGEST_SHARE else None
    is_share = max(box.bbox) <= 1.0 or max(box.corners) <= 1.0  # VOC's have 1 subtracted from left and top
    return _SHARES if is_share and max(size) > 1 and min(width, height) > 0 else None


def _report(wrong: Mapping[str, list[str]], mode: BadBoxes, count: int) -> None:
    """Print what was wrong, or raise UserError for it."""
    if not wrong:
        return
    kinds = "; ".join(
        f"{len(names)} {kind} ({', '.join(dict.fromkeys(names[:_MOST_NAMED]))}{', …' * (len(names) > _MOST_NAMED)})"
        for kind, names in wrong.items()
    )
    if count in (len(wrong.get(_SHARES, [])), len(wrong.get(_PIXELS, []))):
        raise UserError(f"Of {count:,} boxes, {kinds}; coco:, csv: and voc: take pixels, yolo: takes shares.")
    if mode == "refuse":
        raise UserError(
            f"Of {count:,} boxes, {kinds}; correct them, or give --bad-boxes clip, which cuts and sorts them, and "
            "leaves out what remains without area, class or unit."
        )
    print(f"Of {count:,} boxes, cut, sorted or left out: {kinds}.")


def _yolo(file: pathlib.Path, allow_outside: bool = False) -> tuple[tuple[str, ...], dict[str, list[Annotated]]]:
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
    places: dict[str, list] = {split: place if isinstance(place, list) else [place] for split, place in named.items()}
    validated(places, {split: [str] for split in places}, file)
    root = file.parent / validated(fields.get("path", ""), str, file, "path")
    files = {split: _yolo_files(place, root, file, allow_outside) for split, place in places.items()}
    labels = {image: _yolo_labels(image) for images in files.values() for image in images}
    check_inside(filter(os.path.lexists, [*labels, *labels.values()]), file, file.parent, allow_outside)
    return tuple(map(composed, listed)), {
        split: [_yolo_picture(image, labels[image]) for image in images] for split, images in files.items()
    }


def _yolo_files(places: list[str], root: pathlib.Path, file: pathlib.Path, allow_outside: bool) -> list[pathlib.Path]:
    """The images of folders, of text files that list them, or of several of these."""
    found: list[pathlib.Path] = []
    for name in places:
        # Roboflow writes ../train/images beside the folder train.
        paths = [listed_file(root, each) for each in dict.fromkeys((name.removeprefix("../"), name))]
        path = next(filter(os.path.exists, paths), paths[-1])
        check_inside([path], file, file.parent, allow_outside)
        if path.is_dir():
            found += map(pathlib.Path, map(os.path.normpath, filter(is_picture, visible_files(path))))
        else:
            lines = filter(None, map(str.strip, read_text(path, LARGEST).splitlines()))
            found += [listed_file(path.parent, line) for line in lines]
    if not found:
        raise UserError(f"{file} names {shown(places)}, but no image is there; correct its path.")
    return sorted(dict.fromkeys(found))


def _yolo_labels(image: pathlib.Path) -> pathlib.Path:
    """The file with the boxes of an image, which need not exist."""
    parts = list(image.parts)
    if "images" in parts:  # the last of them, as Ultralytics
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return listed_file(pathlib.Path(*parts[:-1]), f"{image.stem}.txt")


def _yolo_picture(picture: pathlib.Path, labels: pathlib.Path) -> Annotated:
    height, width = upright_size(picture)
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
        boxes.append(Box(int(label), ((x - w / 2) * width, (y - h / 2) * height, w * width, h * height)))
    return Annotated(picture, (height, width), boxes)


def _voc(folder: pathlib.Path, allow_outside: bool) -> tuple[tuple[str, ...], list[Annotated]]:
    """Pascal VOC: Annotations/a.xml for JPEGImages/a.jpg or images/a.jpg, or both kinds of files side by side.

    Pixels count from 1, as in VOC. A picture without a file is not annotated, and is left out.
    """
    annotations = folder / "Annotations" if (folder / "Annotations").is_dir() else folder
    places = [folder / name for name in ("JPEGImages", "images", "Images") if (folder / name).is_dir()] or [folder]
    files = sorted(annotations.glob("*.xml"))
    if not files:
        raise UserError(f"{annotations} should hold a file .xml for each picture, but has none; correct the path.")
    pictures = {composed(file.stem): file for place in places for file in place.iterdir() if is_picture_name(file.name)}
    of_file = {file: composed(file.stem) for file in files}
    if missing := [file.name for file, name in of_file.items() if name not in pictures]:
        raise UserError(
            f"{len(missing)} of {len(files)} files in {annotations} {is_or_are(len(missing))} of no picture in "
            f"{places[0]}: {', '.join(missing[:_MOST_NAMED])}; add the pictures, or remove the files."
        )
    if others := pictures.keys() - set(of_file.values()):
        print(f"Left out, since no .xml annotates them: {len(others)} pictures such as {pictures[min(others)].name}.")
    check_inside([*files, *map(pictures.__getitem__, of_file.values())], folder, folder, allow_outside)
    return own_labels(folder), [_voc_picture(file, pictures[name]) for file, name in of_file.items()]


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
        difficult = (element.findtext("difficult") or "0").strip()
        if difficult not in ("0", "1"):
            raise UserError(f"difficult in {file} should be 0 or 1, but is {shown(difficult)}; correct it.")
        bbox = (left - 1, top - 1, right - left + 1, bottom - top + 1)
        boxes.append(Box(composed(name), bbox, is_difficult=difficult == "1"))
    return Annotated(picture, size, boxes)


def _csv(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool) -> tuple[tuple[str, ...], list[Annotated]]:
    """A row for each box: path, x, y, w, h, label; one with a path alone for a picture without objects."""
    boxes: dict[pathlib.Path, list[Box]] = {}
    for number, row in _csv_rows(file):
        of_picture = boxes.setdefault(listed_file(folder, row["path"]), [])
        texts = [row[name] for name in ("x", "y", "w", "h")]
        has_box = any((*texts, row["label"]))
        if not row["path"] or (has_box and not row["label"]):
            raise UserError(f"Line {number} of {file} should name a picture, and the class of a box; complete it.")
        if not has_box:
            continue
        x, y, w, h = (number_of(text, f"Each of x, y, w and h in line {number} of {file}") for text in texts)
        of_picture.append(Box(composed(row["label"]), (x, y, w, h)))
    check_listed(boxes, file, folder, allow_outside)
    return own_labels(folder), [Annotated(image, upright_size(image), found) for image, found in boxes.items()]


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
            yield number, {name: cell_of_csv(text.strip()) for name, text in zip(names, row, strict=True)}


def _coco(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool) -> tuple[tuple[str, ...], list[Annotated]]:
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
    return tuple(coco.names[number] for number in sorted(coco.names)), pictures

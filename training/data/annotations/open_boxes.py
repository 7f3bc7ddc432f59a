"""`--data` of detection: images with boxes, read from a file of any of the formats, and checked. No TensorFlow.

Every reader gives boxes as left, top, width and height in pixels of the upright image (turned by its EXIF orientation),
with the name or number of a class. All of them are checked here.
"""

import collections
import csv
import dataclasses
import io
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from keras_vit import UserError
from keras_vit.errors import reading, shown
from keras_vit.files.documents import LARGEST, is_number, read_text
from keras_vit.files.labels import composed, distinct_names
from keras_vit.files.tables import cell_of_csv
from training.data.annotations.coco import read_coco_boxes
from training.data.annotations.images import Box, BoxedImage, BoxedImages, boxed_images, train_and_val, upright_size
from training.data.annotations.voc import read_voc_boxes
from training.data.annotations.yolo import read_yolo_boxes
from training.data.listed_files import check_listed, listed_file
from training.options.dense import BadBoxes, BoxesOptions

# Columns of a CSV file.
_SIDES = ("x", "y", "w", "h")
_COLUMNS = ("path", *_SIDES, "label")
# Pixels that a box may reach over the edge of its image by rounding.
_ROUNDING = 1.0
# Share of the image that the center and the size of a box may have at most, outside of it or not; above are pixels.
_LARGEST_SHARE = 1.5
# Files that a message names.
_MOST_NAMED = 3

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
    has_split: bool
    kind: str
    """coco, yolo, voc or csv."""

    @property
    def all(self) -> list[BoxedImage]:
        """All images."""
        return [*self.train, *self.evaluation]


def read_csv_boxes(file: pathlib.Path, folder: pathlib.Path, allow_outside: bool) -> BoxedImages:
    """Read a row for each box: path, x, y, w, h, label; one with a path alone for an image without objects."""
    boxes: dict[pathlib.Path, list[Box]] = {}
    for path, sides, label in _csv_rows(file):
        of_image = boxes.setdefault(listed_file(folder, path), [])
        if label:
            x, y, w, h = map(float, sides)
            of_image.append(Box(composed(label), (x, y, w, h)))
    check_listed(boxes, file, folder, allow_outside)
    return boxed_images([BoxedImage(image, upright_size(image), own) for image, own in boxes.items()], folder)


def _csv_rows(file: pathlib.Path) -> Iterator[tuple[str, list[str], str]]:
    """Yield path, sides and label of the rows that are not empty; sides and label are empty without a box."""
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
        yield path, sides, label


_READERS = {"coco": read_coco_boxes, "csv": read_csv_boxes, "voc": read_voc_boxes, "yolo": read_yolo_boxes}


def open_boxes(options: BoxesOptions) -> BoxData:
    """Read what `--data` names. Raises UserError for files that cannot be read, and for bad boxes unless clipped."""
    path, folder = options.path, pathlib.Path(options.images or options.path.parent)
    labels, splits = _READERS[options.kind](path, folder, options.allow_outside)
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
    train, evaluation = train_and_val(checked, path)
    if both := {image.file for image in train} & {image.file for image in evaluation}:
        print(f"{len(both)} of the evaluation images are also trained on, which flatters the detector.")
    return BoxData(labels, train, evaluation, "val" in checked, options.kind)


def _check_any_box(labels: Sequence[str], splits: Mapping[str, Sequence[BoxedImage]], path: pathlib.Path) -> None:
    """Raise UserError for data without classes, and without any box that is no crowd."""
    boxes = [box for image in itertools.chain.from_iterable(splits.values()) for box in image.boxes]
    if not labels or all(box.is_crowd for box in boxes):
        missing = "categories" if boxes and not labels else "box"
        raise UserError(f"{path} has no {missing}, so there is nothing to find; annotate some of its images.")


def _without_repeats(splits: Mapping[str, Sequence[BoxedImage]]) -> dict[str, list[BoxedImage]]:
    """Return the images without the rows that a file has twice; print how many there were."""
    repeated: dict[str, int] = {}
    kept: dict[str, list[BoxedImage]] = {}
    for name, images in splits.items():
        kept[name] = [dataclasses.replace(image, boxes=list(dict.fromkeys(image.boxes))) for image in images]
        for image, other in zip(images, kept[name], strict=True):
            if count := len(image.boxes) - len(other.boxes):
                repeated[str(image.file)] = repeated.get(str(image.file), 0) + count
    if repeated:
        print(f"{sum(repeated.values())} rows repeat another one, such as of {min(repeated)}; they count once.")
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
    print(f"Of {count:,} boxes, cut, sorted or left out: {listed}.")

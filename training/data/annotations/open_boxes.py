"""`--data` of detection: images with boxes, read from a file of any of the formats, and checked. No TensorFlow.

Every reader gives boxes as left, top, width and height in pixels of the upright image (turned by its EXIF orientation),
with the name or number of a class. All of them are checked here.
"""

import collections
import pathlib
from collections.abc import Mapping, Sequence

from keras_vit import UserError
from keras_vit.errors import shown
from keras_vit.files.labels import distinct_names
from training.data.annotations.boxes import Annotated, Box, BoxData, Picture
from training.data.annotations.coco import read_coco_boxes
from training.data.annotations.csv_boxes import read_csv_boxes
from training.data.annotations.listed_images import held_out
from training.data.annotations.voc import read_voc_boxes
from training.data.annotations.yolo import read_yolo_boxes
from training.options.detect import BadBoxes, BoxesOptions

# Pixels that a box may reach over the edge of its image by rounding.
_ROUNDING = 1.0
# Share of the image that the center and the size of a box may have at most, outside of it or not; above are pixels.
_LARGEST_SHARE = 1.5
# Files that a message names.
_MOST_NAMED = 3

# What is wrong with boxes in the units of another kind of file; it is refused where all boxes have it.
_SHARES = "with no value above 1, as if they were shares of the image instead of pixels"
_PIXELS = f"with a value above {_LARGEST_SHARE}, as if they were pixels instead of shares of the image"


_READERS = {"coco": read_coco_boxes, "csv": read_csv_boxes, "voc": read_voc_boxes, "yolo": read_yolo_boxes}


def open_boxes(options: BoxesOptions) -> BoxData:
    """Read what `--data` names. Raises UserError for files that cannot be read, and for bad boxes unless clipped."""
    path, folder = options.path, pathlib.Path(options.images or options.path.parent)
    labels, splits = _READERS[options.kind](path, folder, options.allow_outside)
    splits = {name: sorted(images, key=lambda image: image.file) for name, images in splits.items()}
    if options.kind in ("yolo", "csv"):
        splits = _without_repeats(splits)
    every = [box for images in splits.values() for image in images for box in image.boxes]
    if not labels or all(box.is_crowd for box in every):
        missing = "categories" if every and not labels else "box"
        raise UserError(f"{path} has no {missing}, so there is nothing to find; annotate some of its images.")
    labels = distinct_names(labels, path)
    numbers: dict[str | int, int] = {name: number for number, name in enumerate(labels)}
    numbers |= {number: number for number in range(len(labels))}  # YOLO's
    wrong: dict[str, list[str]] = collections.defaultdict(list)
    checked = {
        name: tuple(_picture(image, numbers, wrong, options.kind) for image in images)
        for name, images in splits.items()
    }
    _report(wrong, options.bad_boxes, len(every))
    has_split = "val" in checked
    train, evaluation = (checked["train"], checked["val"]) if has_split else held_out(checked["train"], path)
    if both := {image.file for image in train} & {image.file for image in evaluation}:
        print(f"{len(both)} of the evaluation images are also trained on, which flatters the detector.")
    return BoxData(labels, tuple(train), tuple(evaluation), has_split, options.kind)


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
    """Say what is wrong with a box in shares of the image in a file of pixels, or the other way round; else None."""
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

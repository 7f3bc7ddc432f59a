"""Boxes in the format of Ultralytics' YOLO. No TensorFlow; no file is trusted."""

import os
import pathlib
import re

from keras_vit import UserError
from keras_vit.errors import shown
from keras_vit.files.documents import LARGEST, read_text, read_yaml, validated
from keras_vit.files.labels import composed
from keras_vit.images.formats import is_picture, visible_files
from training.data.annotations.boxes import Annotated, Annotations, Box
from training.data.annotations.listed_images import number_of, upright_size
from training.data.listed_files import check_inside, listed_file

# A value of a data.yaml that says nothing.
_NO_VALUE: tuple = ("", "~", "null", "Null", "NULL", [], {})


def read_yolo_boxes(file: pathlib.Path, _: pathlib.Path, allow_outside: bool) -> Annotations:
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
    splits = {split: [_yolo_picture(image, labels[image]) for image in images] for split, images in files.items()}
    return Annotations(tuple(map(composed, listed)), splits)


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

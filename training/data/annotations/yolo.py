"""Boxes in the format of Ultralytics' YOLO. No TensorFlow; no file is trusted."""

import math
import os
import pathlib
from typing import Any

from keras_vit import UserError
from keras_vit.files.documents import LARGEST, is_number, read_text, read_yaml, validated
from keras_vit.files.labels import composed
from keras_vit.images.formats import is_picture, visible_files
from training.data.annotations.images import Box, BoxedImage, BoxedImages, upright_size
from training.data.listed_files import check_inside, listed_file

# A value of a data.yaml that says nothing.
_NO_VALUE: tuple = ("", "~", "null", "Null", "NULL", [], {})


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
    files = {split: _images(place, root, file, allow_outside) for split, place in places.items()}
    labels = {image: _labels(image) for images in files.values() for image in images}
    check_inside(filter(os.path.lexists, [*labels, *labels.values()]), file, file.parent, allow_outside)
    splits = {split: [_boxed(image, labels[image]) for image in images] for split, images in files.items()}
    return BoxedImages(tuple(map(composed, names)), splits)


def _images(places: list[str], root: pathlib.Path, file: pathlib.Path, allow_outside: bool) -> list[pathlib.Path]:
    """Return the images of folders, of text files that list them, or of several of these."""
    images: list[pathlib.Path] = []
    for name in places:
        # Roboflow writes ../train/images beside the folder train.
        paths = [listed_file(root, each) for each in dict.fromkeys((name.removeprefix("../"), name))]
        path = next(filter(os.path.exists, paths), paths[-1])
        check_inside([path], file, file.parent, allow_outside)
        if path.is_dir():
            images += map(pathlib.Path, map(os.path.normpath, filter(is_picture, visible_files(path))))
        else:
            lines = filter(None, map(str.strip, read_text(path, LARGEST).splitlines()))
            images += [listed_file(path.parent, line) for line in lines]
    return sorted(dict.fromkeys(images))


def _labels(image: pathlib.Path) -> pathlib.Path:
    """Return the file with the boxes of an image, which need not exist."""
    parts = list(image.parts)
    if "images" in parts:  # the last of them, as Ultralytics
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return listed_file(pathlib.Path(*parts[:-1]), f"{image.stem}.txt")


def _boxed(image: pathlib.Path, labels: pathlib.Path) -> BoxedImage:
    height, width = upright_size(image)
    boxes = []
    for number, line in enumerate(read_text(labels).splitlines() if labels.is_file() else [], 1):
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

"""Pascal VOC: an .xml of boxes for each image, and masks of classes and objects. No TensorFlow; no file is trusted."""

import pathlib

import numpy as np

from keras_vit import UserError
from keras_vit.errors import is_or_are, shown
from keras_vit.files.documents import is_number, read_xml
from keras_vit.files.labels import composed
from keras_vit.images.formats import is_picture_name
from training.data.annotations.images import Box, BoxedImage, BoxedImages, boxed_images, upright_size
from training.data.annotations.masks import (
    IGNORED,
    NONE,
    UNCOUNTED,
    Segments,
    read_mask,
    segments_of_mask,
    whole_segments,
)
from training.data.listed_files import check_inside

VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
# Files that a message names.
_MOST_NAMED = 3


def read_voc_boxes(folder: pathlib.Path, _: pathlib.Path, allow_outside: bool) -> BoxedImages:
    """Read Annotations/a.xml for JPEGImages/a.jpg or images/a.jpg, or both kinds of files side by side.

    Pixels count from 1, as in VOC. An image without a file is not annotated, and is left out.
    """
    annotations = folder / "Annotations" if (folder / "Annotations").is_dir() else folder
    places = [folder / name for name in ("JPEGImages", "images", "Images") if (folder / name).is_dir()] or [folder]
    images = {composed(file.stem): file for place in places for file in place.iterdir() if is_picture_name(file.name)}
    of_file = {file: composed(file.stem) for file in sorted(annotations.glob("*.xml"))}
    if missing := [file.name for file, name in of_file.items() if name not in images]:
        raise UserError(
            f"{len(missing)} of {len(of_file)} files in {annotations} {is_or_are(len(missing))} of no image in "
            f"{places[0]}: {', '.join(missing[:_MOST_NAMED])}; add the images, or remove the files."
        )
    if others := images.keys() - set(of_file.values()):
        print(f"Left out, since no .xml annotates them: {len(others)} images such as {images[min(others)].name}.")
    check_inside([*of_file, *map(images.__getitem__, of_file.values())], folder, folder, allow_outside)
    return boxed_images([_boxed(file, images[name]) for file, name in of_file.items()], folder)


def _boxed(file: pathlib.Path, image: pathlib.Path) -> BoxedImage:
    root = read_xml(file)
    if root.tag != "annotation":
        raise UserError(f"{file} should be an <annotation> of Pascal VOC, but is a <{root.tag:.40}>; remove it.")
    stated = [root.findtext(f"size/{side}", "0") for side in ("height", "width")]
    is_stated = all(map(is_number, stated))
    size = upright_size(image, tuple(round(float(text)) for text in stated) if is_stated else (None, None))
    boxes = []
    for element in root.findall("object"):
        name, difficult = ((element.findtext(tag) or "").strip() for tag in ("name", "difficult"))
        edges = [element.findtext(f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax")]
        if not name or not all(map(is_number, edges)) or difficult not in ("", "0", "1"):
            raise UserError(
                f"Each object of {file} should have a name, a bndbox of four finite numbers, and 0 or 1 as difficult, "
                f"but one has {shown([name, *edges, difficult])}; correct it."
            )
        left, top, right, bottom = (float(text or "") for text in edges)
        bbox = (left - 1, top - 1, right - left + 1, bottom - top + 1)
        boxes.append(Box(composed(name), bbox, is_difficult=difficult == "1"))
    return BoxedImage(image, size, boxes)


def voc_segments(classes: pathlib.Path, objects: pathlib.Path | None, size: tuple[int, int] | None = None) -> Segments:
    """Return the background and the objects of two masks; without that of objects, the classes."""
    if objects is None:
        return segments_of_mask(classes, size)
    of_pixels = read_mask(classes, size)
    numbers = read_mask(objects, of_pixels.shape)
    segments = np.full(of_pixels.shape, NONE, np.int32)
    segments[(of_pixels == IGNORED) | (numbers == IGNORED)] = UNCOUNTED
    labels: list[int] = []
    background = (of_pixels == 0) & (segments != UNCOUNTED)
    if background.any():
        segments[background] = 0
        labels.append(0)
    for number in np.setdiff1d(numbers, [0, IGNORED]):
        inside = (numbers == number) & (segments == NONE)
        if inside.any():
            segments[inside] = len(labels)
            labels.append(int(np.bincount(of_pixels[inside]).argmax()))
    own = np.array(labels, np.int32)
    return whole_segments(own, own > 0, np.bincount(segments[segments >= 0], minlength=len(own)), segments)

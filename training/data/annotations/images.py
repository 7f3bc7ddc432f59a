"""Images that a file annotates: their boxes, size and split, and the names of their classes. No TensorFlow."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from keras_vit import UserError
from keras_vit.errors import explained
from keras_vit.files.labels import LABELS, composed, read_labels
from keras_vit.images.decode import open_image
from keras_vit.images.formats import format_problem, orientation
from keras_vit.run import Run
from training.data.file_contents import FileContents
from training.data.groups import groups_of, held_out, looks_of
from training.data.known_images import warn_of_training_images
from training.options.common import ALONE, AUTO, AnnotatedData


class Box(NamedTuple):
    """An object as its file annotates it; unchecked before `open_boxes`."""

    label: str | int  # name or number of the class; after the check the number
    bbox: tuple[float, float, float, float]
    """Left, top, width and height in pixels of the upright image, as the file has them or, in a YOLO file, means."""
    area: float | None = None  # pixels of the object, if the file states them; else those of the box count
    is_crowd: bool = False
    """Whether it is a group in which no object is marked, COCO's iscrowd. It is no target of training."""
    is_difficult: bool = False  # whether it counts neither as found nor as missed, VOC's difficult

    @property
    def corners(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom in pixels."""
        left, top, width, height = self.bbox
        return left, top, left + width, top + height


@dataclasses.dataclass(frozen=True)
class BoxedImage:
    """An image with its boxes, perhaps none."""

    file: pathlib.Path
    size: tuple[int, int]  # height and width in pixels, upright
    boxes: Sequence[Box]  # all that the file annotates, in its order: the truth of an evaluation
    id: int = 0  # the id in a COCO file, whose order decides between equal scores
    group: str = ""  # the name of its group in the data; "" without one

    @functools.cached_property
    def targets(self) -> tuple[np.ndarray, np.ndarray]:
        """The targets of training: corners (n, 4) float32 inside of the image, in pixels, and classes (n,) int32."""
        boxes = [box for box in self.boxes if not box.is_crowd]
        corners = np.array([box.corners for box in boxes]).reshape(-1, 4)
        corners = np.clip(corners, 0, [*self.size[::-1]] * 2)
        has_area = (corners[:, :2] < corners[:, 2:]).all(axis=1)
        return corners[has_area].astype(np.float32), np.array([box.label for box in boxes], np.int32)[has_area]


class BoxedImages(NamedTuple):
    """The images with boxes of a file, before they are checked."""

    labels: tuple[str, ...]  # the names of the classes; empty if a COCO file has none
    splits: Mapping[str, Sequence[BoxedImage]]  # images of "train", and of "val" in data with a split of their own


class _Listed(Protocol):
    @property
    def file(self) -> pathlib.Path:
        """Where the image is."""

    @property
    def group(self) -> str:
        """The name of its group in the data; "" without one."""


AnyListed = TypeVar("AnyListed", bound=_Listed)


def train_and_val(
    splits: Mapping[str, Sequence[AnyListed]], options: AnnotatedData, run: Run | None = None
) -> tuple[list[AnyListed], list[AnyListed]]:
    """Return the images of "train" and "val", of data without "val" all but every tenth by name, and these.

    Images that belong together, as `options.group` says, are on one side. Prints which images are on both sides.

    run: one to evaluate; None to train one. Of data without "val", on whose images it was not trained, one list of all
    is returned twice.

    Raises UserError if there is no image of one of them.
    """
    train, val = (list(splits.get(name, ())) for name in ("train", "val"))
    contents = FileContents()
    if run is not None:
        for image in (*train, *val):
            contents.read(str(image.file))
    if "val" not in splits:
        if train and run is not None and not _may_know(run, contents.digests(str(image.file) for image in train)):
            return train, train
        if run is not None:
            print("Measured on a tenth of the images; the others may be training images.")
        images = sorted(train, key=lambda image: image.file)
        looks = looks_of(lambda row: images[row].file.read_bytes(), len(images)) if options.group != ALONE else ()
        names = [image.group for image in images]
        paths = [os.path.relpath(image.file, options.folder) for image in images]
        groups = groups_of(paths, options.group, looks, names)
        insist = options.group != AUTO or any(names)
        are_kept = held_out(np.zeros(len(images), np.int64), [options.path.name], groups, insist=insist).tolist()
        kept = {image.file for image, is_kept in zip(images, are_kept, strict=True) if is_kept}
        train, val = [each for each in images if each.file not in kept], [each for each in train if each.file in kept]
    elif run is None and (both := {image.file for image in train} & {image.file for image in val}):
        print(f"Warning: training also uses {len(both):,} of the evaluation images, so the results are too good.")
    if not train or not val:
        count = len(train) + len(val)
        raise UserError(f"{options.path} holds {count} images, and needs some to train on and others to evaluate on.")
    if run is not None:
        warn_of_training_images(run, contents.digests(str(image.file) for image in val), lambda row: val[row].file)
    return train, val


def _may_know(run: Run, digests: np.ndarray) -> bool:
    """Return whether a run was, or may have been, trained on one of the images with these digests."""
    known = run.training_images
    return isinstance(run.settings.get("source"), dict) and (known is None or bool(np.isin(digests, known).any()))


def upright_size(file: pathlib.Path, stated: tuple = (None, None)) -> tuple[int, int]:
    """Return (height, width) of an image as it is seen. Raises UserError for none, and for another size than stated."""
    advice = "repair it, or remove it and its annotation"
    with explained(lambda why: f"The image {file} cannot be read ({why}); {advice}.", OSError, ValueError):
        data = file.read_bytes()
        if problem := format_problem(data):
            raise ValueError(problem)
        with open_image(data) as image:
            width, height = image.size
    size = (width, height) if orientation(data) >= 5 else (height, width)
    if None not in stated and stated not in (size, (0, 0)):
        raise UserError(
            f"The image {file}, seen upright, is {size[1]} wide and {size[0]} high, but it was annotated as one "
            f"{stated[1]:.12g} wide and {stated[0]:.12g} high; annotate the upright image at its size."
        )
    return size


def own_labels(folder: pathlib.Path) -> tuple[str, ...]:
    """Return the names of labels.txt in the folder of the data; none without it."""
    return tuple(map(composed, read_labels(folder / LABELS))) if (folder / LABELS).is_file() else ()


def boxed_images(images: Sequence[BoxedImage], folder: pathlib.Path) -> BoxedImages:
    """Return images without a split, whose classes are those of labels.txt in the folder, or else of the boxes."""
    names = sorted({str(box.label) for image in images for box in image.boxes})
    return BoxedImages(own_labels(folder) or tuple(names), {"train": images})


def check_names(files: Mapping[str, pathlib.Path], others: Mapping[str, pathlib.Path], folder: pathlib.Path) -> None:
    """Raise UserError for names of files that a folder lacks."""
    if missing := sorted(files.keys() - others.keys()):
        raise UserError(
            f"{folder} lacks {len(missing)} of the files that {files[missing[0]].parent} has, first {missing[0]}; add "
            "or remove them."
        )

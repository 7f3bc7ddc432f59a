"""Images with boxes as values, before and after they are checked. No TensorFlow."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


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
    """The id in a COCO file, whose order decides between equal scores."""

    @functools.cached_property
    def targets(self) -> tuple[np.ndarray, np.ndarray]:
        """The targets of training: corners (n, 4) float32 inside of the image, in pixels, and classes (n,) int32."""
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


class Annotations(NamedTuple):
    """All that a file annotates."""

    labels: tuple[str, ...]
    """The names of the classes; empty if a COCO file has none."""
    splits: Mapping[str, Sequence[Annotated]]
    """Images of "train", and of "val" in data with a split of their own."""


def annotations_of(images: Sequence[Annotated], labels: tuple[str, ...]) -> Annotations:
    """Return images without a split, with the labels or, if there are none, the sorted names of the boxes."""
    return Annotations(
        labels or tuple(sorted({str(box.label) for image in images for box in image.boxes})), {"train": images}
    )

"""Images that a file of annotations lists: their size, their split, the names of their classes. No TensorFlow."""

import math
import pathlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

from keras_vit import UserError
from keras_vit.errors import explained, shown
from keras_vit.files.labels import LABELS, composed, read_labels
from keras_vit.images.decode import open_image
from keras_vit.images.formats import format_problem, orientation

# Without a split of their own, every tenth image by name is evaluated.
_HOLD_OUT = 10


class Listed(Protocol):
    """A picture that data name."""

    @property
    def file(self) -> pathlib.Path:
        """Where it is."""


AnyListed = TypeVar("AnyListed", bound=Listed)


def upright_size(file: pathlib.Path, stated: tuple = (None, None)) -> tuple[int, int]:
    """Height and width in pixels of a picture as it is seen.

    Raises UserError if it is no picture that we read, or not of the size that an annotation states; zeros state none.
    """
    with explained(
        lambda reason: f"The picture {file} cannot be read ({reason}); repair it, or remove it and its annotation.",
        OSError,
        ValueError,
    ):
        data = file.read_bytes()
        if problem := format_problem(data):
            raise ValueError(problem)
        with open_image(data) as image:
            width, height = image.size
    size = (width, height) if orientation(data) >= 5 else (height, width)
    if None not in stated and stated not in (size, (0, 0)):
        raise UserError(
            f"The picture {file}, seen upright, is {size[1]} wide and {size[0]} high, but it was annotated as one "
            f"{stated[1]!s:.20} wide and {stated[0]!s:.20} high; annotate the upright picture at its size."
        )
    return size


def number_of(value: object, where: str) -> float:
    """A finite number. Raises UserError for anything else."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where} should be a finite number, but is {shown(value)}; correct it.")
    return number


def held_out(pictures: Sequence[AnyListed], path: pathlib.Path) -> tuple[list[AnyListed], list[AnyListed]]:
    """All but every tenth picture by name, and these. Raises UserError for a single picture."""
    if len(pictures) < 2:
        count = f"{len(pictures)} picture" if pictures else "no picture"
        raise UserError(f"{path} holds {count}; it needs two, to train on and to evaluate on.")
    pictures = sorted(pictures, key=lambda picture: picture.file)
    return [each for number, each in enumerate(pictures) if number % _HOLD_OUT], pictures[::_HOLD_OUT]


def own_labels(folder: pathlib.Path) -> tuple[str, ...]:
    """The names of labels.txt in the folder of the data; none without it."""
    return tuple(map(composed, read_labels(folder / LABELS))) if (folder / LABELS).is_file() else ()

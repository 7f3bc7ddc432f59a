"""Annotations of the fields of an options dataclass, and the check of the ranges of their numbers."""

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from keras_vit.errors import UserError


@dataclasses.dataclass(frozen=True)
class Aliases:
    """Annotates a field: other names of its option."""

    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Positional:
    """Annotates a field: it is an argument without an option, which the help calls `metavar`."""

    metavar: str


@dataclasses.dataclass(frozen=True)
class MayLead:
    """Annotates a field: its value may come first, without the option; with images, it may be one of them."""


@dataclasses.dataclass(frozen=True)
class MayBeEmpty:
    """Annotates a field of any number of values: its option may stand alone, which gives ()."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Annotates a field: the interval of its numbers, as in mathematics: "[0, 1)". See `check_ranges`."""

    interval: str

    def __contains__(self, number: float) -> bool:
        low, high = map(float, self.interval[1:-1].split(","))
        above = number >= low if self.interval.startswith("[") else number > low
        return above and (number <= high if self.interval.endswith("]") else number < high)

    def __str__(self) -> str:
        low, high = self.interval[1:-1].split(", ")
        if high == "inf":
            return f"at least {low}" if self.interval.startswith("[") else "positive"
        return f"in {self.interval}"


Count = Annotated[int, Range("[1, inf)")]
Natural = Annotated[int, Range("[0, inf)")]
Positive = Annotated[float, Range("(0, inf)")]
NotNegative = Annotated[float, Range("[0, inf)")]
Share = Annotated[float, Range("[0, 1]")]
Port = Annotated[int, Range("[0, 65535]")]
Seed = Annotated[int, Range("[0, 4294967295]")]  # what NumPy and Keras take


def check_ranges(options: Any) -> None:
    """Raise UserError for a number that is outside of the `Range` of its field or not finite; None is allowed."""
    options_class: Any = type(options)
    for name, allowed in _ranges(options_class).items():
        value = getattr(options, name)
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            if not math.isfinite(number) or (allowed is not None and number not in allowed):
                needed = allowed if math.isfinite(number) else "a finite number"
                raise UserError(f"{option_name(name)} must be {needed}, but is {number}.")


def option_name(field: str) -> str:
    """Return the option of a field: --batch-size for batch_size."""
    return f"--{field.replace('_', '-')}"


@functools.cache
def _ranges(options_class: Any) -> dict[str, Range | None]:
    """Return the range, or None, of each field that has floats or a range."""
    ranges: dict[str, Range | None] = {}
    for name, hint in typing.get_type_hints(options_class, include_extras=True).items():
        parts = [*_parts(hint)]
        notes = [note for part in parts for note in getattr(part, "__metadata__", ()) if isinstance(note, Range)]
        if notes or float in parts:
            ranges[name] = notes[0] if notes else None
    return ranges


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type and the types inside it, of a union, a tuple or an annotated type."""
    yield hint
    for part in () if typing.get_origin(hint) is typing.Literal else typing.get_args(hint):
        yield from _parts(part)

"""The required content of a file of another program, as a value of the same form with types in place of values."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from keras_vit.errors import UserError, shown


@dataclasses.dataclass(frozen=True)
class Rule:
    """Values of a kind that is no type of Python."""

    words: str
    """Such a value in a sentence, such as "a whole number"."""
    fits: Callable[[Any], bool]


# A type or rule; a list of one schema, for a list of any length; a tuple of schemas, for a list of this length; or a
# dict, for an object with at least these fields.
Schema = type | Rule | list | tuple | dict

_LIST = Rule("a list", lambda value: isinstance(value, list))
_OF_TYPE: dict[type, Rule] = {
    dict: Rule("an object", lambda value: isinstance(value, dict)),
    list: _LIST,
    tuple: _LIST,
    int: Rule("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    str: Rule("a text", lambda value: isinstance(value, str)),
}


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, or the text of one."""
    try:
        return isinstance(value, str | int | float) and not isinstance(value, bool) and math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False


NUMBER = Rule("a finite number", is_number)


def optional(rule: Rule) -> Rule:
    """Return the rule of a field that may be missing."""
    return Rule(rule.words, lambda value: value is None or rule.fits(value))


def validated(value: Any, schema: Schema, file: object) -> Any:
    """Return what was read from a file. Raises UserError, with the place in the file, unless it fits its schema."""
    if misfit := _misfit(value, schema):
        place, words, part = misfit
        where = f" as {place.removeprefix('.')}" if place else ""
        there = "nothing" if part is None else shown(part)
        raise UserError(f"{file} should have {words}{where}, but has {there}; correct it.")
    return value


def _misfit(value: Any, schema: Schema) -> tuple[str, str, Any] | None:
    """Return the place of the first part that does not fit, what should be there, and the part; None if all fit."""
    rule = schema if isinstance(schema, Rule) else _OF_TYPE[schema if isinstance(schema, type) else type(schema)]
    if not rule.fits(value):
        return "", rule.words, value
    if isinstance(schema, dict):
        for name, of_field in schema.items():
            if misfit := _misfit(value.get(name), of_field):
                return f".{name}{misfit[0]}", *misfit[1:]
    elif isinstance(schema, list | tuple):
        if isinstance(schema, tuple) and len(schema) != len(value):
            return "", f"{rule.words} of {len(schema)}", value
        parts = zip(value, schema if isinstance(schema, tuple) else itertools.repeat(schema[0]), strict=False)
        for number, (part, of_part) in enumerate(parts):
            if misfit := _misfit(part, of_part):
                return f"[{number}]{misfit[0]}", *misfit[1:]
    return None

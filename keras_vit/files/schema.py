"""The required content of a file of another program, as a value of the same form with types in place of values."""

import dataclasses
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


def validated(value: Any, schema: Schema, file: object, place: str = "") -> Any:
    """Return what was read from a file. Raises UserError, with the place in the file, unless it fits its schema.

    place: of the value in the file, "" for all of it.
    """
    rule = schema if isinstance(schema, Rule) else _OF_TYPE[schema if isinstance(schema, type) else type(schema)]
    length = len(schema) if isinstance(schema, tuple) else None
    if not rule.fits(value) or (length is not None and length != len(value)):
        words = f"{rule.words}{f' of {length}' if length else ''}{place and f' as {place}'}"
        raise UserError(
            f"{file} should have {words}, but has {'nothing' if value is None else shown(value)}; correct it."
        )
    parts: list[tuple[str, Any, Schema]] = []
    if isinstance(schema, dict):
        parts = [(f"{place}.{name}".removeprefix("."), value.get(name), each) for name, each in schema.items()]
    elif isinstance(schema, list | tuple):
        schemas = schema if isinstance(schema, tuple) else schema * len(value)
        parts = [(f"{place}[{n}]", part, each) for n, (part, each) in enumerate(zip(value, schemas, strict=True))]
    for where, part, each in parts:
        validated(part, each, file, where)
    return value

"""The only reader of text, JSON, YAML and XML files of other programs. No file is trusted: size and depth have limits.

A file is read only if it is a regular one, and never beyond its limit. YAML and XML cannot refer to themselves or to
other files, so the value in memory is in proportion to the file. `validated` compares a value with the required
content, a value of the same form with types in place of values.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from keras_vit.errors import UserError, reading, shown
from keras_vit.files.remote import first_bytes

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

# Bytes: of a file on one image, of one on many images, and of YAML, of which PyYAML reads 60 to 500 kB in a second.
LARGEST_SMALL, LARGEST, _LARGEST_YAML = 2**20, 2**30, 2**19
_DEEPEST = 32  # levels of lists, objects and elements inside each other
# Explicit tags of a YAML file that change nothing, since every scalar is read as text.
_PLAIN_TAGS = (None, "!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


def read_text(file: pathlib.Path, largest: int = LARGEST_SMALL) -> str:
    """Return the text of a UTF-8 file of at most `largest` bytes. Raises UserError for anything else."""
    with reading(file, "text in UTF-8", OSError, advice="save it as such, or correct the path"):
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError("it is not a regular file")
        return read_bytes(file, largest).decode("utf-8-sig")


def read_bytes(file: pathlib.Path, largest: int = 2**24) -> bytes:
    """Return the content of a file of at most `largest` bytes. Raises ValueError for a larger one."""
    data = first_bytes(file, largest + 1)
    if len(data) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return data


def read_json(file: pathlib.Path, largest: int = LARGEST_SMALL) -> Any:
    """Return the value of a JSON file; the limit of Python's recursion bounds its depth. Raises UserError."""
    text = read_text(file, largest)
    with reading(file, "JSON"):
        return json.loads(text)


def read_yaml(file: pathlib.Path) -> Any:
    """Return the value of a YAML file of one document: texts, lists, and dicts with texts as keys.

    Scalars stay the text that was typed: `on`, `01` and `null` are words, and a missing value is "". Raises UserError
    for what cannot be read, and for aliases, other tags than plain ones, keys that occur twice, and more than 32
    levels.
    """
    import yaml

    text = read_text(file, _LARGEST_YAML)
    with reading(file, "YAML", yaml.YAMLError):
        events = yaml.parse(text, Loader=yaml.BaseLoader)
        value: Any = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if value is not None:
                    raise ValueError("it has several documents")
                value = _yaml_value(next(events), events, _DEEPEST)
        return "" if value is None else value


def _yaml_value(event: Any, events: Iterator[Any], levels: int) -> Any:
    """Return the value that begins with an event; takes its further events."""
    import yaml

    if isinstance(event, yaml.AliasEvent):
        raise ValueError(f"the alias *{event.anchor[:20]} refers to another place; write the value there again")
    if event.tag not in _PLAIN_TAGS:
        raise ValueError(f"it has the tag {event.tag[:40]!r}; leave tags out")
    if isinstance(event, yaml.ScalarEvent):
        return event.value
    if not levels:
        raise ValueError(f"it has more than {_DEEPEST} levels")
    inside = functools.partial(_yaml_value, events=events, levels=levels - 1)
    if isinstance(event, yaml.SequenceStartEvent):
        return [inside(each) for each in _until(yaml.SequenceEndEvent, events)]
    fields: dict[str, Any] = {}
    for each in _until(yaml.MappingEndEvent, events):
        key = inside(each)
        if not isinstance(key, str) or key in fields:
            raise ValueError(f"the key {str(key)[:40]!r} is {'there twice' if isinstance(key, str) else 'not a text'}")
        fields[key] = inside(next(events))
    return fields


def _until(end: type, events: Iterator[Any]) -> Iterator[Any]:
    while not isinstance(event := next(events), end):
        yield event


def read_xml(file: pathlib.Path) -> "Element":
    """Return the root of an XML file without a document type. Raises UserError for anything else."""
    from xml.etree.ElementTree import ParseError, TreeBuilder

    from defusedxml.ElementTree import DefusedXMLParser

    class Shallow(TreeBuilder):
        """Limits the depth."""

        levels = 0

        def start(self, tag: Any, attrs: Any) -> "Element":
            self.levels += 1
            if self.levels > _DEEPEST:
                raise ValueError(f"it has more than {_DEEPEST} levels")
            return super().start(tag, attrs)

        def end(self, tag: Any) -> "Element":
            self.levels -= 1
            return super().end(tag)

    text = read_text(file)
    with reading(file, "plain XML", ParseError):
        parser = DefusedXMLParser(target=Shallow(), forbid_dtd=True)
        parser.feed(text)
        return parser.close()


@dataclasses.dataclass(frozen=True)
class Rule:
    """Values of a kind that is no type of Python."""

    words: str  # such a value in a sentence, such as "a whole number"
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

"""The only reader of text, JSON, YAML and XML files of other programs. No file is trusted: size and depth have limits.

A file is read only if it is a regular one, and never beyond its limit. YAML and XML cannot refer to themselves or to
other files, so the value in memory is in proportion to the file.
"""

import functools
import json
import pathlib
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from keras_vit.errors import reading

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

# Bytes: of a file on one image, of one on many images, and of YAML, of which PyYAML reads 60 to 500 kB in a second.
LARGEST_SMALL, LARGEST, _LARGEST_YAML = 2**20, 2**30, 2**19
# Levels of lists, objects and elements inside each other.
_DEEPEST = 32
# Explicit tags of a YAML file that change nothing, since every scalar is read as text.
_PLAIN_TAGS = (None, "!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")


def read_text(file: pathlib.Path, largest: int = LARGEST_SMALL) -> str:
    """Return the text of a UTF-8 file of at most `largest` bytes. Raises UserError for anything else."""
    with reading(file, "text in UTF-8", OSError, advice="save it as such, or correct the path"):
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError("it is not a regular file")
        with file.open("rb") as stream:
            data = stream.read(largest + 1)
        if len(data) > largest:
            raise ValueError(f"it has more than {largest:,} bytes")
        return data.decode("utf-8-sig")


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

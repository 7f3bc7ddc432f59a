"""Texts that exports write for people and servers, from the jinja2 templates beside this module."""

import pathlib
from typing import Any

import jinja2

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **values: Any) -> str:
    """Return the text of a template by its file name, with the values that it names as they are."""
    return _TEMPLATES.get_template(template).render(values)

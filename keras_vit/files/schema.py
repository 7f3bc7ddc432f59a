"""The required content of a file of another program, as a value of the same form with types in place of values."""

from typing import Any

from keras_vit.errors import UserError, shown

# A type; a list of one schema, for a list of any length; or a dict, for an object with at least these fields.
Schema = type | list | dict

_KINDS: dict[type, str] = {dict: "an object", list: "a list", int: "a whole number", str: "a text"}


def validated(value: Any, schema: Schema, file: object, place: str = "") -> Any:
    """Return what was read from a file. Raises UserError, with the place in the file, unless it fits its schema.

    place: of the value in the file, "" for all of it.
    """
    kind = schema if isinstance(schema, type) else type(schema)
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits:
        found = "nothing" if value is None else shown(value)
        raise UserError(f"{file} should have {_KINDS[kind]}{place and f' as {place}'}, but has {found}; correct it.")
    if isinstance(schema, list):
        for number, part in enumerate(value):
            validated(part, schema[0], file, f"{place}[{number}]")
    if isinstance(schema, dict):
        for name, of_field in schema.items():
            validated(value.get(name), of_field, file, f"{place}.{name}" if place else name)
    return value

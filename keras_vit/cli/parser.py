"""Dataclasses as the options of a command, which tyro reads from the command line.

A field `batch_size: int = 32` is the option `--batch-size`, and its docstring is the help text. The fields of a
dataclass inside another one are options beside the others, in a group of the help; where the field may hold one of
several dataclasses, they have its name: `--model.num-layers`.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import pathlib
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from keras_vit.cli.options import Aliases, MayBeEmpty, MayLead, Positional, check_ranges, option_name
from keras_vit.cli.start import as_typed, colors_allowed
from keras_vit.errors import UserError, refuse_first

Options = TypeVar("Options")
Given = dict[tuple[str, ...], Any]  # the fields that lead to an option -> its value
# A variable of the environment with which a command prints the names of its options alone, for completion in a shell;
# with the value "table", their Markdown table, for the pages.
OPTIONS_ALONE = "KERAS_VIT_OPTIONS"
_SIZE = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class _Option:
    path: tuple[str, ...]
    name: str  # "batch-size" or "model.num-layers"
    hint: Any
    default: Any  # dataclasses.MISSING if there is none
    owner: type

    def note(self, annotation: type[Options]) -> Options | None:
        """Return the annotation of this class that the field has, if it has one."""
        return next((n for n in getattr(self.hint, "__metadata__", ()) if isinstance(n, annotation)), None)

    @property
    def types(self) -> tuple[Any, ...]:
        """The types of its values, without None."""
        return tuple(each for each in _union(self.hint) if each is not types.NoneType)

    @property
    def default_text(self) -> str:
        """Its default for people; empty for none."""
        if self.default is dataclasses.MISSING or self.default in (None, (), ""):
            return ""
        return " ".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)


def parse(
    options_class: type[Options],
    arguments: Sequence[str],
    *,
    prog: str,
    about: str | None = None,
    usual: Collection[str] = (),
    **defaults: Any,
) -> Options:
    """Parse the arguments of a command; see `read`."""
    given = read(options_class, arguments, prog=prog, about=about, usual=usual, **defaults)
    return options_from(options_class, given, prog=prog, **defaults)


def read(
    options_class: type,
    arguments: Sequence[str],
    *,
    prog: str,
    about: str | None = None,
    usual: Collection[str] = (),
    **defaults: Any,
) -> Given:
    """Return the values of the options that the arguments set.

    A mistake that the parser finds and `--help` end the process, with 2 and 0.

    Args:
        options_class: a dataclass.
        arguments: of the command line.
        prog: the command, for the help and messages.
        about: the text above the options in the help; by default the docstring of the class.
        usual: names of fields, of whatever dataclass, that come first in the help.
        defaults: objects that fields of the class have unless the arguments change them, such as a recipe.
    """
    options = {".".join(option.path): option for option in _options(options_class, defaults)}
    if shown := os.environ.get(OPTIONS_ALONE):
        names = [f"--{option.name}" for option in options.values() if not option.note(Positional)]
        print(_table(options.values()) if shown == "table" else "\n".join(names))
        raise SystemExit(0)
    import tyro

    form, groups = _form(prog, options, usual, defaults)
    with colors_allowed():
        values = tyro.cli(
            form,
            args=_complete(arguments, [*options.values()]),
            prog=as_typed(prog),
            description=as_typed(inspect.cleandoc(about or options_class.__doc__ or "")),
            registry=_size_registry(),
        )
    for group in groups:
        values |= values.pop(group)
    for key, value in values.items():
        if value == () and options[key].default != () and not options[key].note(MayBeEmpty):
            raise UserError(f"--{options[key].name} needs a value.")
    return {options[key].path: value for key, value in values.items()}


def _complete(arguments: Sequence[str], options: Sequence[_Option]) -> list[str]:
    """Return the arguments with the option that the first may do without, and with each size as one argument."""
    completed = [*arguments]
    if completed and not completed[0].startswith("-") and not any(option.note(Positional) for option in options):
        leading = [option.name for option in options if option.note(MayLead)]
        completed[:0] = [f"--{name}" for name in leading[:1]]
    return _joined_sizes(completed, {f"--{option.name}" for option in options if _SIZE in _union(option.hint)})


def _form(
    prog: str, options: Mapping[str, _Option], usual: Collection[str], defaults: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """Return the options as a TypedDict for tyro, those that are not usual in others inside it, and their keys."""
    import typing_extensions
    import tyro

    has_positional = any(option.note(Positional) for option in options.values())
    first: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    about: dict[str, str] = {}
    for key, option in options.items():
        name = option.path[-2] if option.path[1:] else "further"
        is_first = option.path[-1] in usual if usual else len(option.path) == 1
        group = first if is_first else groups.setdefault(name, {})
        about[name] = (option.owner.__doc__ or "").partition("\n")[0] if option.path[1:] else ""
        is_required = option.default is dataclasses.MISSING and not (option.note(MayLead) and has_positional)
        argument = _argument(option, may_be_none=option.default is not None or option.path[0] in defaults)
        group[key] = typing_extensions.Required[argument] if is_required else argument
    boxes = {
        name: Annotated[_typed_dict(name, fields), tyro.conf.arg(help=about[name])] for name, fields in groups.items()
    }
    return _typed_dict(prog, {**first, **boxes}), [*boxes]


def options_from(
    options_class: type[Options], given: Mapping[tuple[str, ...], Any], *, prog: str, **defaults: Any
) -> Options:
    """Return the dataclass with the values that were read; see `read`."""
    options = {option.path: option for option in _options(options_class, defaults)}
    # Other defaults may have other options: a ResNet has none of a Vision Transformer's.
    unknown = sorted(path[-1].replace("_", "-") for path in given.keys() - options.keys())
    missing = [f"--{o.name}" for path, o in options.items() if o.default is dataclasses.MISSING and path not in given]
    refuse_first(
        [
            (unknown, f"With these defaults there is no option for {', '.join(unknown)}; leave it out."),
            (missing, f"{as_typed(prog)} needs {', '.join(missing)}; --help lists all options."),
        ]
    )
    return _built(options_class, given, defaults, ())


def _table(options: Iterable[_Option]) -> str:
    groups: dict[tuple[str, ...], list[_Option]] = {}
    for option in options:
        groups.setdefault(option.path[:-1], []).append(option)
    lines: list[str] = []
    for path, members in sorted(groups.items(), key=lambda group: bool(group[0])):
        about = (members[0].owner.__doc__ or "").partition("\n")[0]
        lines += ["", f"## {path[-1].replace('_', ' ').capitalize()}", "", about] if path else []
        lines += ["", "| option | value | default | |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _row(each))} |" for each in members]
    return "\n".join(lines)


def _row(option: _Option) -> tuple[str, str, str, str]:
    positional, aliases = option.note(Positional), option.note(Aliases)
    names = [positional.metavar] if positional else [f"--{option.name}", *(aliases.names if aliases else ())]
    literals = [
        str(word) for each in option.types if typing.get_origin(each) is Literal for word in typing.get_args(each)
    ]
    words = [f"`{word}`" for word in literals] or ["" if each is bool else _type_name(each) for each in option.types]
    shown = option.default_text.lower() if isinstance(option.default, bool) else option.default_text
    required = "required" if option.default is dataclasses.MISSING and not positional else ""
    text = _docstrings(option.owner).get(option.path[-1], "")
    return " ".join(f"`{name}`" for name in names), ", ".join(words), f"`{shown}`" if shown else required, text


def _type_name(hint: Any) -> str:
    if hint == _SIZE:
        return "one or two integers"
    if typing.get_origin(hint) is tuple:
        return f"{_type_name(typing.get_args(hint)[0])} …"
    return {int: "integer", float: "number", pathlib.Path: "path"}.get(hint, "text")


def arguments_of(options: Any, *without: str) -> list[str]:
    """Return fields of an options dataclass, texts and numbers, as a command line, without defaults and `without`."""
    arguments = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in without:
            arguments += [option_name(field.name), *map(str, value if isinstance(value, tuple) else (value,))]
    return arguments


def named(arguments: Sequence[str], option: str, default: str) -> tuple[str, list[str]]:
    """Return the value of an option on which the other options depend, and the remaining arguments."""
    value, rest, behind = default, [], iter(arguments)
    for argument in behind:
        if argument.partition("=")[0] == option:
            value = argument.partition("=")[2] or next(behind, "")
        else:
            rest.append(argument)
    return value, rest


def _typed_dict(name: str, fields: dict[str, Any]) -> Any:
    import typing_extensions

    return typing_extensions.TypedDict(name, fields, total=False)  # type: ignore[operator]


def _argument(option: _Option, *, may_be_none: bool) -> Any:
    """Return the type of an option with what tyro shows of it, with None only where that would change a default."""
    import tyro

    positional, aliases = option.note(Positional), option.note(Aliases)
    notes: list[Any] = [
        tyro.conf.arg(
            name=option.name,
            prefix_name=False,
            metavar=positional.metavar if positional else None,
            aliases=aliases.names if aliases else None,
            help=_docstrings(option.owner).get(option.path[-1], ""),
            help_behavior_hint=f"(default: {option.default_text})" if option.default_text else "",
        )
    ]
    if positional:
        notes.append(tyro.conf.Positional)
    hint = option.hint if may_be_none else typing.Union[option.types]  # noqa: UP007
    return Annotated[(hint, *notes)]  # type: ignore[return-value]


def _built(options_class: type, given: Mapping[tuple[str, ...], Any], defaults: Any, path: tuple[str, ...]) -> Any:
    values = {}
    for field in dataclasses.fields(options_class):
        default = _default(field, defaults)
        if nested := _nested_class(_hints(options_class)[field.name], default):
            inner = {} if default is dataclasses.MISSING else vars(default)
            default = _built(nested, given, inner, (*path, field.name))
        values[field.name] = given.get((*path, field.name), default)
    options = options_class(**values)
    check_ranges(options)
    return options


def _options(
    options_class: type, defaults: Mapping[str, Any], path: tuple[str, ...] = (), prefix: str = ""
) -> Iterator[_Option]:
    for field in dataclasses.fields(options_class):
        default, hint = _default(field, defaults), _hints(options_class)[field.name]
        dashed, types_of_field = prefix + field.name.replace("_", "-"), _union(hint)
        if nested := _nested_class(hint, default):
            inner = {} if default is dataclasses.MISSING else vars(default)
            own_prefix = f"{dashed}." if len(types_of_field) > 1 else prefix
            yield from _options(nested, inner, (*path, field.name), own_prefix)
        elif not any(map(dataclasses.is_dataclass, types_of_field)):
            yield _Option((*path, field.name), dashed, hint, default, options_class)


def _default(field: dataclasses.Field, defaults: Mapping[str, Any]) -> Any:
    if field.name in defaults:
        return defaults[field.name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _nested_class(hint: Any, default: Any) -> type | None:
    """Return the dataclass of a field; where it may hold one of several, that of its default."""
    nested = [each for each in _union(hint) if dataclasses.is_dataclass(each)]
    if len(_union(hint)) > 1:
        return type(default) if type(default) in nested else None
    return typing.cast(type, nested[0]) if nested else None


@functools.cache
def _hints(options_class: type) -> dict[str, Any]:
    return typing.get_type_hints(options_class, include_extras=True)


def _union(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type, without annotations."""
    if typing.get_origin(hint) is Annotated:
        return _union(typing.get_args(hint)[0])
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return (hint,)
    return tuple(part for each in typing.get_args(hint) for part in _union(each))


# Height and width: one number is both, as in --image-size 224, --image-size 224 336 or --image-size 224x336.


def _joined_sizes(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Join the two numbers of a size to one argument, since what follows one number may be an image."""
    joined: list[str] = []
    for argument in arguments:
        is_second = "".join(joined[-2:-1]).replace("_", "-") in options and joined[-1].isdecimal()
        if is_second and argument.isdecimal():
            joined[-1] += f"x{argument}"
        else:
            joined.append(argument)
    return joined


@functools.cache
def _size_registry() -> Any:
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def _size_rule(info: Any) -> Any:
        if info.type != _SIZE:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT [INT]",
            instance_from_str=lambda texts: _size(texts[0]),
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda size: [f"{size[0]}x{size[1]}"],
        )

    return registry


def _size(text: str) -> tuple[int, int]:
    numbers = re.split("[x,]", text)
    if len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"one or two whole numbers above 0, as in 96 or 96 128, are needed, not {text!r}")
    return int(numbers[0]), int(numbers[-1])


def _docstrings(options_class: type) -> dict[str, str]:
    """Return the text below each field of a dataclass and of those it inherits from, as one line.

    tyro would keep the line breaks of the source, and read it with tokenize, which takes long.
    """
    texts: dict[str, str] = {}
    for parent in filter(dataclasses.is_dataclass, reversed(options_class.__mro__)):
        texts |= _docstrings_of_file(inspect.getfile(parent)).get(parent.__qualname__, {})
    return texts


@functools.cache
def _docstrings_of_file(file: str) -> dict[str, dict[str, str]]:
    """Return the texts of each class on the top level of a module, by field."""
    classes = [node for node in ast.parse(pathlib.Path(file).read_text()).body if isinstance(node, ast.ClassDef)]
    texts: dict[str, dict[str, str]] = {node.name: {} for node in classes}
    for node in classes:
        for field, text in itertools.pairwise(node.body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                texts[node.name][field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return texts

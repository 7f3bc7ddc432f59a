"""Dataclasses as the options of a command.

A field `batch_size: int = 32` is the option `--batch-size`, and its docstring is the help text. Options may stand in
any order, as `--batch-size 32` or `--batch-size=32`. The fields of a dataclass inside another one are options beside
the others; where the field may hold one of several dataclasses, they have its name: `--model.num-layers`.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import pathlib
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from keras_vit.cli import as_typed
from keras_vit.errors import UserError, refuse_first

Options = TypeVar("Options")
# The fields that lead to an option -> its value.
Given = dict[tuple[str, ...], Any]

_HELP = "--help lists all options."
# What other codes call an option, where the letters do not tell.
_SYNONYMS = {
    "--lr": "--learning-rate", "--bs": "--batch-size", "--wd": "--weight-decay", "--opt": "--optimizer",
    "--drop-path": "--model.stochastic-depth-rate", "--amp": "--precision",
    "--dtype": "--precision", "--dataset": "--data", "--data-path": "--data", "--output-dir": "--workdir",
    "--output": "--workdir", "--gpus": "--replicas", "--smoothing": "--label-smoothing", "--reprob": "--random-erasing",
}  # fmt: skip
_VALUE_SYNONYMS = {
    "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "int4": "int4-weights",
}  # fmt: skip
# How alike a mistyped option or value and a real one must be: mirrored for mirored, but not tpu for gpu.
_LEAST_LIKE = 0.7
_METAVARS = {int: "INT", float: "FLOAT", str: "STR", pathlib.Path: "PATH"}
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 120


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
    """Annotates a field of a class without `Positional` fields: its value may stand alone, without the option."""


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
        return {
            "(-inf, inf)": "a finite number",
            "[0, inf)": "at least 0",
            "[1, inf)": "at least 1",
            "(0, inf)": "positive",
        }.get(self.interval, f"in {self.interval}")


Count = Annotated[int, Range("[1, inf)")]
Natural = Annotated[int, Range("[0, inf)")]
Positive = Annotated[float, Range("(0, inf)")]
NotNegative = Annotated[float, Range("[0, inf)")]
Share = Annotated[float, Range("[0, 1]")]
Port = Annotated[int, Range("[0, 65535]")]
Seed = Annotated[int, Range("[0, 4294967295]")]  # what NumPy and Keras take


def check_ranges(options: Any) -> None:
    """Raise UserError for a number outside of the `Range` of its field; None is allowed.

    Without a range, a number must be finite.
    """
    options_class: Any = type(options)
    for name, allowed in _ranges(options_class).items():
        value = getattr(options, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(number in allowed for number in numbers):
            what = allowed if all(map(math.isfinite, numbers)) else "a finite number"
            raise UserError(f"--{name.replace('_', '-')} must be {what}, but is {_shown(value)}.")


@functools.cache
def _ranges(options_class: Any) -> dict[str, Range]:
    """The range of each field that has numbers."""
    found = {}
    for name, hint in _hints(options_class).items():
        notes = [note for part in _parts(hint) for note in getattr(part, "__metadata__", ())]
        ranges = [note for note in notes if isinstance(note, Range)]
        is_float = any(part is float for part in _parts(hint))
        if ranges or is_float:
            found[name] = ranges[0] if ranges else Range("(-inf, inf)")
    return found


def _parts(hint: Any) -> Iterator[Any]:
    """A type and those inside it, of a union, a tuple or an annotated one."""
    yield hint
    for part in typing.get_args(hint):
        if typing.get_origin(hint) is not Literal and (part is hint or not isinstance(part, str)):
            yield from _parts(part)


@dataclasses.dataclass(frozen=True)
class _Option:
    path: tuple[str, ...]
    name: str  # "--batch-size", or of an argument without a name "PICTURES"
    aliases: tuple[str, ...]
    hint: Any
    default: Any  # dataclasses.MISSING if there is none
    owner: type

    @property
    def positional(self) -> bool:
        return not self.name.startswith("-")

    @property
    def kind(self) -> Any:
        """The type of the value, without None."""
        kinds = [kind for kind in _kinds(self.hint) if kind is not types.NoneType]
        return next((kind for kind in kinds if typing.get_origin(kind) is tuple), kinds[0])

    @property
    def repeated(self) -> bool:
        """Whether it takes any number of values."""
        return typing.get_origin(self.kind) is tuple and typing.get_args(self.kind)[-1] is Ellipsis

    @property
    def metavar(self) -> str:
        if self.kind is bool:
            return ""
        if typing.get_origin(self.kind) is not tuple:
            return _metavar(self.kind)
        parts = typing.get_args(self.kind)
        if self.repeated:
            return f"{_metavar(parts[0])} ..."
        return "INT [INT]" if set(parts) == {int} else " ".join(map(_metavar, parts))


def parse(options_class: type[Options], arguments: Sequence[str], *, prog: str) -> Options:
    """Parse the arguments of a command.

    Raises UserError for a mistake in them. `--help` prints the help and exits with 0.

    prog: the command as it is typed, for the help and messages.
    """
    return options_from(options_class, read(options_class, arguments, prog=prog), prog=prog)


def read(options_class: type, arguments: Sequence[str], *, prog: str, **defaults: Any) -> Given:
    """Return the values of those options that the arguments set; see `parse`.

    defaults: objects that fields of the class have unless the arguments change them, such as a recipe.
    """
    options = [*_options(options_class, defaults)]
    known = {name: option for option in options if not option.positional for name in (option.name, *option.aliases)}
    known |= {_negated(option.name): option for option in options if option.kind is bool and not option.positional}
    if {"-h", "--help"} & {*arguments}:
        _print_help(options_class, options, prog)
        raise SystemExit(0)
    _refuse_unknown([name for name in map(_option_name, arguments) if name], known)
    given: Given = {}
    named: dict[tuple[str, ...], str] = {}
    others: list[str] = []
    rest = [*arguments]
    while rest:
        argument = rest.pop(0)
        name = _option_name(argument)
        if not name:
            others.append(argument)
            continue
        option = known[name]
        earlier = named.setdefault(option.path, name)
        refuse_first(
            [
                (option.path in given and earlier == name, f"{name} is given twice; give it once."),
                (option.path in given, f"{earlier} and {name} are two names of one option; give one of them."),
                (
                    option.kind is bool and "=" in argument,
                    f"{name} takes no value, but was given {argument}; leave the value out.",
                ),
            ]
        )
        if option.kind is bool:
            given[option.path] = name == option.name
            continue
        texts = [argument.partition("=")[2]] if "=" in argument else []
        texts += _texts_of(option, texts, rest)
        given[option.path] = _value(option, name, texts)
    for option in options:
        if option.positional and others:
            count = len(others) if option.repeated else 1
            given[option.path] = _value(option, option.name, others[:count])
            others = others[count:]
    for option in options:
        if others and option.path not in given and any(isinstance(note, MayLead) for note in _notes(option.hint)):
            given[option.path] = _value(option, option.name, [others.pop(0)])
    if others:
        raise UserError(f"Unrecognized arguments: {' '.join(others)}; {_HELP}")
    return given


def options_from(
    options_class: type[Options], given: Mapping[tuple[str, ...], Any], *, prog: str, **defaults: Any
) -> Options:
    """Return the dataclass with the values that were read; see `read`."""
    options = {option.path: option for option in _options(options_class, defaults)}
    # Other defaults may have other options: a ResNet has none of a Vision Transformer's.
    unknown = sorted(path[-1].replace("_", "-") for path in given.keys() - options.keys())
    missing = [
        option.name for path, option in options.items() if option.default is dataclasses.MISSING and path not in given
    ]
    refuse_first(
        [
            (unknown, f"With these defaults there is no option for {', '.join(unknown)}; leave it out."),
            (missing, f"Missing from {as_typed(prog)}: {', '.join(missing)}; {_HELP}"),
        ]
    )
    return _built(options_class, given, defaults, ())


def arguments_of(options: Any, *without: str) -> list[str]:
    """The fields of an options dataclass as a command line has them, without the defaults and the fields named.

    Only for texts, numbers and tuples of them.
    """
    arguments = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in without:
            several = value if isinstance(value, tuple) else (value,)
            arguments += [f"--{field.name.replace('_', '-')}", *map(str, several)]
    return arguments


def named(arguments: Sequence[str], option: str, default: str) -> tuple[str, list[str]]:
    """Return the value of an option on which the other options depend, and the remaining arguments."""
    places = [index for index, argument in enumerate(arguments) if _option_name(argument) == option]
    if len(places) > 1:
        raise UserError(f"{option} is given twice; give it once.")
    if not places:
        return default, [*arguments]
    _, equals, value = arguments[places[0]].partition("=")
    before, behind = arguments[: places[0]], arguments[places[0] + 1 :]
    if equals:
        return value, [*before, *behind]
    return _converted(option, str, behind[0] if behind else None), [*before, *behind[1:]]


def _built(options_class: type, given: Mapping[tuple[str, ...], Any], defaults: Any, path: tuple[str, ...]) -> Any:
    values = {}
    for field in dataclasses.fields(options_class):
        default = _default(field, defaults)
        nested = _nested_class(_hints(options_class)[field.name], default)
        if nested:
            inner = {} if default is dataclasses.MISSING else _values(default)
            default = _built(nested, given, inner, (*path, field.name))
        values[field.name] = given.get((*path, field.name), default)
    options = options_class(**values)
    check_ranges(options)
    return options


def _options(
    options_class: type, defaults: Mapping[str, Any], path: tuple[str, ...] = (), prefix: str = ""
) -> Iterator[_Option]:
    hints = _hints(options_class)
    for field in dataclasses.fields(options_class):
        default, hint = _default(field, defaults), hints[field.name]
        dashed = prefix + field.name.replace("_", "-")
        notes = _notes(hint)
        kinds = _kinds(hint)
        if nested := _nested_class(hint, default):
            inner = {} if default is dataclasses.MISSING else _values(default)
            yield from _options(nested, inner, (*path, field.name), f"{dashed}." if len(kinds) > 1 else prefix)
        elif not any(map(dataclasses.is_dataclass, kinds)):
            aliases = tuple(name for note in notes if isinstance(note, Aliases) for name in note.names)
            name = next((note.metavar for note in notes if isinstance(note, Positional)), f"--{dashed}")
            yield _Option((*path, field.name), name, aliases, hint, default, options_class)


def _default(field: dataclasses.Field, defaults: Mapping[str, Any]) -> Any:
    if field.name in defaults:
        return defaults[field.name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _values(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def _nested_class(hint: Any, default: Any) -> type | None:
    """The dataclass of a field; of a field for one of several, that of its default."""
    nested = [kind for kind in _kinds(hint) if dataclasses.is_dataclass(kind)]
    if len(_kinds(hint)) > 1:
        return type(default) if type(default) in nested else None
    return typing.cast(type, nested[0]) if nested else None


def _hints(options_class: type) -> dict[str, Any]:
    return typing.get_type_hints(options_class, include_extras=True)


def _notes(hint: Any) -> tuple:
    """What annotates a field."""
    return getattr(hint, "__metadata__", ())


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type, without annotations."""
    hint = _bare(hint)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return tuple(map(_bare, typing.get_args(hint))) if is_union else (hint,)


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _option_name(argument: str) -> str:
    """`--batch_size=32` -> `--batch-size`, and `-k`; nothing for what is no option."""
    return argument.partition("=")[0].replace("_", "-") if re.match(r"--\w|-[a-z]$", argument) else ""


def _negated(name: str) -> str:
    """`--model.bias` -> `--model.no-bias`."""
    head, dot, last = name.removeprefix("--").rpartition(".")
    return f"--{head}{dot}no-{last}"


def _texts_of(option: _Option, texts: Sequence[str], rest: list[str]) -> list[str]:
    """Take what belongs to an option from the arguments behind it; `texts` are those it already has."""
    if typing.get_origin(option.kind) is not tuple:
        count = 1 - len(texts)
    elif option.repeated:
        count = next((index for index, text in enumerate(rest) if _option_name(text)), len(rest))
    elif set(typing.get_args(option.kind)) == {int}:  # the second is a number, or something else follows
        count = 0 if "," in "".join(texts) else 1 - len(texts)
        after = rest[count : count + 1]
        count += bool(after and re.fullmatch(r"-?\d+", after[0]))
    else:
        count = len(typing.get_args(option.kind)) - len(texts)
    taken: list[str] = []
    while rest and len(taken) < count and not _option_name(rest[0]):
        taken.append(rest.pop(0))
    return taken


def _value(option: _Option, name: str, texts: Sequence[str]) -> Any:
    if [*texts] == ["None"] and types.NoneType in _kinds(option.hint):
        return None
    if typing.get_origin(option.kind) is not tuple:
        return _converted(name, option.kind, texts[0] if texts else None)
    parts = typing.get_args(option.kind)
    may_be_empty = option.default == () or any(isinstance(note, MayBeEmpty) for note in _notes(option.hint))
    if option.repeated and (texts or may_be_empty):
        return tuple(_converted(name, parts[0], text) for text in texts)
    if option.repeated:
        raise UserError(f"{name} takes one value or more, but was given nothing; {_HELP}")
    if set(parts) == {int}:
        numbers = [number for text in texts for number in re.split("[x,]", text)]
        if len(numbers) == 1 and int in _kinds(option.hint):
            return _converted(name, int, numbers[0])
        if not 1 <= len(numbers) <= 2 or not all(number.isdecimal() and int(number) for number in numbers):
            raise UserError(
                f"{name} takes one or two whole numbers above 0, as in {name} 96 or {name} 96 128, but was given "
                f"{' '.join(texts) or 'nothing'}."
            )
        return int(numbers[0]), int(numbers[-1])
    if len(texts) < len(parts):
        raise UserError(f"{name} takes {len(parts)} values, but was given {' '.join(texts) or 'nothing'}; {_HELP}")
    return tuple(_converted(name, part, text) for part, text in zip(parts, texts, strict=True))


def _converted(name: str, kind: Any, text: str | None) -> Any:
    kind = _bare(kind)
    if text is None:
        raise UserError(f"{name} takes a value, but was given nothing; {_HELP}")
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if text in choices:
            return text
        meant = _VALUE_SYNONYMS.get(text.lower(), text.lower())
        near = difflib.get_close_matches(meant, choices, 1, _LEAST_LIKE)
        advice = f"did you mean {near[0]}? {_HELP}" if near else _HELP
        listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise UserError(f"{name} takes {listed}, but was given {text!r}; {advice}")
    try:
        return kind(text)
    except ValueError:
        what = {int: "a whole number", float: "a number"}[kind]
        raise UserError(f"{name} takes {what}, but was given {text!r}; {_HELP}") from None


def _refuse_unknown(names: Sequence[str], known: Mapping[str, _Option]) -> None:
    unknown = [name for name in dict.fromkeys(names) if name not in known]
    if not unknown:
        return
    near: list[str] = []
    for name in unknown:
        synonym = _SYNONYMS.get(name)
        near += (
            [synonym]
            if synonym is not None and synonym in known
            else difflib.get_close_matches(name, known, 1, _LEAST_LIKE)
        )
    advice = f"did you mean {' or '.join(near)}? {_HELP}" if near else _HELP
    raise UserError(f"There {'are no options' if unknown[1:] else 'is no option'} {', '.join(unknown)}; {advice}")


def _print_help(options_class: type, options: Sequence[_Option], prog: str) -> None:
    width = min(max(shutil.get_terminal_size().columns, _LEAST_COLUMNS), _MOST_COLUMNS) - 1
    indent = " " * 26
    positional = " ".join(
        f"{option.name} ..." if option.repeated else option.name for option in options if option.positional
    )
    print(f"usage: {as_typed(prog)} [OPTIONS] {positional}".rstrip())
    print("\n" + textwrap.fill(" ".join((inspect.getdoc(options_class) or "").split()), width) + "\n")
    for option in options:
        left = _left(option)
        text = _docstrings(option.owner).get(option.path[-1], "") + _shown_default(option)
        lines = textwrap.wrap(text, width - len(indent), break_on_hyphens=False) or [""]
        if len(left) + 3 < len(indent):
            print(f"  {left}".ljust(len(indent)) + lines.pop(0))
        else:
            print(f"  {left}")
        print("".join(f"{indent}{line}\n" for line in lines), end="")
    print("\nEvery command has --help, and --verbose for the log messages of TensorFlow.")


def _left(option: _Option) -> str:
    """The names of an option and what it takes, for the help."""
    if option.positional:
        return option.name
    names = [option.name, *option.aliases, *([_negated(option.name)] if option.kind is bool else [])]
    return f"{', '.join(names)} {option.metavar}".rstrip()


def _metavar(kind: Any) -> str:
    kind = _bare(kind)
    return "|".join(typing.get_args(kind)) if typing.get_origin(kind) is Literal else _METAVARS[kind]


def _shown_default(option: _Option) -> str:
    if option.default is dataclasses.MISSING:
        return "" if option.positional else " (required)"
    if option.default in (None, (), ""):
        return ""
    return f" (default: {_shown(option.default)})"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@functools.cache
def _docstrings(options_class: type) -> dict[str, str]:
    """The text below each field of a dataclass and of those it inherits from, as one line."""
    found: dict[str, str] = {}
    for parent in reversed(options_class.__mro__):
        if not dataclasses.is_dataclass(parent):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        statements = typing.cast(ast.ClassDef, body).body
        for field, text in itertools.pairwise(statements):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[attr-defined]
    return found

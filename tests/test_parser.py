"""Dataclasses as the options of a command."""

import dataclasses
from typing import Annotated, Literal

import pytest

from keras_vit import UserError
from keras_vit.parser import Aliases, Count, Positional, Positive, Range, options_from, parse, read


@dataclasses.dataclass(frozen=True)
class Circle:
    """A circle."""

    radius: float = 1.0


@dataclasses.dataclass(frozen=True)
class Square:
    """A square."""

    side: int = 2
    color: str = "red"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    """Options that several commands share."""

    where: str
    """Where to draw."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """Draw shapes."""

    files: Annotated[tuple[str, ...], Positional("FILES")] = ()
    """Files to draw."""
    inner: Inner
    shape: Circle | Square = dataclasses.field(default_factory=Square)
    image_size: tuple[int, int] | None = None
    copies: Annotated[Count, Aliases(("--times",))] = 1
    """How many."""
    scales: tuple[Positive, ...] = (1.0,)
    share: Annotated[float, Range("[0, 1)")] | None = None
    style: Literal["plain", "dotted"] | None = None
    fill: bool = False


def drawn(*arguments: str) -> Drawing:
    return parse(Drawing, ["--where", "here", *arguments], prog="draw")


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["a.png", "--copies", "3", "b.png"], {"files": ("a.png", "b.png"), "copies": 3}),
        (["--times=2", "--fill"], {"copies": 2, "fill": True}),
        (["--no-fill", "--scales", "1", "2.5", "--style", "dotted"], {"scales": (1.0, 2.5), "style": "dotted"}),
        (["--share", "0.5"], {"share": 0.5}),
        (["--share", "None"], {"share": None}),
        (["--image_size", "8"], {"image_size": (8, 8)}),
        (["--image-size", "8", "9", "a.png"], {"image_size": (8, 9), "files": ("a.png",)}),
        (["--shape.side", "5"], {"shape": Square(5)}),
    ],
)
def test_options_set_the_fields(arguments, fields):
    assert drawn(*arguments) == dataclasses.replace(drawn(), **fields)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--copies", "0"], "--copies must be at least 1, but is 0."),
        (["--scales", "1", "0"], "--scales must be positive, but is 1.0 0.0."),
        (["--scales", "inf"], "--scales must be a finite number, but is inf."),
        (["--scales"], "--scales takes one value or more, but was given nothing"),
        (["--share", "1"], r"--share must be in \[0, 1\), but is 1.0."),
        (["--copies"], "--copies takes a value, but was given nothing"),
        (["--copies", "many"], "--copies takes a whole number, but was given 'many'"),
        (["--style", "doted"], "--style takes plain or dotted, but was given 'doted'; did you mean dotted?"),
        (["--copy", "2"], "There is no option --copy; did you mean --copies?"),
        (["--copies", "2", "--times", "2"], "--copies and --times are two names of one option"),
        (["--shape.radius", "2"], "There is no option --shape.radius"),
        (["--fill=false"], "--fill takes no value, but was given --fill=false"),
    ],
)
def test_a_mistake_in_an_option_is_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=f"^{sentence}"):
        drawn(*arguments)


def test_missing_options_are_named():
    with pytest.raises(UserError, match="Missing from draw: --where; --help lists all options."):
        parse(Drawing, [], prog="draw")


def test_what_was_read_once_is_built_on_several_defaults():
    given = read(Drawing, ["--where", "here", "--shape.radius", "3"], prog="draw", shape=Circle())
    assert options_from(Drawing, given, prog="draw", shape=Circle(9.0)).shape == Circle(3.0)
    given = read(Drawing, ["--where", "here", "--copies", "3"], prog="draw", shape=Circle())
    assert options_from(Drawing, given, prog="draw", shape=Square(7)) == Drawing(
        inner=Inner(where="here"), shape=Square(7), copies=3
    )


def test_an_option_of_another_default_is_not_dropped():
    given = read(Drawing, ["--where", "here", "--shape.radius", "3"], prog="draw", shape=Circle())
    with pytest.raises(UserError, match="With these defaults there is no option for radius; leave it out"):
        options_from(Drawing, given, prog="draw", shape=Square())


def test_the_second_number_of_a_size_is_no_file_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "128").mkdir()
    monkeypatch.chdir(tmp_path)
    assert drawn("--image-size", "96", "128").image_size == (96, 128)


def test_the_help_has_every_option_with_its_text_and_default(capsys):
    with pytest.raises(SystemExit) as stopped:
        drawn("--help")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: draw [OPTIONS] FILES ...\n\nDraw shapes.\n")
    assert "--where STR             Where to draw. (required)\n" in printed
    assert "--copies, --times INT   How many. (default: 1)\n" in printed

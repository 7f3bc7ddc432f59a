"""Dataclasses as the options of a command."""

import dataclasses
from typing import Annotated, Literal

import pytest

from keras_vit import UserError
from keras_vit.cli.options import Aliases, Count, MayBeEmpty, MayLead, Positional, Positive, Range
from keras_vit.cli.parser import named, options_from, parse, read


@dataclasses.dataclass(frozen=True)
class Circle:
    """A circle."""

    radius: float = 1.0


@dataclasses.dataclass(frozen=True)
class Square:
    """A square."""

    side: int = 2
    color: str = "red"
    round: bool = True


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
    """How many, in the words of
    two lines."""
    scales: tuple[Positive, ...] = (1.0,)
    words: Annotated[tuple[str, ...] | None, MayBeEmpty()] = None
    share: Annotated[float, Range("[0, 1)")] | None = None
    style: Literal["plain", "dotted"] | None = None
    fill: bool = False


@dataclasses.dataclass(frozen=True)
class Opened:
    """Options of a command without other arguments."""

    run: Annotated[str, Aliases(("--model",)), MayLead()]
    size: tuple[int, int] = (1, 1)


def drawn(*arguments: str) -> Drawing:
    return parse(Drawing, ["--where", "here", *arguments], prog="draw")


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["a.png", "b.png", "--copies", "3"], {"files": ("a.png", "b.png"), "copies": 3}),
        (["--times=2", "--fill", "a.png"], {"copies": 2, "fill": True, "files": ("a.png",)}),
        (["--no-fill", "--scales", "1", "2.5", "--style", "dotted"], {"scales": (1.0, 2.5), "style": "dotted"}),
        (["--share", "0.5", "--words"], {"share": 0.5, "words": ()}),
        (["--image_size", "8"], {"image_size": (8, 8)}),
        (["--image-size=8x9"], {"image_size": (8, 9)}),
        (["--image-size", "8,9"], {"image_size": (8, 9)}),
        (["--image-size", "8", "9", "a.png"], {"image_size": (8, 9), "files": ("a.png",)}),
        (["--image-size", "8", "a.png"], {"image_size": (8, 8), "files": ("a.png",)}),
        (["--shape.side", "5", "--shape.no-round"], {"shape": Square(5, round=False)}),
    ],
)
def test_options_set_the_fields(arguments, fields):
    assert drawn(*arguments) == dataclasses.replace(drawn(), **fields)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--scales"], "--scales needs a value"),
        (["--copies", "0"], "--copies must be at least 1, but is 0"),
        (["--scales", "1", "0"], "--scales must be positive, but is 0.0"),
        (["--scales", "inf"], "--scales must be a finite number"),
        (["--share", "1"], r"--share must be in \[0, 1\)"),
    ],
)
def test_a_number_out_of_its_range_names_the_option(arguments, option):
    with pytest.raises(UserError, match=option):
        drawn(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--copies"], ["--copies"]),
        (["--copies", "many"], ["--copies", "many"]),
        (["--style", "doted"], ["--style", "doted", "dotted"]),
        (["--copeis", "2"], ["--copeis", "Perhaps you meant", "--copies"]),
        (["--shape.radius", "2"], ["--shape.radius"]),
        (["--image-size", "wide"], ["--image-size", "wide"]),
        (["--image-size", "224", "0"], ["--image-size", "224x0"]),
        (["--image-size", "-64"], ["--image-size", "-64"]),
        (["--image-size"], ["--image-size"]),
    ],
)
def test_a_mistake_that_the_parser_finds_ends_with_2_and_names_the_option(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        drawn(*arguments)
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert all(word in printed.err for word in words)
    assert "Traceback" not in printed.err


def test_missing_options_are_named(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Drawing, [], prog="draw")
    assert stopped.value.code == 2
    assert "--where" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["runs/a", "--size", "2"], ["--size=2", "--run", "runs/a"], ["--model=runs/a"]])
def test_a_run_may_come_first_without_its_option(arguments):
    assert parse(Opened, arguments, prog="open").run == "runs/a"


def test_what_was_read_once_is_built_on_several_defaults():
    given = read(Drawing, ["--where", "here", "--shape.radius", "3"], prog="draw", shape=Circle())
    assert options_from(Drawing, given, prog="draw", shape=Circle(9.0)).shape == Circle(3.0)
    given = read(Drawing, ["--where", "here", "--copies", "3"], prog="draw", shape=Circle())
    assert options_from(Drawing, given, prog="draw", shape=Square(7)) == Drawing(
        inner=Inner(where="here"), shape=Square(7), copies=3
    )


def test_an_option_of_another_default_is_not_dropped():
    given = read(Drawing, ["--where", "here", "--shape.radius", "3"], prog="draw", shape=Circle())
    with pytest.raises(UserError, match="radius"):
        options_from(Drawing, given, prog="draw", shape=Square())


@pytest.mark.parametrize("arguments", [["--a", "x", "--recipe", "b", "c"], ["--a", "x", "c", "--recipe=b"]])
def test_the_option_on_which_others_depend_is_taken_out_of_them(arguments):
    assert named(arguments, "--recipe", "none") == ("b", ["--a", "x", "c"])
    assert named(["--a"], "--recipe", "none") == ("none", ["--a"])


def test_the_help_has_every_option_with_its_text_and_default_and_the_usual_ones_first(capsys):
    with pytest.raises(SystemExit) as stopped:
        read(
            Drawing, ["--help"], prog="draw", about="Draw.\n\n    draw a.png --fill\n\ndraws.", usual=("where", "side")
        )
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "How many, in the words of two lines. (default: 1)" in " ".join(printed.replace("│", "").split())
    assert "\n    draw a.png --fill\n" in printed
    assert "None" not in printed
    places = [printed.index(word) for word in ("FILES", "--where", "--shape.side", "--copies", "--shape.color")]
    assert places == sorted(places)


def test_the_options_are_printed_as_tables_of_the_pages(monkeypatch, capsys):
    monkeypatch.setenv("KERAS_VIT_OPTIONS", "table")
    with pytest.raises(SystemExit):
        read(Drawing, [], prog="draw")
    own, inner, _ = capsys.readouterr().out.split("\n## ")
    assert "| `--copies` `--times` | integer | `1` | How many, in the words of two lines. |" in own
    assert "| `--style` | `plain`, `dotted` |  |  |" in own
    assert "| `--image-size` | one or two integers |  |  |" in own
    assert "| `FILES` | text … |  | Files to draw. |" in own
    assert inner.startswith("Inner\n\nOptions that several commands share.")
    assert "| `--where` | text | required | Where to draw. |" in inner

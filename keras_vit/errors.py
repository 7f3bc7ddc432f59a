"""Exceptions for user errors and for artifacts that differ from their model, and helpers for error messages."""

import contextlib
import dataclasses
import difflib
import importlib
import numbers
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any


class UserError(ValueError):
    """An error that the caller can fix. The message is one sentence: what was expected, what was found, what to do.

    Names from files are part of messages, so control characters are escaped.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class ParityError(RuntimeError):
    """The outputs of an artifact differ from those of its model, so the artifact was removed. Not a user error.

    The message is one sentence. A command that ends with it has the exit code os.EX_SOFTWARE, 70.
    """


# Control characters, and those that change the direction of a line: what a terminal would obey.
_CODES = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = {code: repr(chr(code))[1:-1] for code in _CODES if chr(code) not in "\n\r\t"}
_MOST_NAMED = 3  # names of an error message
_LEAST_LIKE = 0.75  # of the letters of two names in a path, how many must be alike
# What other codes call the parts of a model's name.
_SYNONYMS = {
    "tiny": "ti", "small": "s", "medium": "m", "base": "b", "large": "l", "huge": "h", "giant": "g", "gigantic": "g",
    "resnet": "r", "patch": "", "transformer": "",
}  # fmt: skip

# Characters of a value in a message.
_LONGEST_SHOWN = 60
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 4, _LONGEST_SHOWN, _LONGEST_SHOWN


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known names nearest to `name`, at most three, as a comma-separated list for an error message.

    Near are names with the same parts, such as family, size and patch ("vit_base_patch16" and "ViT-B_16"), and names
    with the same letters.
    """
    name = name[:100]  # comparing letters takes time with their square
    known, parts = sorted(known), _parts(name)

    def similarity(candidate: str) -> float:
        other = _parts(candidate)
        shared = _weight(parts & other) / max(_weight(parts | other), 1)
        return shared + difflib.SequenceMatcher(None, name.lower(), candidate.lower()).ratio()

    similarities = {candidate: similarity(candidate) for candidate in known}
    best = max(similarities.values(), default=0.0)
    close = [candidate for candidate in known if similarities[candidate] >= max(0.75 * best, 0.4)]
    near = sorted(close, key=lambda candidate: -similarities[candidate])
    return ", ".join((near or known)[:_MOST_NAMED])


def near_path(path: str | os.PathLike, is_meant: Callable[[str], bool] = os.path.exists) -> str:
    """Return `; did you mean PATH?` for a path of this machine that does not exist, or "" where none is like it.

    Folders and the last name may be mistyped, each a little: `run/demo` is like `runs/demo`.

    Args:
        path: that was given.
        is_meant: whether a path can be what was meant, such as os.path.isdir.
    """
    if os.path.lexists(path):
        return ""
    existing, parts = "", os.path.normpath(path).split(os.sep)
    for number, part in enumerate(parts, 1):
        here = os.path.join(existing, part) if existing else part or os.sep
        if not os.path.exists(here):
            fits, names = is_meant if number == len(parts) else os.path.isdir, list[str]()
            with contextlib.suppress(OSError):  # a file, or not to be read
                names = [name for name in os.listdir(existing or os.curdir) if fits(os.path.join(existing, name))]
            if not (close := difflib.get_close_matches(part, names, 1, _LEAST_LIKE)):
                return ""
            here = os.path.join(existing, close[0])
        existing = here
    return f"; did you mean {existing}?"


def _parts(name: str) -> frozenset[str]:
    """Return the words and numbers of a name: "vit_base_patch16" has vit, b and 16."""
    return frozenset(_SYNONYMS.get(word, word) for word in re.findall(r"[a-z]+|[0-9]+", name.lower())) - {""}


def _weight(parts: frozenset[str]) -> int:
    """Return the weight of words, which tell more than numbers: a ViT-H_14 is nearer to ViT-H_16 than a ViT-B_16."""
    return sum(1 if part.isdecimal() else 2 for part in parts)


def check_integers(name: str, value, *, length: int | None = None, least: int = 1) -> None:
    """Raise UserError unless an argument is None or an integer of at least `least`.

    With `length`, the argument must be a sequence of that many integers; 0 allows any number.
    """
    many = length is not None
    values = value if many and isinstance(value, list | tuple) else (value,)
    whole = all(isinstance(v, numbers.Integral) and not isinstance(v, bool) and int(v) >= least for v in values)
    if value is None or (whole and many == isinstance(value, list | tuple) and (not length or len(values) == length)):
        return
    needed = {None: "an integer", 2: "two integers"}.get(length, "integers")
    raise UserError(f"{name} must be {needed} of at least {least}, but is {value!r:.80}.")


def is_or_are(count: int) -> str:
    """Return the verb of a sentence on this many things."""
    return "is" if count == 1 else "are"


def check_choice(name: str, value, choices: Iterable[str]) -> None:
    """Raise UserError unless an argument is one of several texts."""
    choices = [*choices]
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, but is {value!r}.")


def check_known(what: str, name: str, known: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raise UserError unless `name` is that of a thing such as a recipe; with the nearest names, also of `others`."""
    known = [*known]
    if name not in known:
        names = nearest(str(name), [*known, *others])
        raise UserError(f"There is no {what} named {name!r:.80}; the nearest names are {names}.")


def needed_package(module: str, what: str, package: str) -> ModuleType:
    """Import a Python module that is not always installed. Raises UserError that says what needs its package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise UserError(f"{what} the Python package {package}; install it with pip install {package}.") from missing


def shown(value: Any) -> str:
    """Return a value of a file for a message, in at most 60 characters, whatever its size and depth."""
    return _SHORT.repr(value)[:_LONGEST_SHOWN]


def printable(text: str) -> str:
    """Return a text with control characters as Python writes them; line ends and tabs stay."""
    return text.translate(_CONTROLS)


def reason_of(error: BaseException) -> str:
    """Return the message of an exception in one line of at most 200 characters; its type if it has none."""
    words = getattr(error, "strerror", None) or getattr(error, "message", None) or error
    return " ".join(str(words).split())[:200] or type(error).__name__


@contextlib.contextmanager
def explained(
    sentence: str | Callable[[str], str], *errors: type[BaseException], kind: type[Exception] = UserError
) -> Iterator[None]:
    """Make one sentence of exceptions of other code; a UserError passes as it is.

    Args:
        sentence: or a function from the reason, see `reason_of`, to it.
        errors: types of the exceptions.
        kind: what is raised instead.
    """
    try:
        yield
    except UserError:
        raise
    except errors as error:
        raise kind(sentence if isinstance(sentence, str) else sentence(reason_of(error))) from error


def reading(
    file: object, kind: str, *errors: type[Exception], advice: str = "correct it, or write it again"
) -> contextlib.AbstractContextManager[None]:
    """Make a UserError of what a parser raises: that a file cannot be read as a `kind`, such as JSON.

    errors: further ones than ValueError and RecursionError.
    """
    expected: tuple[type[Exception], ...] = (ValueError, RecursionError, *errors)
    return explained(lambda reason: f"{file!s:.500} cannot be read as {kind} ({reason[:120]}); {advice}.", *expected)


Rules = Iterable[tuple[object, str]]  # whether a rule is broken, and what is said of it then


def refuse_first(rules: Rules) -> None:
    """Raise UserError with the sentence of the first rule that is broken."""
    for is_broken, sentence in rules:
        if is_broken:
            raise UserError(sentence)


Applies = tuple[Sequence[str], bool, str]  # names of options, whether they have an effect, and what they apply to


def refuse_without_effect(options, applies: Iterable[Applies], named=None) -> None:
    """Raise UserError for an option that was set and has no effect.

    Args:
        options: a dataclass instance, whose fields are options.
        applies: the fields that need another option.
        named: where the options come from, as a named recipe: its values, like those of the dataclass, may remain.
    """
    unset = {field.name: field.default for field in dataclasses.fields(options)}
    for name, owner in ((name, owner) for names, apply, owner in applies if not apply for name in names):
        if getattr(options, name) not in (unset[name], getattr(named, name, unset[name])):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} applies only to {owner}; give that, or leave it out.")

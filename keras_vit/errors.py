"""Exceptions for user errors and for artifacts that differ from their model, and helpers for error messages."""

import difflib
import numbers
from collections.abc import Iterable


class UserError(ValueError):
    """An error that the caller can fix. The message is one sentence: what was expected, what was found, what to do."""


class ParityError(RuntimeError):
    """The outputs of an artifact differ from those of its model, so the artifact was removed. Not a user error.

    The message is one sentence. A command that ends with it has the exit code os.EX_SOFTWARE, 70.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known names most similar to `name`, as a comma-separated list for an error message."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=5, cutoff=0.4)
    return ", ".join([folded[match] for match in close] or known)


def check_integers(name: str, value, *, length: int | None = None, least: int = 1) -> None:
    """Raise UserError unless an argument is None or an integer of at least `least`.

    With `length`, the argument must be a sequence of that many integers; 0 allows any number.
    """
    many = length is not None
    values = value if many and isinstance(value, list | tuple) else (value,)
    whole = all(isinstance(v, numbers.Integral) and not isinstance(v, bool) and int(v) >= least for v in values)
    if value is None or (whole and many == isinstance(value, list | tuple) and (not length or len(values) == length)):
        return
    kind = {None: "an integer", 2: "two integers"}.get(length, "integers")
    raise UserError(f"{name} must be {kind} of at least {least}, but is {value!r:.80}.")

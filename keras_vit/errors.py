"""The exception that a user's mistake raises, what helps to say it, and the exception of an artifact that differs."""

import difflib
import numbers
from collections.abc import Iterable


class UserError(ValueError):
    """Something the caller can mend. Its text is one sentence: what was expected, what was found, what to do."""


class ParityError(RuntimeError):
    """An artifact does not compute what its model computes, so it was not kept: no mistake of the caller's.

    Its text is one sentence. A command that ends with it has the exit code os.EX_SOFTWARE, 70.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names nearest to `name`, nearest first, as the end of a sentence."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=5, cutoff=0.4)
    return ", ".join([folded[match] for match in close] or known)


def check_integers(name: str, value, *, length: int | None = None, least: int = 1) -> None:
    """Raise UserError unless an argument is None or an integer of at least `least`; with `length`, so many of them.

    length: 0 for any number of integers.
    """
    many = length is not None
    values = value if many and isinstance(value, list | tuple) else (value,)
    whole = all(isinstance(v, numbers.Integral) and not isinstance(v, bool) and int(v) >= least for v in values)
    if value is None or (whole and many == isinstance(value, list | tuple) and (not length or len(values) == length)):
        return
    kind = {None: "an integer", 2: "two integers"}.get(length, "integers")
    raise UserError(f"{name} must be {kind} of at least {least}, but is {value!r:.80}.")

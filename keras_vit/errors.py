"""The one exception that a user's mistake raises, wherever in the project it is noticed."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the caller can mend. Its text is one sentence: what was expected, what was found, what to do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names nearest to `name`, nearest first, as the end of a sentence."""
    known = sorted(known)
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=5, cutoff=0.4)
    return ", ".join([folded[match] for match in close] or known)

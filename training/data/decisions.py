"""Decisions on single pictures: what `keras-vit review` writes and `--exclude` reads. Imports no TensorFlow."""

import csv
import dataclasses
import pathlib
import typing
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from keras_vit.errors import UserError, reading
from keras_vit.files.labels import composed
from keras_vit.files.remote import existing_file
from keras_vit.files.tables import cell_of_csv
from training.data.file_contents import FileContents, shown

Decided = Literal["keep", "relabel", "drop"]
COLUMNS = ("path", "digest", "decision", "new_label", "reason")


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision on an image."""

    path: str
    digest: str
    """A hash of its content, 16 hexadecimal digits; see `FileContents`."""
    decision: Decided
    new_label: str
    """Used by relabel alone."""


@dataclasses.dataclass(frozen=True)
class Decisions:
    """The rows of a file, by the digest of the picture."""

    by_digest: dict[str, list[Decision]]

    def of_files(self, files: Iterable[str], contents: FileContents) -> dict[str, Decision]:
        """File -> the decision on it.

        A picture is known by its content, wherever it is now. Of copies, each has the decision with its own file name
        and folder, or with its own name; other copies are kept.
        """
        files = list(files)
        found = {}
        for file, digest in zip(files, contents.digests(files).tolist(), strict=True):
            decisions = self.by_digest.get(f"{digest:016x}", [])
            if decision := _of_same_name(shown(file), decisions):
                found[file] = decision
        return found


def _of_same_name(file: str, decisions: Sequence[Decision]) -> Decision | None:
    """The decision whose path ends as that of a file, in as many parts as possible, at least in the name."""
    parts = pathlib.PurePath(file).parts[::-1]

    def alike(decision: Decision) -> int:
        others = pathlib.PurePath(decision.path).parts[::-1]
        return next((n for n, pair in enumerate(zip(parts, others, strict=False)) if pair[0] != pair[1]), len(parts))

    best = max(decisions, key=alike, default=None)
    return best if best is not None and alike(best) else None


def read_decisions(name: str) -> Decisions:
    """Read a file of decisions. Raises UserError for the first wrong row."""
    path = existing_file(name, "--exclude takes decisions.csv of review")
    found: dict[str, list[Decision]] = {}
    with (
        reading(name, "CSV in UTF-8", csv.Error, advice="save it again"),
        path.open(newline="", encoding="utf-8-sig") as stream,
    ):
        rows = list(csv.DictReader(stream))
    for number, row in enumerate(rows, 2):
        if missing := [column for column in COLUMNS[:4] if row.get(column) is None]:
            raise UserError(f"Line {number} of {name} has no {missing[0]}; it needs {', '.join(COLUMNS[:4])}.")
        if row["decision"].strip() not in get_args(Decided):
            raise UserError(
                f"Line {number} of {name} has the decision {row['decision']!r}; give {', '.join(get_args(Decided))}."
            )
        decided = typing.cast(Decided, row["decision"].strip())
        decision = Decision(
            cell_of_csv(row["path"]), row["digest"].strip(), decided, composed(cell_of_csv(row["new_label"].strip()))
        )
        if decision.decision == "relabel" and not decision.new_label:
            raise UserError(f"Line {number} of {name} has the decision relabel, but no new_label; give it the class.")
        found.setdefault(decision.digest, []).append(decision)
    return Decisions(found)

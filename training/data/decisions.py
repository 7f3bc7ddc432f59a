"""Decisions on single images: what `keras-vit review` writes and `--exclude` reads. Imports no TensorFlow."""

import csv
import dataclasses
import itertools
import pathlib
import typing
from collections.abc import Iterable
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
    """The rows of a file, by the digest of the image."""

    file: str
    by_digest: dict[str, list[Decision]]

    def of_files(self, files: Iterable[str], contents: FileContents) -> dict[str, Decision]:
        """Return the decisions by their files.

        An image is known by its content, wherever it is now. Of copies, each has the decision with its own file name
        and folder, or with its own name; other copies are kept.
        """
        files = list(files)
        decisions: dict[str, Decision] = {}
        for file, digest in zip(files, contents.digests(files).tolist(), strict=True):
            rows = self.by_digest.get(f"{digest:016x}", [])
            best = max(rows, key=lambda row: _same_parts(shown(file), row.path), default=None)
            if best is not None and _same_parts(shown(file), best.path):
                decisions[file] = best
        return decisions


def _same_parts(file: str, other: str) -> int:
    """Return in how many parts two paths end alike."""
    pairs = zip(pathlib.PurePath(file).parts[::-1], pathlib.PurePath(other).parts[::-1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def read_decisions(name: str) -> Decisions:
    """Read a file of decisions. Raises UserError for the first wrong row."""
    path = existing_file(name, "--exclude takes decisions.csv of review")
    by_digest: dict[str, list[Decision]] = {}
    with (
        reading(name, "CSV in UTF-8", csv.Error, advice="save it again"),
        path.open(newline="", encoding="utf-8-sig") as stream,
    ):
        rows = list(csv.DictReader(stream))
    for number, row in enumerate(rows, 2):
        file, digest, decided, label = (cell_of_csv(row.get(column) or "") for column in COLUMNS[:4])
        digest, decided, label = digest.strip(), decided.strip(), composed(label.strip())
        if not digest or decided not in get_args(Decided) or (decided == "relabel" and not label):
            raise UserError(
                f"Line {number} of {name} should have a path, a digest, a decision of {', '.join(get_args(Decided))} "
                f"and, to relabel, a new_label, but has the decision {decided!r:.60}; correct it."
            )
        decision = Decision(file, digest, typing.cast(Decided, decided), label)
        by_digest.setdefault(digest, []).append(decision)
    return Decisions(name, by_digest)

"""Contents of the files of a data set: their fingerprint, files of equal content, and decisions on single images.

`keras-vit review` writes the decisions, and `--exclude` reads them. Imports no TensorFlow.
"""

import collections
import csv
import dataclasses
import hashlib
import itertools
import os
import pathlib
import typing
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from keras_vit.errors import UserError, is_or_are, reading
from keras_vit.files.labels import composed
from keras_vit.files.remote import existing_file, to_path
from keras_vit.files.tables import cell_of_csv
from training.data.groups import Look, look_at

_DIGEST_BYTES = 8


class FileContents:
    """Digests of the contents of files, noted while each file is read anyway."""

    def __init__(self) -> None:
        self._digests: dict[str, int] = {}
        self.with_looks, self.looks = False, dict[str, Look | None]()  # whether to look at each image, too
        self.group_of = dict[str, int]()  # of each file, once they are divided into groups

    def note(self, file: str, content: bytes) -> None:
        """Remember the content of a file."""
        digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
        self._digests[file] = int.from_bytes(digest, "big")  # takes half the memory of bytes
        if self.with_looks:
            self.looks[file] = look_at(content)

    def read(self, file: str) -> bool:
        """Read a file and remember its content; False for one that cannot be read."""
        try:
            self.note(file, to_path(file).read_bytes())
        except OSError:
            return False
        return True

    def digests(self, files: Iterable[str]) -> np.ndarray:
        """The digest of each file, uint64 (n,); 0 for one that could not be read."""
        return np.array([self._digests.get(file, 0) for file in files], np.uint64)

    def fingerprint(self, files: Iterable[str], lines: Iterable[str]) -> int:
        """A checksum of the contents of files in their order, and of a line of text for each."""
        checksum = zlib.crc32(os.fsencode("\0".join(lines)))
        for file in files:
            checksum = zlib.crc32(self._digests[file].to_bytes(_DIGEST_BYTES, "big"), checksum)
        return checksum

    def remarks(self, train: Mapping[str, object], test: Mapping[str, object]) -> list[str]:
        """A sentence about files of equal content under different labels, and one about those of equal label in both
        splits, which are classified too well.

        Args:
            train: the files to train on, each with its label.
            test: the files to evaluate on, each with its label.
        """
        groups: dict[int, list[str]] = collections.defaultdict(list)
        for file in (*train, *test):
            groups[self._digests[file]].append(file)
        labels, others, copies, found = {**train, **test}, dict[str, str](), dict[str, str](), list[str]()
        for files in filter(lambda each: len(each) > 1, groups.values()):
            for file in files:
                if labels[file] != labels[files[0]]:
                    others.setdefault(files[0], file)
                alike = [other for other in files if file in test and other in train and train[other] == test[file]]
                if alike:
                    copies[file] = alike[0]
        if others:
            (first, other), count = map(shown, next(iter(others.items()))), len(others)
            found.append(
                f"{count:,} {'image also appears' if count == 1 else 'images also appear'} under another label, such "
                f"as {first} and {other}; keep each under its right label."
            )
        if copies:
            copy, original = map(shown, next(iter(copies.items())))
            found.append(
                f"{len(copies):,} of the {len(test):,} evaluation images {is_or_are(len(copies))} also among the "
                f"training images, such as {copy} and {original}, so the accuracy will be too high; remove the copies."
            )
        return found


def shown(file: str) -> str:
    """A path as a terminal can show it, whatever its bytes."""
    return os.fsencode(file).decode(errors="backslashreplace")


Decided = Literal["keep", "relabel", "drop"]
COLUMNS = ("path", "digest", "decision", "new_label", "reason")


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision on an image."""

    path: str
    digest: str  # a hash of its content, 16 hexadecimal digits; see `FileContents`
    decision: Decided
    new_label: str  # used by relabel alone


def decisions_of(
    files: Sequence[str], contents: FileContents, by_digest: Mapping[str, Sequence[Decision]]
) -> dict[str, Decision]:
    """Return the decisions by their files.

    An image is known by its content, wherever it is now. Of copies, each has the decision with its own file name and
    folder, or with its own name; other copies are kept.
    """
    decisions: dict[str, Decision] = {}
    for file, digest in zip(files, contents.digests(files).tolist(), strict=True):
        rows = by_digest.get(f"{digest:016x}", ())
        best = max(rows, key=lambda row: _same_parts(shown(file), row.path), default=None)
        if best is not None and _same_parts(shown(file), best.path):
            decisions[file] = best
    return decisions


def _same_parts(file: str, other: str) -> int:
    """Return in how many parts two paths end alike."""
    pairs = zip(pathlib.PurePath(file).parts[::-1], pathlib.PurePath(other).parts[::-1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def read_decisions(name: str) -> dict[str, list[Decision]]:
    """Read a file of decisions, by the digests of the images. Raises UserError for the first wrong row."""
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
        by_digest.setdefault(digest, []).append(Decision(file, digest, typing.cast(Decided, decided), label))
    return by_digest

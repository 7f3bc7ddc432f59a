"""Contents of the files of a data set: their fingerprint, and files of equal content."""

import collections
import hashlib
import os
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from keras_vit.errors import is_or_are
from keras_vit.files.remote import to_path

_DIGEST_BYTES = 8


class FileContents:
    """Digests of the contents of files, noted while each file is read anyway."""

    def __init__(self) -> None:
        self._digests: dict[str, int] = {}

    def note(self, file: str, content: bytes) -> None:
        """Remember the content of a file."""
        digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
        self._digests[file] = int.from_bytes(digest, "big")  # takes half the memory of bytes

    def read(self, file: str) -> bool:
        """Read a file and remember its content; False for one that cannot be read."""
        try:
            self.note(file, to_path(file).read_bytes())
        except OSError:
            return False
        return True

    def digests(self, files: Iterable[str]) -> np.ndarray:
        """The digest of each file, uint64 (n,)."""
        return np.array([self._digests[file] for file in files], np.uint64)

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
        equal = [files for files in groups.values() if len(files) > 1]
        labels = {**train, **test}
        others = [(files[0], file) for files in equal for file in files if labels[file] != labels[files[0]]]
        copies = []
        for files in equal:
            known = [file for file in files if file in train]
            for file in files:
                alike = [other for other in known if file in test and train[other] == test[file]]
                copies += [(file, alike[0])] if alike else []
        found = []
        if others:
            first, other = map(shown, others[0])
            count = len(dict(others))
            found.append(
                f"{count:,} {'image also appears' if count == 1 else 'images also appear'} under another label, such "
                f"as {first} and {other}; keep each under its right label."
            )
        if copies:
            copy, original = map(shown, copies[0])
            found.append(
                f"{len(copies):,} of the {len(test):,} evaluation images {is_or_are(len(copies))} also among the "
                f"training images, such as {copy} and {original}, so the accuracy will be too high; remove the copies."
            )
        return found


def shown(file: str) -> str:
    """A path as a terminal can show it, whatever its bytes."""
    return os.fsencode(file).decode(errors="backslashreplace")

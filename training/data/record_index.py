"""The index of TFRecord files: the length of every record, found once and kept beside the files as records.npz.

A record is: length (8 bytes, little-endian), CRC of it (4), data, CRC of them (4). So the lengths give every offset.
`keras-vit shard` writes the index with the files. For others it is made by reading the 12 bytes before each record.
"""

import concurrent.futures
import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import google_crc32c
import numpy as np

from keras_vit import UserError
from keras_vit.cli.progress import tracked
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.remote import RemoteError, read_places, to_path
from training.options.data import RECORD_INDEX

NAME = RECORD_INDEX
HEADER, FOOTER = 12, 4
# Bytes read at once where records are short, and up to which length they are.
_AHEAD, _SHORT = 2**18, 2**14
# Files read at the same time: a read from a bucket takes tens of milliseconds.
THREADS = 64

Parsed = TypeVar("Parsed")
# Bytes of a file, and when it was written, in nanoseconds.
Version = tuple[int, int]


def record_lengths(paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the bytes of the data of each record (records,) int64, by the path.

    Raises UserError for files that are no TFRecord files, or end within a record.
    """
    paths = sorted(set(paths))
    lengths: dict[str, np.ndarray] = {}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        sizes = dict(zip(paths, pool.map(file_size, paths), strict=True))
        for folder in sorted({os.path.dirname(path) for path in paths}):
            here = {path: size for path, size in sizes.items() if os.path.dirname(path) == folder}
            lengths |= _lengths_in(folder, here, pool)
    return lengths


def version_of(path: str) -> Version:
    """Return the size of a file and when it was written."""
    status = to_path(path).stat()
    return status.st_size, status.st_mtime_ns


def file_size(path: str) -> int:
    """Return the bytes of a file."""
    return version_of(path)[0]


def read_index(index: str, parse: Callable[[Mapping[str, np.ndarray]], Parsed], what: str) -> Parsed | None:
    """Parse the arrays of an index; return None if there is no intact one, so that `what` is indexed again."""
    if not to_path(index).is_file():
        return None
    try:
        return parse(read_npz(index))
    except RemoteError:
        raise
    except (ValueError, KeyError, TypeError):  # UserError is a ValueError
        print(f"The index {index} is damaged; the {what} are indexed again.")
        return None


@contextlib.contextmanager
def index_kept(index: str, what: str) -> Iterator[None]:
    """Print that an index could not be written inside, so that `what` is indexed again by each run."""
    try:
        yield
    except OSError as error:
        print(f"The index {index} cannot be written ({error.strerror}), so each run indexes the {what} again.")


def _lengths_in(
    folder: str, sizes: Mapping[str, int], pool: concurrent.futures.ThreadPoolExecutor
) -> dict[str, np.ndarray]:
    index = os.path.join(folder, NAME)
    known = read_index(index, _lengths_of, "records") or {}
    lengths = {path: known[os.path.basename(path)] for path in sizes if os.path.basename(path) in known}
    ends = {path: int(own.sum()) + len(own) * (HEADER + FOOTER) for path, own in lengths.items()}
    stale = [path for path, end in ends.items() if end != sizes[path]]
    if stale:
        print(f"The index {index} does not fit {stale[0]}, which has changed; its records are indexed again.")
    missing = [path for path in sizes if path not in lengths or path in stale]
    if missing:
        progress = tracked(pool.map(scan, missing), "Indexing records", len(missing), "files")
        lengths |= dict(zip(missing, progress, strict=True))
        with index_kept(index, "records"):
            write_index(folder, known | {os.path.basename(path): own for path, own in lengths.items()})
    return lengths


def write_index(folder: str | os.PathLike, lengths: Mapping[str, np.ndarray]) -> None:
    """Write the index of a folder: file name -> the length of each of its records."""
    arrays: dict[str, np.ndarray] = {
        "names": np.frombuffer(json.dumps(list(lengths)).encode(), np.uint8),
        "counts": np.array([len(part) for part in lengths.values()], np.int64),
        "lengths": np.concatenate([np.zeros(0, np.int64), *lengths.values()]),
    }
    write_npz(os.path.join(folder, NAME), arrays)


def _lengths_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the lengths by the names of the files."""
    names, counts = json.loads(arrays["names"].tobytes()), arrays["counts"]
    return dict(zip(names, np.split(arrays["lengths"], np.cumsum(counts)[:-1]), strict=True))


def scan(path: str) -> np.ndarray:
    """Return the length of every record of a file. Raises UserError if it is no complete TFRecord file."""
    size = file_size(path)
    return read_places(path, lambda read: _walk(path, size, read))


def _walk(path: str, size: int, read: Callable[[int, int], bytes]) -> np.ndarray:
    lengths: list[int] = []
    position, start, data = 0, 0, b""
    while position < size:
        if position + HEADER > start + len(data):
            start, data = position, read(position, _AHEAD if lengths and lengths[-1] < _SHORT else HEADER)
        header = data[position - start : position - start + HEADER]
        length = struct.unpack("<Q", header[:8])[0] if len(header) == HEADER else size
        if len(header) == HEADER and header[8:] != _checksum(header[:8]):
            raise UserError(
                f"The file {path} is damaged, or not a TFRecord file: at byte {position} the length of a record does "
                "not fit its checksum; fetch or write it again."
            )
        if position + HEADER + length + FOOTER > size:
            raise UserError(f"The file {path} ends within a record at byte {position}; it is truncated.")
        lengths.append(length)
        position += HEADER + length + FOOTER
    return np.array(lengths, np.int64)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C as TFRecord files store it: rotated by 15 bits, plus a constant, little-endian."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

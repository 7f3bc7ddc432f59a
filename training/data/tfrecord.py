"""TFRecord files as a data set: any record is read by its number, by TensorFlow operations alone.

A record is: length (8 bytes, little-endian), CRC of it (4), data, CRC of them (4). So the lengths of all records give
the place of each. `keras-vit shard` keeps them as records.npz beside the files; for others they are read from the 12
bytes before each record. TensorFlow's own reader begins there, compares the checksums, and ends after one record. So a
remote TPU host, which runs no Python, can read, too.
"""

import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import google_crc32c
import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.cli.progress import tracked
from keras_vit.errors import explained
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.remote import RemoteError, existing_file, is_remote, read_places, to_path
from training.data.checks import files_of, files_of_splits, labels_beside, split_of
from training.data.dataset import DataSet, Split, bad_examples_reported, checked_label, skip_undecodable
from training.options.common import RECORD_INDEX, OnBadImage

# The features of a record that is an image with its class, and what the files of a split are called.
IMAGE, LABEL = "image/encoded", "image/class/label"
# Records of a bucket that are read at the same time: at 50 ms for each, 256 are 5,000 a second.
PARALLEL_READS = 256
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.tfrecord$")

HEADER, FOOTER = 12, 4
_AHEAD, _SHORT = 2**18, 2**14  # bytes read at once where records are short, and up to which length they are
THREADS = 64  # files read at the same time: a read from a bucket takes tens of milliseconds

Parsed = TypeVar("Parsed")
Version = tuple[int, int]  # bytes of a file, and when it was written, in nanoseconds


def shard_name(split: str, number: int, count: int) -> str:
    """Return the name of file `number`, from 0, of `count`."""
    return f"{split}-{number:05d}-of-{count:05d}.tfrecord"


class TFRecords:
    """The records of several files in a row, by number."""

    def __init__(self, spans: Sequence[tuple[str, int, int]]):
        """`spans`: (path, records to skip, records to take) of each file, in order."""
        lengths = record_lengths([path for path, _, _ in spans])
        # 0 and the end of every record in its file, header and footer included, one file after the other. There may be
        # many millions of records, so of each only this one number is kept.
        edges = np.zeros(sum(map(len, lengths.values())) + len(lengths), np.int64)
        self._of_file: dict[str, slice] = {}
        place = 0
        for path, in_file in lengths.items():
            self._of_file[path] = slice(place, place + len(in_file) + 1)
            np.cumsum(in_file + (HEADER + FOOTER), out=edges[place + 1 : place + 1 + len(in_file)])
            place += len(in_file) + 1
        counts = [len(range(len(lengths[path]))[skip : skip + take]) for path, skip, take in spans]
        self._paths = [path for path, _, _ in spans]
        self._skipped = [skip for _, skip, _ in spans]  # records before the first of each span
        self._starts = np.cumsum([0, *counts])  # the number of the first record of each span, and of all (spans + 1,)
        # Where the beginning of the first record of each span stands among all edges (spans,).
        self._firsts = np.array([self._of_file[path].start + skip for path, skip, _ in spans], np.int64)
        self._in_graph = tf.constant(edges)
        self._edges = self._in_graph.numpy()  # the same memory

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def fingerprint(self) -> int:
        """The same for the same records in files of the same names, wherever they lie."""
        names, counts = json.dumps([os.path.basename(path) for path in self._paths]), np.diff(self._starts)
        checksum = zlib.crc32(names.encode())
        for number, count in enumerate(counts):
            checksum = zlib.crc32(np.full(count, number).tobytes(), checksum)
        for shift in (0, 1):  # where records begin and end
            for edge, count in zip(self._firsts + shift, counts, strict=True):
                checksum = zlib.crc32(self._edges[edge : edge + count].tobytes(), checksum)
        return checksum

    def name(self, index: int) -> str:
        """Name a record in a message: by its number in the file, from 0."""
        span = self._span(index)
        number = self._skipped[span] + index - self._starts[span]
        return f"record {number} of {os.path.basename(self._paths[span])}"

    def _span(self, index: int) -> int:
        return int(np.searchsorted(self._starts, index, side="right")) - 1

    def read(self, index: tf.Tensor) -> tf.Tensor:
        """Return the record number `index` (an int64 scalar) as a scalar string; usable in a tf.data map."""
        span = tf.searchsorted(self._starts, index[None], side="right")[0] - 1
        edge = tf.gather(self._firsts - self._starts[:-1], span) + index
        begin, end = tf.unstack(self._in_graph[edge : edge + 2], num=2)
        # The raw operations, since tf.data.TFRecordDataset cannot begin within a file.
        records = tf.raw_ops.TFRecordDatasetV2(
            filenames=tf.gather(self._paths, span)[None],
            compression_type="",
            buffer_size=end - begin,  # one read, after that of a byte to skip to the record
            byte_offsets=begin[None],
        )
        string = {"output_types": [tf.string], "output_shapes": [()]}
        first = tf.raw_ops.TakeDataset(input_dataset=records, count=tf.constant(1, tf.int64), **string)
        return tf.raw_ops.DatasetToSingleElement(dataset=first, **string)[0]

    def split(self, read: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]) -> Split:
        """Return the records as examples, which `read` makes of their numbers."""
        parallel_reads = PARALLEL_READS if any(map(is_remote, self._paths)) else None
        return Split(len(self), read, self.name, self.explain_damage, self.fingerprint, parallel_reads=parallel_reads)

    def explain_damage(self, message: str) -> str | None:
        """Return the record that the reader's message is about, in a sentence; None if it is about none of these."""
        for path, place in self._of_file.items():
            if "Dataset was empty" in message and file_size(path) != self._edges[place][-1]:
                return f"The file {path} was changed while it was read; the same command continues."
        if not (damage := re.search(r"(?:corrupted|truncated) record at (\d+)", message)):
            return None
        edges = np.flatnonzero(np.isin(self._edges, [int(damage[1]), int(damage[1]) - HEADER]))
        spans = zip(self._firsts, self._starts, self._starts[1:], strict=False)
        hits = [[n for n in edges - first + start if start <= n < end] for first, start, end in spans]
        for index in itertools.chain.from_iterable(hits):
            try:
                self.read(tf.constant(index, tf.int64))
            except tf.errors.DataLossError:
                path = self._paths[self._span(index)]
                folder = os.path.dirname(path) or "."
                if not np.array_equal(scan(path) + (HEADER + FOOTER), np.diff(self._edges[self._of_file[path]])):
                    kept = os.path.join(folder, RECORD_INDEX)
                    return f"The index {kept} does not fit {path}; remove it, and start again."
                return (
                    f"The {self.name(int(index))}, in {folder}, is damaged: its bytes do not fit their checksum; "
                    "fetch or write the file again."
                )
        return None


def tfrecord(pattern: str, on_bad_image: OnBadImage) -> DataSet:
    """Open TFRecord files as `keras-vit shard` writes them: train-*, eval-* (or test, val), and labels.txt beside them.

    Each record is a tf.train.Example with image/encoded, the bytes of a file, and image/class/label, a line of
    labels.txt from 0.
    """
    files = files_of("tfrecord", pattern)
    first_words = [re.split(r"[-_.]", os.path.basename(file))[0] for file in files]
    splits = files_of_splits(pattern, dict(zip(files, map(split_of, first_words), strict=True)))
    for split in splits.values():
        _check_shards(split)
    names_file, names = labels_beside(files)
    if not names:
        existing_file(names_file, "write one with a class in each line, which the TFRecord files need")
    train, evaluation = (_record_split(splits[split], names, on_bad_image) for split in ("train", "test"))
    return DataSet(names, train, evaluation)


def _check_shards(files: list[str]) -> None:
    """Raise UserError when some of the shards that the names speak of are not there."""
    counts = {int(match[2]) for file in files if (match := SHARD.search(file))}
    if counts and (len(counts) > 1 or len(files) != max(counts)):
        raise UserError(
            f"The names of the TFRecord files speak of {' and of '.join(map(str, sorted(counts)))} shards, but "
            f"{len(files)} are there, {os.path.basename(files[0])} first; give those of one complete set."
        )


def _record_split(files: list[str], names: tuple[str, ...], on_bad_image: OnBadImage) -> Split:
    records = TFRecords([(file, 0, sys.maxsize) for file in files])
    features = {IMAGE: tf.io.FixedLenFeature((), tf.string), LABEL: tf.io.FixedLenFeature((), tf.int64)}

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parsed = tf.io.parse_single_example(records.read(index), features)
        return parsed[IMAGE], checked_label(parsed[LABEL], names)

    split, first = records.split(read), tf.constant(0, tf.int64)
    wrong = f"The records of {files[0]} must be tf.train.Examples with {IMAGE} and {LABEL}, at least one."
    if not len(records):
        raise UserError(wrong)
    with bad_examples_reported(split):
        with explained(wrong, tf.errors.InvalidArgumentError):
            tf.io.parse_single_example(records.read(first), features)
        read(first)
    return split if on_bad_image == "stop" else skip_undecodable(split)


def record_lengths(paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the bytes of each record (records,) int64 by path. Raises UserError for files that are not TFRecord."""
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
    except (ValueError, LookupError, TypeError, RecursionError):  # UserError is a ValueError
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
    index = os.path.join(folder, RECORD_INDEX)
    known = read_index(index, _lengths_of, "records") or {}
    lengths = {path: known[os.path.basename(path)] for path in sizes if os.path.basename(path) in known}
    # In float64, which does not wrap: a length is the memory that its record takes, and no file is trusted.
    ends = {path: own.sum(dtype=float) + len(own) * (HEADER + FOOTER) for path, own in lengths.items()}
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
    write_npz(os.path.join(folder, RECORD_INDEX), arrays)


def _lengths_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the lengths by the names of the files."""
    names, counts, lengths = json.loads(arrays["names"].tobytes()), arrays["counts"], arrays["lengths"]
    if lengths.dtype != np.int64 or lengths.min(initial=0) < 0:
        raise ValueError
    return dict(zip(names, np.split(lengths, np.cumsum(counts)[:-1]), strict=True))


def scan(path: str) -> np.ndarray:
    """Return the length of every record of a file. Raises UserError if it is no complete TFRecord file."""
    size = file_size(path)
    return read_places(path, lambda read: _walk_records(path, size, read))


def _walk_records(path: str, size: int, read: Callable[[int, int], bytes]) -> np.ndarray:
    lengths: list[int] = []
    position, start, data = 0, 0, b""
    while position < size:
        if position + HEADER > start + len(data):
            start, data = position, read(position, _AHEAD if lengths and lengths[-1] < _SHORT else HEADER)
        header = data[position - start : position - start + HEADER]
        length = struct.unpack("<Q", header[:8])[0] if len(header) == HEADER else size
        is_end = position + HEADER + length + FOOTER > size
        if is_end or header[8:] != _masked_crc(header[:8]):
            problem = "a record is longer than the file" if is_end else "the length of a record has another checksum"
            raise UserError(
                f"The file {path} is damaged, truncated or not a TFRecord file: at byte {position} {problem}; fetch or "
                "write it again."
            )
        lengths.append(length)
        position += HEADER + length + FOOTER
    return np.array(lengths, np.int64)


def _masked_crc(data: bytes) -> bytes:
    """Return the CRC-32C as TFRecord files store it: rotated by 15 bits, plus a constant, little-endian."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

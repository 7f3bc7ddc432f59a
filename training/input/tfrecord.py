"""TFRecord files as a data set: where each record lies is found once, then any of them is read by position.

A record is: length (8 bytes, little-endian), CRC of it (4), data, CRC of them (4). That of the length is compared when
the records are found, that of the data whenever a record is read.
"""

import os
import re
import struct
import sys
from collections.abc import Sequence

import google_crc32c
import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.labels import parse_labels
from keras_vit.run_directory import LABELS
from training.input.dataset import Source, Split, bad_examples_reported, checked_label, reason, skip_undecodable
from training.input.image_folder import EVALUATION_NAMES
from training.options.common import OnBadImage

_HEADER, _FOOTER = 12, 4

# The features of a record that is an image with its class, and what the files of a split are called.
IMAGE, LABEL = "image/encoded", "image/class/label"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.tfrecord$")


def shard_name(split: str, number: int, count: int) -> str:
    """The name of file `number`, from 0, of `count`."""
    return f"{split}-{number:05d}-of-{count:05d}.tfrecord"


class TFRecords:
    """The records of several files in a row, by number."""

    def __init__(self, spans: Sequence[tuple[str, int, int]]):
        """`spans`: (path, records to skip, records to take) of each file, in order."""
        self._paths = [path for path, _, _ in spans]
        self._skipped = [skip for _, skip, _ in spans]
        self._local = [os.path.isfile(path) for path in self._paths]
        places = [_scan(path)[skip : skip + take] for path, skip, take in spans]
        self._file = np.repeat(np.arange(len(spans)), [len(part) for part in places])
        self._place = np.concatenate(places) if places else np.zeros((0, 2), np.int64)  # (records, [offset, length])

    def __len__(self) -> int:
        return len(self._file)

    def name(self, index: int) -> str:
        """What to call a record in a message: its number in the file, from 0."""
        file = self._file[index]
        number = self._skipped[file] + index - np.argmax(self._file == file)
        return f"record {number} of {os.path.basename(self._paths[file])}"

    def read(self, index: tf.Tensor) -> tf.Tensor:
        """The record number `index` (an int64 scalar) as a scalar string; usable in a tf.data map."""
        data = tf.numpy_function(self._read, [index], tf.string)
        data.set_shape(())
        return data

    def _read(self, index: np.int64) -> bytes:
        (offset, length), file = self._place[index].tolist(), self._file[index]
        try:
            data = self._bytes(file, offset, length + _FOOTER)
        except (OSError, tf.errors.OpError) as error:
            why = error.strerror if isinstance(error, OSError) else reason(error)
            raise UserError(
                f"The file {self._paths[file]} can no longer be read ({why}); put it back, and the same command "
                "continues."
            ) from error
        record = data[:length]
        if data[length:] != _checksum(record):
            raise UserError(
                f"The {self.name(int(index))}, in {os.path.dirname(self._paths[file]) or '.'}, is damaged: its bytes "
                "do not fit their checksum; fetch or write the file again."
            )
        return record

    def _bytes(self, file: int, offset: int, length: int) -> bytes:
        path = self._paths[file]
        if self._local[file]:  # a tenth of the time that GFile takes
            with open(path, "rb", buffering=0) as local:
                return os.pread(local.fileno(), length, offset)
        with tf.io.gfile.GFile(path, "rb") as stream:
            stream.seek(offset)
            return stream.read(length)


def _checksum(data: bytes) -> bytes:
    """CRC-32C as TFRecord files store it: rotated by 15 bits, plus a constant, little-endian."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _scan(path: str) -> np.ndarray:
    """(offset, length) of the data of every record of a file."""
    places = []
    with tf.io.gfile.GFile(path, "rb") as stream:
        size, position = stream.size(), 0
        while position < size:
            stream.seek(position)
            header = stream.read(_HEADER)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else size
            if len(header) == _HEADER and header[8:] != _checksum(header[:8]):
                raise UserError(
                    f"The file {path} is damaged, or no TFRecord file: at byte {position} the length of a record does "
                    "not fit its checksum; fetch or write it again."
                )
            if position + _HEADER + length + _FOOTER > size:
                raise UserError(f"The file {path} ends within a record at byte {position}; it is truncated.")
            places.append((position + _HEADER, length))
            position += _HEADER + length + _FOOTER
    return np.array(places, np.int64).reshape(-1, 2)


def tfrecord(pattern: str, on_bad_image: OnBadImage) -> Source:
    """TFRecord files as `training.shard` writes them: train-*, eval-* (or test, val) and, beside them, labels.txt.

    Each record is a tf.train.Example with image/encoded, the bytes of a file, and image/class/label, a line of
    labels.txt from 0.
    """
    files = sorted(file for file in tf.io.gfile.glob(pattern) if file.endswith(".tfrecord"))
    if not files:
        raise UserError(f"No file is called {pattern!r}; --data tfrecord:GLOB takes such as 'shards/*.tfrecord'.")
    splits = [[file for file in files if _shard_kind(file) == kind] for kind in ("train", "evaluation")]
    if not all(splits):
        raise UserError(
            f"{pattern!r} must give files whose names begin with train and with eval, test or val, but gives "
            f"{', '.join(os.path.basename(file) for file in files[:5])}."
        )
    for split in splits:
        _check_shards(split)
    folders = sorted({os.path.dirname(file) for file in files})
    names_file = os.path.join(folders[0], LABELS)
    if len(folders) > 1 or not tf.io.gfile.exists(names_file):
        raise UserError(
            f"The TFRecord files must lie in one folder with {LABELS}, a class in each line, but "
            + (f"there is no {names_file}." if len(folders) == 1 else f"they lie in {', '.join(folders)}.")
        )
    with tf.io.gfile.GFile(names_file, "rb") as stream:
        names = parse_labels(stream.read(), names_file)
    return Source(names, *(_record_split(split, names, on_bad_image) for split in splits))


def _shard_kind(file: str) -> str | None:
    name = re.split(r"[-_.]", os.path.basename(file).lower())[0]
    return "train" if name == "train" else "evaluation" if name in ("eval", *EVALUATION_NAMES) else None


def _check_shards(files: list[str]) -> None:
    """Raises UserError when some of the shards that the names speak of are not there."""
    counts = {int(match[2]) for file in files if (match := SHARD.search(file))}
    if counts and (len(counts) > 1 or len(files) != max(counts)):
        raise UserError(
            f"The names of the TFRecord files speak of {' and of '.join(map(str, sorted(counts)))} shards, but "
            f"{len(files)} are there, {os.path.basename(files[0])} first; give those of one complete set."
        )


def _record_split(files: list[str], names: tuple[str, ...], on_bad_image: OnBadImage) -> Split:
    records = TFRecords([(file, 0, sys.maxsize) for file in files])
    if not len(records):
        raise UserError(f"The TFRecord files {', '.join(map(os.path.basename, files[:5]))} hold no record.")

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        features = {key: tf.io.FixedLenFeature((), kind) for key, kind in ((IMAGE, tf.string), (LABEL, tf.int64))}
        parsed = tf.io.parse_single_example(records.read(index), features)
        return parsed[IMAGE], checked_label(parsed[LABEL], names)

    split = Split(len(records), read, records.name)
    with bad_examples_reported():
        try:
            read(tf.constant(0, tf.int64))
        except tf.errors.InvalidArgumentError as error:
            if IMAGE not in str(error) and LABEL not in str(error) and "parse" not in str(error):
                raise
            raise UserError(f"The records of {files[0]} must be tf.train.Examples with {IMAGE} and {LABEL}.") from error
    return split if on_bad_image == "stop" else skip_undecodable(split)

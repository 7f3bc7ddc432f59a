"""TFRecord files as a data set: any record is read by its number, by TensorFlow operations alone.

The lengths of all records (training/input/record_index.py) give the place of each. TensorFlow's own reader begins
there, compares the checksums, and ends after one record. So a remote TPU host, which runs no Python, can read, too.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.labels import read_labels
from keras_vit.files.remote import is_remote, matching, to_path
from keras_vit.run_directory import LABELS
from training.input.dataset import DataSet, Split, bad_examples_reported, checked_label, skip_undecodable
from training.input.record_index import FOOTER, HEADER, NAME, file_size, record_lengths, scan
from training.options.checks import record_files
from training.options.common import EVALUATION_NAMES, TRAINING_NAMES, OnBadImage

# The features of a record that is an image with its class, and what the files of a split are called.
IMAGE, LABEL = "image/encoded", "image/class/label"
# Records of a bucket that are read at the same time: at 50 ms for each, 256 are 5,000 a second.
_PARALLEL_READS = 256
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
        self._lengths = lengths = record_lengths(self._paths)
        # Of every record, where it begins in its file and where it ends, its header and footer included.
        ends = {path: np.cumsum(in_file + (HEADER + FOOTER)) for path, in_file in lengths.items()}
        self._sizes = {path: end[-1] if len(end) else 0 for path, end in ends.items()}
        places = [
            np.stack([ends[path] - lengths[path] - (HEADER + FOOTER), ends[path]])[:, skip : skip + take]
            for path, skip, take in spans
        ]
        self._begin, self._end = np.concatenate([np.zeros((2, 0), np.int64), *places], axis=1)
        self._file = np.repeat(np.arange(len(spans)), [part.shape[1] for part in places])
        self._in_graph = tf.constant(np.stack([self._file, self._begin, self._end], axis=1))

    def __len__(self) -> int:
        return len(self._file)

    @property
    def fingerprint(self) -> int:
        """The same for the same records in files of the same names, wherever they lie."""
        names = json.dumps([os.path.basename(path) for path in self._paths])
        return zlib.crc32(np.stack([self._file, self._begin, self._end]).tobytes(), zlib.crc32(names.encode()))

    def name(self, index: int) -> str:
        """What to call a record in a message: its number in the file, from 0."""
        file = self._file[index]
        number = self._skipped[file] + index - np.argmax(self._file == file)
        return f"record {number} of {os.path.basename(self._paths[file])}"

    def read(self, index: tf.Tensor) -> tf.Tensor:
        """The record number `index` (an int64 scalar) as a scalar string; usable in a tf.data map."""
        file, begin, end = tf.unstack(tf.gather(self._in_graph, index))
        # The raw operations, since tf.data.TFRecordDataset cannot begin within a file.
        records = tf.raw_ops.TFRecordDatasetV2(
            filenames=tf.gather(self._paths, file)[None],
            compression_type="",
            buffer_size=end - begin,  # one read, after that of a byte to skip to the record
            byte_offsets=begin[None],
        )
        string = {"output_types": [tf.string], "output_shapes": [()]}
        first = tf.raw_ops.TakeDataset(input_dataset=records, count=tf.constant(1, tf.int64), **string)
        return tf.raw_ops.DatasetToSingleElement(dataset=first, **string)[0]

    def split(self, read: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]) -> Split:
        """The records as examples, which `read` makes of their numbers."""
        parallel_reads = _PARALLEL_READS if any(map(is_remote, self._paths)) else None
        return Split(len(self), read, self.name, self.explain_damage, self.fingerprint, parallel_reads=parallel_reads)

    def explain_damage(self, message: str) -> str | None:
        """The record that the reader's message is about, in a sentence; None if it is about none of these."""
        for path, size in self._sizes.items():
            if "Dataset was empty" in message and file_size(path) != size:
                return f"The file {path} was changed while it was read; the same command continues."
        found = re.search(r"(?:corrupted|truncated) record at (\d+)", message)
        if not found:
            return None
        for index in np.flatnonzero(np.isin(self._begin, [int(found[1]), int(found[1]) - HEADER])):
            try:
                self.read(tf.constant(index, tf.int64))
            except tf.errors.DataLossError:
                path = self._paths[self._file[index]]
                folder = os.path.dirname(path) or "."
                if not np.array_equal(scan(path), self._lengths[path]):
                    return f"The index {os.path.join(folder, NAME)} does not fit {path}; remove it, and start again."
                return (
                    f"The {self.name(int(index))}, in {folder}, is damaged: its bytes do not fit their checksum; "
                    "fetch or write the file again."
                )
        return None


def tfrecord(pattern: str, on_bad_image: OnBadImage) -> DataSet:
    """TFRecord files as `keras-vit shard` writes them: train-*, eval-* (or test, val) and, beside them, labels.txt.

    Each record is a tf.train.Example with image/encoded, the bytes of a file, and image/class/label, a line of
    labels.txt from 0.
    """
    files = record_files(pattern, matching(pattern))
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
    if len(folders) > 1 or not to_path(names_file).is_file():
        raise UserError(
            f"The TFRecord files must lie in one folder with {LABELS}, a class in each line, but "
            + (f"there is no {names_file}." if len(folders) == 1 else f"they lie in {', '.join(folders)}.")
        )
    names = _class_names(names_file)
    train, evaluation = (_record_split(split, names, on_bad_image) for split in splits)
    return DataSet(names, train, evaluation)


def _class_names(file: str) -> tuple[str, ...]:
    """The names in labels.txt. Raises UserError if one comes twice or is empty, since reports name classes by them."""
    names = read_labels(file)
    empty = sum(not name.strip() for name in names)
    if empty or len(set(names)) < len(names):
        twice = next((name for name in names if names.count(name) > 1), "")
        found = f"{empty} of its {len(names)} lines are empty" if empty else f"{twice!r} comes twice"
        raise UserError(f"{file} must name each class once, one in each line, but {found}; correct it.")
    return names


def _shard_kind(file: str) -> str | None:
    name = re.split(r"[-_.]", os.path.basename(file).lower())[0]
    return "train" if name in TRAINING_NAMES else "evaluation" if name in ("eval", *EVALUATION_NAMES) else None


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

    split = records.split(read)
    with bad_examples_reported(split):
        try:
            read(tf.constant(0, tf.int64))
        except tf.errors.InvalidArgumentError as error:
            if IMAGE not in str(error) and LABEL not in str(error) and "parse" not in str(error):
                raise
            raise UserError(f"The records of {files[0]} must be tf.train.Examples with {IMAGE} and {LABEL}.") from error
    return split if on_bad_image == "stop" else skip_undecodable(split)

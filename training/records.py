"""Random access into TFRecord files: where each record lies is found once, then any of them is read by position.

A record is: length (8 bytes, little-endian), CRC of it (4), data, CRC of them (4).
"""

import struct
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_vit import UserError

_HEADER, _FOOTER = 12, 4


class Records:
    """The records of several files in a row, by number."""

    def __init__(self, spans: Sequence[tuple[str, int, int]]):
        """`spans`: (path, records to skip, records to take) of each file, in order."""
        self._paths = [path for path, _, _ in spans]
        places = [_scan(path)[skip : skip + take] for path, skip, take in spans]
        self._file = np.repeat(np.arange(len(spans)), [len(part) for part in places])
        self._place = np.concatenate(places) if places else np.zeros((0, 2), np.int64)  # (records, [offset, length])

    def __len__(self) -> int:
        return len(self._file)

    def read(self, index: tf.Tensor) -> tf.Tensor:
        """The record number `index` (an int64 scalar) as a scalar string; usable in a tf.data map."""
        data = tf.numpy_function(self._read, [index], tf.string)
        data.set_shape(())
        return data

    def _read(self, index: np.int64) -> bytes:
        offset, length = self._place[index]
        with tf.io.gfile.GFile(self._paths[self._file[index]], "rb") as stream:
            stream.seek(int(offset))
            return stream.read(int(length))


def _scan(path: str) -> np.ndarray:
    """(offset, length) of the data of every record of a file."""
    places = []
    with tf.io.gfile.GFile(path, "rb") as stream:
        size, position = stream.size(), 0
        while position < size:
            stream.seek(position)
            header = stream.read(_HEADER)
            length = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else size
            if position + _HEADER + length + _FOOTER > size:
                raise UserError(f"The file {path} ends within a record at byte {position}; it is truncated.")
            places.append((position + _HEADER, length))
            position += _HEADER + length + _FOOTER
    return np.array(places, np.int64).reshape(-1, 2)

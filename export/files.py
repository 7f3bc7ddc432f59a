"""Files of an export: a SavedModel on disk, errors of a full disk, and sizes."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf


def save_module(module: tf.Module, path: pathlib.Path, signatures: Mapping[str, Callable]) -> None:
    """Call tf.saved_model.save; a full disk raises OSError."""
    with disk_errors(path):
        tf.saved_model.save(module, path, signatures=signatures)


@contextlib.contextmanager
def disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Raise the error of TensorFlow for a full disk as OSError."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        full = os.strerror(errno.ENOSPC)
        if full not in error.message:
            raise
        raise OSError(errno.ENOSPC, full, str(path)) from error


def directory_bytes(path: pathlib.Path) -> int:
    """Total size of all files in a directory and its subdirectories."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

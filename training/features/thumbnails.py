"""Small pictures of an index, inside a page."""

import contextlib
import functools
import pathlib

import tensorflow as tf

from keras_vit import UserError
from keras_vit.cli.pages import thumbnail_address
from keras_vit.images.decode import decode_with_pillow
from training.data.dataset import DataSet
from training.data.sources import open_source
from training.features.store import FeatureIndex
from training.options.common import DataOptions

# Longest side of a small picture, in pixels.
_SIDE = 144


class Thumbnails:
    """Small pictures of an index, as addresses inside a page."""

    def __init__(self, index: FeatureIndex) -> None:
        self._index = index

    def address(self, row: int, path: str, name: str) -> str:
        """Return the address of the picture of a row, with its path and split; "" where it cannot be read any more."""
        if pathlib.Path(path).is_file() or self._source is None:
            return file_address(path)
        splits = self._index.description.splits
        split = self._source.train if name == "train" else self._source.evaluation
        index = row - (splits["train"] if name == "test" else 0)
        if split.num_examples != splits[name]:
            return ""
        return thumbnail_address(split.example(tf.constant(index, tf.int64))[0].numpy(), _SIDE)

    @functools.cached_property
    def _source(self) -> DataSet | None:
        """The data of the index, if they are no files."""
        data = self._index.description.data
        if data is None or data["data"].startswith(("folder:", "csv:")):
            return None
        with contextlib.suppress(UserError):  # moved: the page has no pictures
            return open_source(DataOptions(**data))
        return None


def file_address(path: str) -> str:
    """Return the address of a small picture of a file; "" where it cannot be read."""
    try:
        return thumbnail_address(decode_with_pillow(pathlib.Path(path).read_bytes(), upright=True), _SIDE)
    except Exception:  # any of Pillow's, of a file that was changed
        return ""

"""Pages of pictures as one HTML file: small pictures inside, no network access, from 390 pixels on."""

import contextlib
import functools
import html
import pathlib

import tensorflow as tf

from keras_vit import UserError
from keras_vit.images.pillow import decode
from keras_vit.inspection.html_page import document, thumbnail_address
from training.features.store import FeatureIndex
from training.input.dataset import DataSet
from training.input.sources import open_source
from training.options.common import DataOptions

# Longest side of a small picture, in pixels.
_SIDE = 144


class Thumbnails:
    """Small pictures of an index, as addresses inside a page."""

    def __init__(self, index: FeatureIndex) -> None:
        self._index = index

    def address(self, row: int, path: str, split: str) -> str:
        """The address of the picture of a row, with its path and split; "" where it cannot be read any more."""
        return file_address(path) if pathlib.Path(path).is_file() else self._of_data(row, split)

    def _of_data(self, row: int, name: str) -> str:
        """The picture of a data set that is no folder, by its place in the split."""
        if self._source is None:
            return ""
        splits = self._index.description.splits
        split = self._source.train if name == "train" else self._source.evaluation
        index = row - (splits["train"] if name == "test" else 0)
        if split.num_examples != splits[name]:
            return ""
        return thumbnail_address(split.example(tf.constant(index, tf.int64))[0].numpy(), _SIDE)

    @functools.cached_property
    def _source(self) -> DataSet | None:
        data = self._index.description.data
        if data is None or data["data"].startswith(("folder:", "csv:")):
            return None
        with contextlib.suppress(UserError):  # moved: the page has no pictures
            return open_source(DataOptions(**data))
        return None


def file_address(path: str) -> str:
    """The address of a small picture of a file; "" where it cannot be read."""
    try:
        return thumbnail_address(decode(pathlib.Path(path).read_bytes(), upright=True), _SIDE)
    except Exception:  # any of Pillow's, of a file that was changed
        return ""


def picture(address: str, name: str) -> str:
    """The small picture, or its name where there is none."""
    if not address:
        return '<div class="none">no picture</div>'
    return f'<img src="{address}" alt="{html.escape(pathlib.PurePath(name).name)}" loading="lazy">'


def page(title: str, sections: list[str], script: str = "") -> str:
    """A page as HTML text."""
    return document(title, sections, style=_STYLE, script=script)


_STYLE = """
.cards { display: grid; gap: 0.75rem; grid-template-columns: repeat(auto-fill, minmax(min(10rem, 100%), 1fr)); }
.card { border: 1px solid #ccc; border-radius: 0.5rem; padding: 0.5rem; font-size: 0.8rem; }
.card img, .card .none { width: 100%; height: 7.5rem; object-fit: contain; background: #f4f4f4; display: block; }
.card .none { display: grid; place-items: center; color: #555; }
.card b { display: block; } .card.done { border-color: #0072b2; background: #f0f7fc; }
.group { border: 1px solid #ccc; border-radius: 0.5rem; padding: 0.5rem; margin: 0.75rem 0; }
.choice { display: flex; flex-wrap: wrap; gap: 0.1rem 0.6rem; margin-top: 0.35rem; }
.choice label { display: inline-flex; align-items: center; gap: 0.2rem; min-height: 1.6rem; }
select { max-width: 100%; font: inherit; }
table { border-collapse: collapse; font-size: 0.9rem; } .wide { overflow-x: auto; }
th, td { padding: 0.2rem 0.5rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.bar { position: sticky; top: 0; z-index: 1; background: #fff; border-bottom: 1px solid #ccc; padding: 0.5rem 0; }
button { font: inherit; padding: 0.35rem 0.8rem; }
"""

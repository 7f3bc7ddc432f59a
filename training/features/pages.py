"""Pages of pictures as one HTML file: small pictures inside, no network access, from 390 pixels on."""

import base64
import contextlib
import functools
import html
import io
import pathlib

import numpy as np
import PIL.Image
import tensorflow as tf

from keras_vit import UserError
from keras_vit.images.pillow import decode
from training.features.store import FeatureIndex
from training.input.dataset import DataSet
from training.input.sources import open_source
from training.options.common import DataOptions

# Longest side of a small picture, in pixels, and the quality of its JPEG.
_SIDE, _QUALITY = 144, 80


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
        return _address(split.example(tf.constant(index, tf.int64))[0].numpy())

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
        return _address(decode(pathlib.Path(path).read_bytes(), upright=True))
    except Exception:  # any of Pillow's, of a file that was changed
        return ""


def _address(pixels: np.ndarray) -> str:
    """(h, w, C) uint8 as a small JPEG on white."""
    if pixels.shape[-1] % 2 == 0:
        alpha = pixels[..., -1:].astype(np.float32) / 255.0
        pixels = (pixels[..., :-1] * alpha + 255.0 * (1.0 - alpha)).astype(np.uint8)
    image = PIL.Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((_SIDE, _SIDE))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def picture(address: str, name: str) -> str:
    """The small picture, or its name where there is none."""
    if not address:
        return '<div class="none">no picture</div>'
    return f'<img src="{address}" alt="{html.escape(pathlib.PurePath(name).name)}" loading="lazy">'


def document(title: str, sections: list[str], script: str = "") -> str:
    """A page as HTML text."""
    body = "\n".join(sections) + (f"<script>{script}</script>" if script else "")
    return _DOCUMENT.replace("{title}", html.escape(title)).replace("{body}", body)


_DOCUMENT = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light; font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 76rem; margin: 0 auto; padding: 0.75rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0.25rem 0; } h2 { font-size: 1.15rem; margin: 1.5rem 0 0.25rem; }
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
</style>
{body}
</html>
"""

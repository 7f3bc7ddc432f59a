"""Segment image files: a mask for each, and a page of overlays."""

import itertools
import pathlib
from collections.abc import Sequence

import numpy as np
import PIL.Image

from keras_vit import preprocessing_of
from keras_vit.files.atomic import staged
from keras_vit.files.tables import markdown_table, short_name
from training.input.coco import NONE
from training.input.dataset import check_some_read
from training.prediction.predict import batches_of_pictures
from training.segmentation.evaluation import panel_of
from training.segmentation.masks import OBJECTS
from training.segmentation.overlay import Panel, segments_page
from training.segmentation.segmenter import FoundSegments, Segmenter, class_map, names_of

# Pictures on the page, the first ones; and names of segments in the table.
_ON_PAGE, _MOST_NAMED = 100, 5
PAGE = "predictions.html"


def predict(segmenter: Segmenter, files: Sequence[pathlib.Path], output: pathlib.Path, threshold: float) -> None:
    """Write masks as `--data folder:` reads them, and the page; print a table.

    The mask of a semantic model has class numbers; others have 1000 * class + number of the segment in 16 bits, and
    65535 where there is none. A file that cannot be read is named. Raises UserError if none can be read.
    """
    rows, problems, written = list[tuple[str, str]](), list[str](), set[str]()
    batches = batches_of_pictures(files, preprocessing_of(segmenter.model), problems)
    cards: list[tuple[str, np.ndarray, Sequence[Panel]]] = []
    with staged(output) as stage:
        (stage / "masks").mkdir()
        for image in itertools.chain.from_iterable(batches):
            found, stem = segmenter.segment(image.pixels, threshold), pathlib.PurePath(image.name).stem
            name = stem if stem not in written else f"{stem}-{len(written)}"
            written.add(name)
            PIL.Image.fromarray(mask_of(segmenter, found)).save(stage / "masks" / f"{name}.png")
            rows.append((image.name, _listed(segmenter, found)))
            if len(cards) < _ON_PAGE:
                panels = [panel_of("segments", found.labels, found.map, segmenter)]
                cards.append((image.name, image.pixels, panels))
        for problem in problems:
            print(problem)
        check_some_read(len(rows))
        title = f"Segments of {short_name(segmenter.name)}"
        (stage / PAGE).write_text(segments_page(title, cards, "; ".join(problems)), encoding="utf-8")
    print(markdown_table(("picture", "segments, the largest first"), rows, num_text_columns=2))
    print(f"{len(rows)} masks in {output / 'masks'}, overlays in {output / PAGE}.")


def mask_of(segmenter: Segmenter, found: FoundSegments) -> np.ndarray:
    """(h, w) uint8 class numbers of a semantic model of up to 255 classes, else uint16; see `predict`."""
    if segmenter.kind == "semantic":
        classes = class_map(found)
        return classes.astype(np.uint8 if len(segmenter.labels) < 256 else np.uint16)
    values = found.labels.astype(np.int64) * OBJECTS + np.arange(len(found.labels)) % OBJECTS
    return np.append(values, [2**16 - 1])[np.where(found.map == NONE, -1, found.map)].astype(np.uint16)


def _listed(segmenter: Segmenter, found: FoundSegments) -> str:
    names = names_of(segmenter.labels, found)
    shown = [name if segmenter.kind == "semantic" else f"{name} {score:.2f}" for name, score in names[:_MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "") or "none"

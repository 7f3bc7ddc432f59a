"""Segment image files: a mask for each, and a page of overlays."""

import itertools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image

from keras_vit import preprocessing_of
from keras_vit.files.atomic import staged
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.files.tables import markdown_table, short_name
from training.evaluation.average_precision import mask_annotation
from training.input.coco import panoptic_document, panoptic_png
from training.input.dataset import check_some_read
from training.prediction.predict import batches_of_pictures
from training.segmentation.evaluation import panel_of
from training.segmentation.masks import OBJECTS
from training.segmentation.overlay import Panel, segments_page
from training.segmentation.segmenter import FoundSegments, Segmenter, class_map, names_of

# Images on the page, the first ones; and names of segments in the table.
_ON_PAGE, _MOST_NAMED = 100, 5
PAGE = "predictions.html"
# Written into the output folder: PNGs, what they hold as COCO's panoptic format, and whole objects as COCO's instances.
_MASKS, _PANOPTIC, _INSTANCES = "masks", "masks.json", "instances.json"


def predict(segmenter: Segmenter, files: Sequence[pathlib.Path], output: pathlib.Path, threshold: float) -> None:
    """Write masks that `--data` reads, and the page; print a table.

    Masks of semantic have class numbers, as `--data folder:` reads them. Others are those of masks.json, which
    `--data panoptic:` reads; the objects of instance, which may overlap, are whole in instances.json, which `--data
    coco:` reads. A file that cannot be read is named. Raises UserError if none can be read.
    """
    rows, problems, written = list[tuple[str, str]](), list[str](), Written(segmenter)
    batches = batches_of_pictures(files, preprocessing_of(segmenter.model), problems)
    cards: list[tuple[str, np.ndarray, Sequence[Panel]]] = []
    root = pathlib.Path(os.path.commonpath([file.parent for file in files]))
    with staged(output) as stage:
        for image in itertools.chain.from_iterable(batches):
            found = segmenter.segment(image.pixels, threshold)
            written.add(stage, pathlib.PurePath(image.name).relative_to(root), found)
            rows.append((image.name, _listed(segmenter, found)))
            if len(cards) < _ON_PAGE:
                panels = [panel_of("segments", found.labels, found.map, segmenter)]
                cards.append((image.name, image.pixels, panels))
        for problem in problems:
            print(problem)
        check_some_read(len(rows))
        written.finish(stage)
        title = f"Segments of {short_name(segmenter.name)}"
        (stage / PAGE).write_text(segments_page(title, cards, "; ".join(problems)), encoding="utf-8")
    print(markdown_table(("picture", "segments, the largest first"), rows, num_text_columns=2))
    print(f"{len(rows)} masks in {output / _MASKS}, overlays in {output / PAGE}.")

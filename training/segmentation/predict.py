"""Segment image files: a mask for each, and a page of overlays."""

import itertools
import json
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import PIL.Image

from keras_vit import preprocessing_of
from keras_vit.files.atomic import staged
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.files.tables import markdown_table, short_name
from keras_vit.models.config import SegmentationConfig
from training.data.annotations.coco import write_panoptic_png
from training.data.annotations.masks import OBJECTS
from training.data.dataset import check_some_read
from training.data.file_contents import shown
from training.prediction.classifier import batches_of_images
from training.segmentation.evaluation import mask_annotation, panel_of, segments_page
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
    coco:` reads. The masks keep the folders of the images below the one that all of them are in. A file that cannot be
    read is named. Raises UserError if none can be read.
    """
    rows, problems = list[tuple[str, str]](), list[str]()
    batches = batches_of_images(files, preprocessing_of(segmenter.model), problems)
    cards: list[tuple[str, np.ndarray, list[dict]]] = []
    root = pathlib.Path(shown(os.path.commonpath([file.absolute().parent for file in files])))
    with staged(output) as stage:
        writer = MaskWriter(segmenter, stage)
        for image in itertools.chain.from_iterable(batches):
            answer = segmenter.segment(image.pixels, threshold)
            writer.add(pathlib.Path(image.name).absolute().relative_to(root), answer)
            rows.append((image.name, _listed(segmenter, answer)))
            if len(cards) < _ON_PAGE:
                panel = panel_of("segments", image.pixels, (answer.labels, answer.map), segmenter)
                cards.append((image.name, image.pixels, [panel]))
        for problem in problems:
            print(problem)
        check_some_read(len(rows))
        writer.finish()
        title = f"Segments of {short_name(segmenter.name)}"
        (stage / PAGE).write_text(segments_page(title, cards, "; ".join(problems)), encoding="utf-8")
    print(markdown_table(("image", "segments, the largest first"), rows, num_text_columns=2))
    print(f"{len(rows)} masks in {output / _MASKS}, overlays in {output / PAGE}.")


class MaskWriter:
    """Writes what was found on images into a folder."""

    def __init__(self, segmenter: Segmenter, folder: pathlib.Path) -> None:
        self._segmenter, self._folder = segmenter, folder
        self._names: set[str] = set()
        # Class numbers from OBJECTS on would be read as objects.
        self._has_numbers = segmenter.kind == "semantic" and len(segmenter.labels) <= OBJECTS
        self._images: list[dict[str, Any]] = []
        self._segments: list[dict[str, Any]] = []
        self._objects: list[dict[str, Any]] = []

    def add(self, name: pathlib.PurePath, answer: FoundSegments) -> None:
        """Write the mask of an image. name: its path below the folder of all images."""
        mask = self._free_name(name)
        file = self._folder / _MASKS / mask
        file.parent.mkdir(parents=True, exist_ok=True)
        if self._has_numbers:
            # From 256 classes on in 16 bits, since 255 is ignored in 8 bits.
            kind = np.uint8 if len(self._segmenter.labels) < 256 else np.uint16
            PIL.Image.fromarray(class_map(answer).astype(kind)).save(file)
            return
        write_panoptic_png(answer.map, file)
        image_id, (height, width) = len(self._images) + 1, answer.map.shape
        self._images.append({"id": image_id, "file_name": name.as_posix(), "height": height, "width": width})
        infos = _segments_info(answer)
        self._segments.append({"image_id": image_id, "file_name": mask.as_posix(), "segments_info": infos})
        for number, inside in enumerate(answer.masks if answer.masks is not None else ()):
            own = {"id": len(self._objects) + 1, "image_id": image_id, **_annotation(answer, number, inside)}
            own["segmentation"]["counts"] = own["segmentation"]["counts"].decode("ascii")
            self._objects.append(own)

    def finish(self) -> None:
        """Write the names of the classes, and the files in COCO's formats."""
        labels, task = self._segmenter.labels, self._segmenter.task
        if self._has_numbers:
            (self._folder / LABELS).write_text(labels_text(labels), encoding="utf-8")
            return
        stuff: Collection[int] = range(len(labels))
        if isinstance(task, SegmentationConfig) and task.task != "semantic":
            stuff = task.stuff
        categories = [{"id": n + 1, "name": name, "isthing": int(n not in stuff)} for n, name in enumerate(labels)]
        common = {"images": self._images, "categories": categories}
        (self._folder / _PANOPTIC).write_text(json.dumps(common | {"annotations": self._segments}), encoding="utf-8")
        if self._segmenter.kind == "instance":
            text = json.dumps(common | {"annotations": self._objects})
            (self._folder / _INSTANCES).write_text(text, encoding="utf-8")

    def _free_name(self, name: pathlib.PurePath) -> pathlib.PurePath:
        """Return the path of the mask, which no other image has: of a.jpg a.png, beside a.bmp a.bmp.png."""
        names = itertools.chain(
            (name.with_suffix(".png"), name.with_name(f"{name.name}.png")),
            (name.with_name(f"{name.name}-{number}.png") for number in itertools.count(2)),
        )
        free = next(each for each in names if each.as_posix().lower() not in self._names)
        self._names.add(free.as_posix().lower())
        return free


def _segments_info(answer: FoundSegments) -> list[dict[str, Any]]:
    """Return the segments of an image that are seen on its map, as a panoptic.json has them."""
    rows = []
    for number in np.unique(answer.map[answer.map >= 0]).tolist():
        own = _annotation(answer, number, answer.map == number)
        rows.append({name: value for name, value in own.items() if name != "segmentation"} | {"id": number + 1})
    return rows


def _annotation(answer: FoundSegments, number: int, mask: np.ndarray) -> dict[str, Any]:
    own = mask_annotation(mask, int(answer.labels[number]))
    return own | {"iscrowd": 0, "score": float(answer.scores[number])}


def _listed(segmenter: Segmenter, answer: FoundSegments) -> str:
    names = names_of(segmenter.labels, answer)
    shown = [name if segmenter.kind == "semantic" else f"{name} {score:.2f}" for name, score in names[:_MOST_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "") or "none"

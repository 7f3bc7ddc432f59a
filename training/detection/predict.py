"""Find objects on image files, and write them as a table, CSV, COCO JSON or a page."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from keras_vit.files.atomic import atomic_write
from keras_vit.files.tables import markdown_table, short_name, write_csv
from keras_vit.images.files import Image, decode
from keras_vit.images.formats import LARGEST_SERVED
from training.data.dataset import check_some_read
from training.detection.detector import Detector, Objects
from training.detection.evaluation import COLORS, DrawnBox, boxes_page
from training.evaluation.average_precision import coco_document
from training.options.dense import DetectPredictOptions
from training.prediction.classifier import batches_of_images

Results = list[tuple[Image, Objects]]


@dataclasses.dataclass(frozen=True, eq=False)
class DetectionPage:
    """The answers of the page in the browser."""

    detector: Detector
    top: int
    threshold: float

    def answer(self, data: bytes, name: str) -> str:
        """Return a page with the boxes on one image. Raises UserError for bytes that are none."""
        return _page(self.detector, self._detect(data, name), [])

    def values(self, data: bytes, name: str) -> dict[str, Any]:
        """Return the objects on one image in COCO's format. Raises UserError for bytes that are none."""
        return found_document(self.detector.labels, self._detect(data, name))

    def _detect(self, data: bytes, name: str) -> Results:
        image = decode(data, name, preprocessing=self.detector.preprocessing, most_pixels=LARGEST_SERVED)
        (objects,) = self.detector.detect([image], self.top, self.threshold)
        return [(image, objects)]


def detect(detector: Detector, files: Sequence[pathlib.Path], options: DetectPredictOptions) -> None:
    """Find objects, print a table, and write `options.output`.

    A file that cannot be read is named, and the others are looked at. Raises UserError if none can be read.
    """
    results: Results = []
    problems: list[str] = []
    for images in batches_of_images(files, detector.preprocessing, problems):
        results += zip(images, detector.detect(images, options.top, options.threshold), strict=True)
    columns = ("image", "class", "score", "x", "y", "w", "h")
    rows = [
        (name, label, f"{score:.3f}", *(f"{side:.0f}" for side in box))
        for name, label, score, box in _rows(detector, results)
    ]
    if rows:
        print(markdown_table(columns, rows, num_text_columns=2))
    if empty := sum(not len(objects.scores) for _, objects in results):
        print(f"No object with a score of at least {options.threshold:g} in {empty} of {len(results)} images.")
    for problem in problems:
        print(f"Skipped {problem}")
    output = options.output
    if output is not None and results:
        with atomic_write(pathlib.Path(output)) as temporary:
            if output.endswith(".csv"):
                write_csv(temporary, _csv_rows(detector, results), raw=options.raw)
            elif output.endswith(".json"):
                temporary.write_text(json.dumps(found_document(detector.labels, results)) + "\n", encoding="utf-8")
            else:
                temporary.write_text(_page(detector, results, problems), encoding="utf-8")
        print(f"Results are in {output}.")
    check_some_read(len(results))


def _rows(detector: Detector, results: Results) -> Iterator[tuple[str, str, float, list[float]]]:
    for image, objects in results:
        for each in objects.annotations():
            yield image.name, detector.labels[each["category_id"] - 1], each["score"], each["bbox"]


def found_document(labels: Sequence[str], results: Results) -> dict:
    """Return objects as a document in COCO's format, with a score in each annotation."""
    whole = coco_document(labels, [objects.annotations() for _, objects in results])
    for fields, (image, _) in zip(whole["images"], results, strict=True):
        fields |= {"file_name": image.name} | dict(zip(("height", "width"), image.pixels.shape[:2], strict=True))
    return whole


def _csv_rows(detector: Detector, results: Results) -> Iterator[Sequence[str]]:
    """Yield the columns that `--data csv:FILE` reads, and the score; an image without objects is a row of its path."""
    yield "path", "x", "y", "w", "h", "label", "score"
    for each in results:
        for name, label, score, box in _rows(detector, [each]):
            yield name, *(f"{side:.2f}" for side in box), label, f"{score:.6f}"
        if not len(each[1].scores):
            yield each[0].name, *[""] * 6


def _page(detector: Detector, results: Results, problems: Sequence[str]) -> str:
    images = []
    for image, objects in results:
        rows = zip(objects.corners, objects.classes, objects.scores, strict=True)
        boxes = [
            DrawnBox(corners, f"{detector.labels[label]} {score:.2f}", COLORS[label % len(COLORS)])
            for corners, label, score in rows
        ]
        images.append((image.name, image.pixels, boxes))
    words = [*(f"Skipped {problem}" for problem in problems), f"Model: {short_name(detector.name)}."]
    return boxes_page("Objects on images", images, words)

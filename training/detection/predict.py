"""Find objects on image files, and write them as a table, CSV, COCO JSON or a page."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from keras_vit.files.atomic import atomic_write
from keras_vit.files.tables import CsvWriter, markdown_table, short_name
from keras_vit.images.files import Image, decode
from keras_vit.images.formats import LARGEST_SERVED
from training.data.dataset import check_some_read
from training.detection.detector import Detector, Objects
from training.detection.page import COLORS, DrawnBox, DrawnPicture, boxes_page
from training.evaluation.average_precision import coco_document
from training.options.detect import DetectPredictOptions
from training.prediction.classifier import batches_of_pictures

Found = list[tuple[Image, Objects]]


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

    def _detect(self, data: bytes, name: str) -> Found:
        image = decode(data, name, preprocessing=self.detector.preprocessing, most_pixels=LARGEST_SERVED)
        (objects,) = self.detector.detect([image], self.top, self.threshold)
        return [(image, objects)]


def detect(detector: Detector, files: Sequence[pathlib.Path], options: DetectPredictOptions) -> None:
    """Find objects, print a table, and write `options.output`.

    A file that cannot be read is named, and the others are looked at. Raises UserError if none can be read.
    """
    found: Found = []
    problems: list[str] = []
    for images in batches_of_pictures(files, detector.preprocessing, problems):
        found += zip(images, detector.detect(images, options.top, options.threshold), strict=True)
    columns = ("picture", "class", "score", "x", "y", "w", "h")
    rows = [
        (name, label, f"{score:.3f}", *(f"{side:.0f}" for side in box))
        for name, label, score, box in _rows(detector, found)
    ]
    if rows:
        print(markdown_table(columns, rows, num_text_columns=2))
    if empty := sum(not len(objects.scores) for _, objects in found):
        print(f"Nothing with a score of {options.threshold:g} or more on {empty} of {len(found)} pictures.")
    for problem in problems:
        print(f"Not looked at: {problem}")
    output = options.output
    if output is not None and found:
        with atomic_write(pathlib.Path(output)) as temporary:
            if output.endswith(".csv"):
                _write_csv(temporary, detector, found, raw=options.raw)
            elif output.endswith(".json"):
                temporary.write_text(json.dumps(found_document(detector.labels, found)) + "\n", encoding="utf-8")
            else:
                temporary.write_text(_page(detector, found, problems), encoding="utf-8")
        print(f"Results are in {output}.")
    check_some_read(len(found))


def _rows(detector: Detector, found: Found) -> Iterator[tuple[str, str, float, list[float]]]:
    """Yield path, class, score, and left, top, width and height of each object."""
    for image, objects in found:
        for each in objects.annotations():
            yield image.name, detector.labels[each["category_id"] - 1], each["score"], each["bbox"]


def found_document(labels: Sequence[str], found: Found) -> dict:
    """Return objects as a document in COCO's format, with a score in each annotation."""
    whole = coco_document(labels, [objects.annotations() for _, objects in found])
    for fields, (image, _) in zip(whole["images"], found, strict=True):
        fields |= {"file_name": image.name} | dict(zip(("height", "width"), image.pixels.shape[:2], strict=True))
    return whole


def _write_csv(path: pathlib.Path, detector: Detector, found: Found, *, raw: bool) -> None:
    """With the columns that `--data csv:FILE` reads, and the score; a picture without objects is a row of its path."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = CsvWriter(stream, raw=raw)
        writer.writerow(["path", "x", "y", "w", "h", "label", "score"])
        for each in found:
            for name, label, score, box in _rows(detector, [each]):
                writer.writerow([name, *(f"{side:.2f}" for side in box), label, f"{score:.6f}"])
            if not len(each[1].scores):
                writer.writerow([each[0].name, *[""] * 6])


def _page(detector: Detector, found: Found, problems: Sequence[str]) -> str:
    pictures = [DrawnPicture(image.name, image.pixels, _boxes(detector.labels, objects)) for image, objects in found]
    words = [*(f"Not looked at: {problem}" for problem in problems), f"Model: {short_name(detector.name)}."]
    return boxes_page("Objects on pictures", pictures, words)


def _boxes(labels: Sequence[str], objects: Objects) -> list[DrawnBox]:
    return [
        DrawnBox(corners, f"{labels[label]} {score:.2f}", COLORS[label % len(COLORS)])
        for corners, label, score in zip(objects.corners, objects.classes, objects.scores, strict=True)
    ]

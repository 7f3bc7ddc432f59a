"""Find objects on image files, and write them as a table, CSV, COCO JSON or a page."""

import csv
import dataclasses
import html
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import tqdm

from keras_vit import inspection
from keras_vit.files.atomic import atomic_write
from keras_vit.files.tables import markdown_table, short_name
from training.detection.detector import BATCH, Detector, Objects
from training.detection.page import COLORS, DrawnBox, DrawnPicture, boxes_page
from training.input.dataset import check_some_read
from training.options.detect import DetectPredictOptions
from training.prediction.predict import as_utf8, read_picture

Found = list[tuple[str, inspection.Image, Objects]]
"""Path, picture and objects."""


@dataclasses.dataclass(frozen=True, eq=False)
class DetectionPage:
    """What the page in the browser shows of a picture."""

    detector: Detector
    top: int
    threshold: float

    def answer(self, data: bytes, name: str) -> str:
        """A page with the boxes on one picture. Raises UserError for bytes that are none."""
        image = inspection.decode(data, name, preprocessing=self.detector.preprocessing)
        (objects,) = self.detector.detect([image], self.top, self.threshold)
        return _page(self.detector, [(image.name, image, objects)], {})


def detect(detector: Detector, files: Sequence[pathlib.Path], options: DetectPredictOptions) -> None:
    """Find objects, print a table, and write `options.output`.

    A file that cannot be read is named, and the others are looked at. Raises UserError if none can be read.
    """
    found: Found = []
    problems: dict[str, str] = {}
    progress = tqdm.tqdm(total=len(files), unit="picture", disable=None)
    for begin in range(0, len(files), BATCH):
        images = []
        for file in files[begin : begin + BATCH]:
            image, problem = read_picture(file, detector.preprocessing)
            if image is None:
                problems[as_utf8(str(file))] = problem or ""
            else:
                images.append(image)
        objects = detector.detect(images, options.top, options.threshold) if images else []
        found += [(image.name, image, each) for image, each in zip(images, objects, strict=True)]
        progress.update(len(files[begin : begin + BATCH]))
    progress.close()
    _print(detector, found, problems, options.threshold)
    output = options.output
    if output is not None and found:
        with atomic_write(pathlib.Path(output)) as temporary:
            if output.endswith(".csv"):
                _write_csv(temporary, detector, found)
            elif output.endswith(".json"):
                document = coco_document(
                    detector.labels, [(name, image.pixels.shape[:2], o) for name, image, o in found]
                )
                temporary.write_text(json.dumps(document) + "\n", encoding="utf-8")
            else:
                temporary.write_text(_page(detector, found, problems), encoding="utf-8")
        print(f"Results are in {output}.")
    check_some_read(len(found))


def _print(detector: Detector, found: Found, problems: dict[str, str], threshold: float) -> None:
    rows = [
        (name, detector.labels[label], f"{score:.3f}", *(f"{edge:.0f}" for edge in _left_top_width_height(corners)))
        for name, _, objects in found
        for corners, score, label in zip(objects.corners, objects.scores, objects.classes, strict=True)
    ]
    if rows:
        print(markdown_table(("picture", "class", "score", "x", "y", "w", "h"), rows, num_text_columns=2))
    empty = sum(not len(objects.scores) for _, _, objects in found)
    if empty:
        print(f"Nothing with a score of {threshold:g} or more on {empty} of {len(found)} pictures.")
    for file, problem in problems.items():
        print(f"Not looked at: {file}: {problem.removeprefix(f'{pathlib.Path(file).name} is ')}")


def _left_top_width_height(corners: np.ndarray) -> list[float]:
    left, top, right, bottom = map(float, corners)
    return [left, top, right - left, bottom - top]


def coco_document(labels: Sequence[str], found: Sequence[tuple[str, tuple[int, int], Objects]]) -> dict:
    """Objects as a document in COCO's format, with a score in each annotation.

    found: of each picture its path, (height, width) and objects.
    """
    images, annotations = list[dict](), list[dict]()
    for number, (name, (height, width), objects) in enumerate(found, 1):
        images.append({"id": number, "file_name": name, "height": int(height), "width": int(width)})
        for corners, score, label in zip(objects.corners, objects.scores, objects.classes, strict=True):
            box = _left_top_width_height(corners)
            place = {"id": len(annotations) + 1, "image_id": number, "category_id": int(label) + 1, "bbox": box}
            annotations.append({**place, "area": box[2] * box[3], "iscrowd": 0, "score": float(score)})
    categories = [{"id": number, "name": name} for number, name in enumerate(labels, 1)]
    return {"images": images, "categories": categories, "annotations": annotations}


def _write_csv(path: pathlib.Path, detector: Detector, found: Found) -> None:
    """With the columns that `--data csv:FILE` reads, and the score; a picture without objects is a row of its path."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["path", "x", "y", "w", "h", "label", "score"])
        for name, _, objects in found:
            for corners, score, label in zip(objects.corners, objects.scores, objects.classes, strict=True):
                box = (f"{edge:.2f}" for edge in _left_top_width_height(corners))
                writer.writerow([name, *box, detector.labels[label], f"{score:.6f}"])
            if not len(objects.scores):
                writer.writerow([name, *[""] * 6])


def _page(detector: Detector, found: Found, problems: dict[str, str]) -> str:
    pictures = [
        DrawnPicture(
            name,
            image.pixels,
            [
                DrawnBox(corners, f"{detector.labels[label]} {score:.2f}", COLORS[label % len(COLORS)])
                for corners, score, label in zip(objects.corners, objects.scores, objects.classes, strict=True)
            ],
        )
        for name, image, objects in found
    ]
    missing = "".join(f"<li>{html.escape(f'{file}: {problem}')}</li>" for file, problem in problems.items())
    listed = f"<h2>Not looked at</h2><ul>{missing}</ul>" if missing else ""
    return boxes_page(
        "Objects on pictures", pictures, [listed, f"<p>Model: {html.escape(short_name(detector.name))}.</p>"]
    )

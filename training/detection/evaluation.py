"""COCO's metrics of a detector, by pycocotools, with intervals, and a page of its worst mistakes."""

import contextlib
import dataclasses
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_vit import UserError, inspection
from keras_vit.files.tables import markdown_table, short_name, with_interval
from keras_vit.progress import Progress
from training.detection.annotations import Picture
from training.detection.detector import BATCH, Detector, Objects
from training.detection.page import DrawnBox, DrawnPicture, boxes_page
from training.evaluation.average_precision import STATS, average_precision, coco_evaluation, document, write_measured

# Objects of a picture that count, as in COCO.
TOP = 100
# Pictures on the page with missed objects, and with false alarms; the score from which a false alarm counts.
_MOST_SHOWN, _LEAST_SCORE = 12, 0.1
_MISSED, _FALSE, _FOUND = "#c44e00", "#a0457a", "#00734f"


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """What was measured, and where it went wrong."""

    name: str
    labels: tuple[str, ...]
    pictures: Sequence[Picture]
    found: Sequence[Objects]
    metrics: dict[str, Any]
    """`ap` (IoU 0.5 to 0.95), `ap50`, `ap75`, `ap_small` (below 32 x 32 pixels), `ap_medium`, `ap_large` (from 96 x 96
    on), `ar` (100 objects), each None without such objects; `intervals` of ap and ap50; `classes`, by name."""


def detected(detector: Detector, pictures: Sequence[Picture]) -> list[Objects]:
    """The likeliest 100 objects of each picture."""
    found: list[Objects] = []
    with Progress("Finding objects", len(pictures)) as progress:
        for begin in range(0, len(pictures), BATCH):
            images = [_read(detector, picture) for picture in pictures[begin : begin + BATCH]]
            found += detector.detect(images, TOP)
            progress.update(len(images))
    return found


def _read(detector: Detector, picture: Picture) -> inspection.Image:
    return inspection.read_images(picture.file, 1, preprocessing=detector.preprocessing)[0]


def measured(labels: Sequence[str], pictures: Sequence[Picture], found: Sequence[Objects]) -> dict[str, Any]:
    """COCO's metrics; see `Evaluation.metrics`."""
    if not sum(len(picture.classes) for picture in pictures):
        raise UserError("None of the pictures has a box, so nothing can be measured; give pictures with objects.")
    return average_precision(*_documents(labels, pictures, found), labels, "bbox")


def _documents(labels: Sequence[str], pictures: Sequence[Picture], found: Sequence[Objects]) -> tuple[dict, dict]:
    truth = [_annotations(each.corners, each.classes) for each in pictures]
    return document(labels, truth), document(labels, [_annotations(e.corners, e.classes, e.scores) for e in found])


def _annotations(corners: np.ndarray, classes: np.ndarray, scores: np.ndarray | None = None) -> list[dict[str, Any]]:
    """Objects in COCO's format; categories begin at 1."""
    boxes = np.asarray(corners, np.float64)
    sizes = boxes[:, 2:] - boxes[:, :2]
    rows = zip(np.concatenate([boxes[:, :2], sizes], axis=1).tolist(), classes, sizes.prod(axis=1), strict=True)
    found = [{"bbox": box, "category_id": int(label) + 1, "area": float(area)} for box, label, area in rows]
    return found if scores is None else [o | {"score": float(s)} for o, s in zip(found, scores, strict=True)]


def evaluate(detector: Detector, pictures: Sequence[Picture]) -> Evaluation:
    """Find objects on pictures with boxes, and measure what was found."""
    found = detected(detector, pictures)
    return Evaluation(detector.name, detector.labels, pictures, found, measured(detector.labels, pictures, found))


def write_report(evaluation: Evaluation, detector: Detector, output: pathlib.Path) -> None:
    """Write detection.json, detection.md and detection.html, the page of the worst mistakes."""
    metrics = evaluation.metrics
    sentence = (
        f"AP {with_interval(metrics['ap'], metrics['intervals']['ap'])}, AP50 "
        f"{with_interval(metrics['ap50'], metrics['intervals']['ap50'])} on {metrics['pictures']:,} pictures with "
        f"{metrics['objects']:,} objects"
    )
    sizes = [(name.replace("_", " "), with_interval(metrics[name])) for name in STATS]
    classes = [
        (label, f"{row['objects']:,}", with_interval(row["ap"], row["interval"]), with_interval(row["ap50"]))
        for label, row in metrics["classes"].items()
    ]
    text = [
        f"# Detection: {short_name(evaluation.name)}", "", f"{sentence}.", "",
        "AP is the mean over IoU 0.5 to 0.95, small objects are below 32 x 32 pixels of the picture, large ones from "
        "96 x 96 on; intervals hold 95 % of 200 draws of the pictures.", "",
        markdown_table(("metric", "value"), sizes, num_text_columns=1), "",
        markdown_table(("class", "objects", "AP", "AP50"), classes, num_text_columns=1), "",
    ]  # fmt: skip
    files = write_measured(output, "detection", metrics, text, _page(evaluation, detector))
    print(f"{sentence}; {files}.")


def mistakes(picture: Picture, objects: Objects) -> tuple[np.ndarray, np.ndarray]:
    """(which boxes of a picture are missed, which objects are false alarms), by COCO's matching at IoU 0.5."""
    count = max([0, *picture.classes, *objects.classes]) + 1
    with contextlib.redirect_stdout(io.StringIO()):
        evaluated = coco_evaluation(*_documents([str(n) for n in range(count)], [picture], [objects]), "bbox")
    sizes = len(evaluated.params.areaRng)
    missed, false = np.ones(len(picture.classes), bool), np.ones(len(objects.classes), bool)
    for of_class in evaluated.evalImgs[::sizes]:
        if of_class is not None:
            for number, match in zip(of_class["gtIds"], of_class["gtMatches"][0], strict=True):
                missed[number - 1] = match == 0
            for number, match in zip(of_class["dtIds"], of_class["dtMatches"][0], strict=True):
                false[number - 1] = match == 0
    return missed, false


def _page(evaluation: Evaluation, detector: Detector) -> str:
    """The pictures with the largest missed objects, and those with the likeliest false alarms."""
    rows = []
    for picture, objects in zip(evaluation.pictures, evaluation.found, strict=True):
        likely = objects.scores >= _LEAST_SCORE
        objects = Objects(objects.corners[likely], objects.scores[likely], objects.classes[likely])
        missed, false = mistakes(picture, objects)
        areas = np.prod(picture.corners[:, 2:] - picture.corners[:, :2], axis=-1) / np.prod(picture.size)
        worst = max([0.0, *areas[missed]]), max([0.0, *objects.scores[false]])
        rows.append((worst, picture, objects, missed, false))
    chosen = {
        id(row): row
        for key in (0, 1)
        for row in sorted(rows, key=lambda row: -row[0][key])[:_MOST_SHOWN]
        if row[0][key] > 0
    }
    drawn = [
        _drawn(_read(detector, picture), evaluation.labels, picture, objects, missed, false)
        for _, picture, objects, missed, false in chosen.values()
    ]
    legend = (
        f"<p>The largest missed objects come first, then the likeliest false alarms. Objects count from a score of "
        f"{_LEAST_SCORE} on, and a box is found if an object of its class covers it with an IoU of 0.5 or more.</p>"
    )
    return boxes_page("Worst misses and false alarms", drawn, [legend])


def _drawn(
    image: inspection.Image,
    labels: Sequence[str],
    picture: Picture,
    objects: Objects,
    missed: np.ndarray,
    false: np.ndarray,
) -> DrawnPicture:
    boxes = [
        DrawnBox(corners, f"missed: {labels[label]}", _MISSED, dashed=True)
        for corners, label in zip(picture.corners[missed], picture.classes[missed], strict=True)
    ]
    for corners, label, score, is_false in zip(objects.corners, objects.classes, objects.scores, false, strict=True):
        words = f"{'false: ' if is_false else ''}{labels[label]} {score:.2f}"
        boxes.append(DrawnBox(corners, words, _FALSE if is_false else _FOUND))
    return DrawnPicture(str(picture.file), image.pixels, boxes)

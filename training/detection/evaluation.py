"""COCO's metrics of a detector, by pycocotools, with intervals, and a page of its worst mistakes."""

import contextlib
import io
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_vit import UserError
from keras_vit.cli.pages import render, thumbnail_address
from keras_vit.cli.progress import Progress
from keras_vit.files.tables import markdown_table, with_interval
from keras_vit.images.files import read_image
from training.data.annotations.images import Box, BoxedImage
from training.detection.detector import Detector, Objects
from training.evaluation.average_precision import (
    STATS,
    average_precision,
    coco_document,
    coco_evaluation,
    write_measured,
)

# Objects of an image that count, as in COCO; images of one forward pass.
_TOP, _BATCH = 100, 8
# Images on the page with missed objects, and with false alarms; false alarms on each, and the score from which one
# counts.
_MOST_SHOWN, _MOST_FALSE, _LEAST_SCORE = 12, 5, 0.1
# IoU from which VOC counts an object as found.
_LEAST_OVERLAP = 0.5
_MISSED, _FALSE, _FOUND = "#c44e00", "#a0457a", "#00734f"


def evaluate(detector: Detector, images: Sequence[BoxedImage], kind: str, output: pathlib.Path) -> None:
    """Find objects on images with boxes, measure them, and write detection.json, detection.md and detection.html.

    kind: of the data; for voc, VOC's average precision is measured, too. Raises UserError if there is no box.
    """
    detections: list[Objects] = []
    with Progress("Finding objects", len(images)) as progress:
        for begin in range(0, len(images), _BATCH):
            batch = [read_image(image.file, detector.preprocessing) for image in images[begin : begin + _BATCH]]
            detections += detector.detect(batch, _TOP)
            progress.update(len(batch))
    metrics = measured(detector.labels, images, detections, kind)
    voc = f", VOC's AP {with_interval(metrics['voc_ap'])}" if kind == "voc" else ""
    sentence = (
        f"AP {with_interval(metrics['ap'], metrics['intervals']['ap'])}, AP50 "
        f"{with_interval(metrics['ap50'], metrics['intervals']['ap50'])}{voc} on {metrics['pictures']:,} images with "
        f"{metrics['objects']:,} objects"
    )
    sizes = [(name.replace("_", " "), with_interval(metrics[name])) for name in STATS]
    classes = [
        (label, f"{row['objects']:,}", with_interval(row["ap"], row["interval"]), with_interval(row["ap50"]))
        for label, row in metrics["classes"].items()
    ]
    words = (
        "AP is the mean over IoU 0.5 to 0.95; small objects have an area below 32 x 32 pixels of the image, large ones "
        "from 96 x 96 on; intervals hold 95% of 200 draws of the images."
    )
    tables = [
        markdown_table(("metric", "value"), sizes, num_text_columns=1),
        markdown_table(("class", "objects", "AP", "AP50"), classes, num_text_columns=1),
    ]
    page = _page(detector, images, detections)
    write_measured(output, "detection", detector.name, metrics, [f"{sentence}.", words, *tables], page)


def measured(
    labels: Sequence[str], images: Sequence[BoxedImage], detections: Sequence[Objects], kind: str = "coco"
) -> dict[str, Any]:
    """COCO's metrics, see `average_precision`, and for the kind voc `voc_ap`, see `voc_average_precision`.

    The truth is what the file annotates: crowds and difficult objects are neither missed nor false alarms.
    """
    check_objects(images)
    metrics = average_precision(*_documents(labels, images, detections), labels, "bbox")
    return metrics | ({"voc_ap": voc_average_precision(images, detections, len(labels))} if kind == "voc" else {})


def check_objects(images: Sequence[BoxedImage]) -> None:
    """Raise UserError for evaluation images without an object that counts."""
    if all(box.is_crowd or box.is_difficult for image in images for box in image.boxes):
        raise UserError("No evaluation image has a box that counts, so nothing can be measured; give images with some.")


def _documents(labels: Sequence[str], images: Sequence[BoxedImage], detections: Sequence[Objects]) -> tuple[dict, dict]:
    """Truth and detections in COCO's format, in the order of the images' ids, which decides between equal scores."""
    order = sorted(range(len(images)), key=lambda number: images[number].id)
    truth = [[_annotation(box) for box in images[number].boxes] for number in order]
    return coco_document(labels, truth), coco_document(labels, [detections[number].annotations() for number in order])


def _annotation(box: Box) -> dict[str, Any]:
    return {
        "bbox": [*box.bbox],
        "category_id": int(box.label) + 1,
        "area": box.bbox[2] * box.bbox[3] if box.area is None else box.area,
        "iscrowd": int(box.is_crowd or box.is_difficult),
        "difficult": box.is_difficult,
    }


def mistakes(image: BoxedImage, objects: Objects) -> tuple[np.ndarray, np.ndarray]:
    """(which boxes of an image are missed, which objects are false alarms), by COCO's matching at IoU 0.5."""
    count = max([0, *(int(box.label) for box in image.boxes), *objects.classes]) + 1
    with contextlib.redirect_stdout(io.StringIO()):
        evaluated = coco_evaluation(*_documents([str(n) for n in range(count)], [image], [objects]), "bbox")
    missed, false = np.zeros(len(image.boxes), bool), np.zeros(len(objects.classes), bool)
    for of_class in filter(None, evaluated.evalImgs[:: len(evaluated.params.areaRng)]):
        for side, wrong in (("gt", missed), ("dt", false)):
            unmatched = of_class[f"{side}Matches"][0] == 0
            ignored = of_class["gtIgnore"] if side == "gt" else of_class["dtIgnore"][0]
            wrong[np.array(of_class[f"{side}Ids"], int) - 1] = unmatched & ~np.asarray(ignored, bool)
    return missed, false


def _page(detector: Detector, images: Sequence[BoxedImage], detections: Sequence[Objects]) -> str:
    """Return the images with the largest missed objects, and those with the most likely false alarms."""
    cards, badness = [], []
    for image, objects in zip(images, detections, strict=True):
        likely = objects.scores >= _LEAST_SCORE
        objects = Objects(objects.corners[likely], objects.scores[likely], objects.classes[likely])
        missed, false = mistakes(image, objects)
        missed_boxes = [image.boxes[number] for number in np.flatnonzero(missed).tolist()]
        areas = [box.bbox[2] * box.bbox[3] / math.prod(image.size) for box in missed_boxes]
        badness.append((max([0.0, *areas]), max([0.0, *objects.scores[false]])))
        boxes = [
            DrawnBox(box.corners, f"missed: {detector.labels[int(box.label)]}", _MISSED, dashed=True)
            for box in missed_boxes
        ]
        for number in np.flatnonzero(~false | (np.cumsum(false) <= _MOST_FALSE)):
            corners, label, score, is_false = (
                each[number] for each in (objects.corners, objects.classes, objects.scores, false)
            )
            words = f"{'false: ' if is_false else ''}{detector.labels[label]} {score:.2f}"
            boxes.append(DrawnBox(corners, words, _FALSE if is_false else _FOUND))
        cards.append((image, boxes))
    worst = [np.argsort(-column, kind="stable")[:_MOST_SHOWN] for column in np.array(badness).T]
    shown = dict.fromkeys(n for key, order in enumerate(worst) for n in order.tolist() if badness[n][key] > 0)
    drawn = []
    for image, boxes in (cards[number] for number in shown):
        pixels = read_image(image.file, detector.preprocessing).pixels
        drawn.append((f"{image.file.parent.name}/{image.file.name}", pixels, boxes))
    legend = (
        f"The largest missed objects come first, then the most likely false alarms, up to {_MOST_FALSE} of an image. "
        f"Objects count from a score of {_LEAST_SCORE} on, and a box is found if an object of its class covers it with "
        "an IoU of 0.5 or more."
    )
    return boxes_page("Worst misses and false alarms", drawn, [legend])


def voc_average_precision(images: Sequence[BoxedImage], detections: Sequence[Objects], num_classes: int) -> float:
    """Return the mean over the classes of the area under the curve of precision, at IoU 0.5.

    As `VOCevaldet.m` and `VOCap.m` of the development kit of VOC 2010 and later: a detection belongs to the object that
    it overlaps most; difficult objects count neither as found nor as missed; classes without others are left out.
    """
    return float(np.nanmean([_of_class(images, detections, label) for label in range(num_classes)]))


def _of_class(images: Sequence[BoxedImage], detections: Sequence[Objects], label: int) -> float:
    count, scores, hits = 0, list[float](), list[bool]()
    for image, objects in zip(images, detections, strict=True):
        boxes = [box for box in image.boxes if box.label == label]
        own = objects.classes == label
        count += sum(not box.is_difficult for box in boxes)
        ious = _iou(objects.corners[own], np.array([box.corners for box in boxes]).reshape(-1, 4))
        taken: set[int] = set()
        for row, score in zip(ious, objects.scores[own].tolist(), strict=True):
            best = int(row.argmax()) if len(row) and row.max() >= _LEAST_OVERLAP else None
            if best is not None and boxes[best].is_difficult:
                continue
            scores.append(score)
            hits.append(best is not None and best not in taken)
            taken |= set() if best is None else {best}
    if not count:
        return float("nan")
    right = np.array(hits, bool)[np.argsort(-np.array(scores), kind="stable")]
    true = np.cumsum(right)
    precision = true / np.arange(1, len(right) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(envelope[right]) / count)


def _iou(corners: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the IoU of boxes (n, 4) and (m, 4), left, top, right, bottom -> (n, m)."""
    first, second = corners.astype(np.float64)[:, None], others[None]
    sides = np.minimum(first[..., 2:], second[..., 2:]) - np.maximum(first[..., :2], second[..., :2])
    common = np.prod(np.maximum(sides, 0.0), axis=-1)
    areas = [np.prod(each[..., 2:] - each[..., :2], axis=-1) for each in (first, second)]
    return common / (areas[0] + areas[1] - common)


# Longest side of an image on the page, in pixels.
_LONGEST = 800
# Distinct to any color vision (Okabe and Ito), dark enough for white letters.
COLORS = ("#0072b2", "#c44e00", "#00734f", "#a0457a", "#5c4d00", "#444444")


class DrawnBox(NamedTuple):
    """A box and what stands beside it."""

    corners: Sequence[float]
    """Left, top, right, bottom in pixels of the image."""
    text: str
    color: str
    dashed: bool = False


def boxes_page(
    title: str, images: Sequence[tuple[str, np.ndarray, Sequence[DrawnBox]]], paragraphs: Sequence[str]
) -> str:
    """Return HTML text of a page: the paragraphs, and of each image its name, pixels (h, w, C) uint8 and boxes."""
    return render("boxes", title=title, words=paragraphs, cards=[_card(*image) for image in images])


def _card(name: str, pixels: np.ndarray, boxes: Sequence[DrawnBox]) -> dict[str, Any]:
    height, width = pixels.shape[:2]
    letters = max(width, height) / 28  # their height, in pixels of the image
    shapes = []
    for corners, text, color, dashed in boxes:
        left, top, right, bottom = map(float, corners)
        place = {"left": left, "top": top, "width": right - left, "height": bottom - top}
        baseline = min(max(top, 0) + letters, height)
        shapes.append({**place, "baseline": baseline, "text": text, "color": color, "dashed": dashed})
    return {
        "name": name,
        "width": width,
        "height": height,
        "letters": letters,
        "address": thumbnail_address(pixels, _LONGEST),
        "texts": [box.text for box in boxes] or ["nothing found"],
        "boxes": shapes,
    }

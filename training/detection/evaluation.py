"""COCO's metrics of a detector, by pycocotools, with intervals, and a page of its worst mistakes."""

import contextlib
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_vit import UserError, inspection
from keras_vit.cli.progress import Progress
from keras_vit.files.tables import markdown_table, with_interval
from training.detection.annotations import Picture
from training.detection.detector import Detector, Objects, coco_boxes
from training.detection.page import DrawnBox, DrawnPicture, boxes_page
from training.evaluation.average_precision import (
    STATS,
    average_precision,
    coco_document,
    coco_evaluation,
    write_measured,
)

# Objects of a picture that count, as in COCO; pictures of one forward pass.
_TOP, _BATCH = 100, 8
# Pictures on the page with missed objects, and with false alarms; false alarms on each, and the score from which one
# counts.
_MOST_SHOWN, _MOST_FALSE, _LEAST_SCORE = 12, 5, 0.1
_MISSED, _FALSE, _FOUND = "#c44e00", "#a0457a", "#00734f"


def evaluate(detector: Detector, pictures: Sequence[Picture], output: pathlib.Path) -> None:
    """Find objects on pictures with boxes, measure them, and write detection.json, detection.md and detection.html.

    Raises UserError if there is no box.
    """
    found: list[Objects] = []
    with Progress("Finding objects", len(pictures)) as progress:
        for begin in range(0, len(pictures), _BATCH):
            images = [_read(detector, picture) for picture in pictures[begin : begin + _BATCH]]
            found += detector.detect(images, _TOP)
            progress.update(len(images))
    metrics = measured(detector.labels, pictures, found)
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
    words = (
        "AP is the mean over IoU 0.5 to 0.95, small objects are below 32 x 32 pixels of the picture, large ones from "
        "96 x 96 on; intervals hold 95 % of 200 draws of the pictures."
    )
    tables = [
        markdown_table(("metric", "value"), sizes, num_text_columns=1),
        markdown_table(("class", "objects", "AP", "AP50"), classes, num_text_columns=1),
    ]
    page = _page(detector, pictures, found)
    write_measured(output, "detection", detector.name, metrics, [f"{sentence}.", words, *tables], page)


def _read(detector: Detector, picture: Picture) -> inspection.Image:
    return inspection.read_images(picture.file, 1, preprocessing=detector.preprocessing)[0]


def measured(labels: Sequence[str], pictures: Sequence[Picture], found: Sequence[Objects]) -> dict[str, Any]:
    """COCO's metrics; see `average_precision`."""
    if not sum(len(picture.classes) for picture in pictures):
        raise UserError("None of the pictures has a box, so nothing can be measured; give pictures with objects.")
    return average_precision(*_documents(labels, pictures, found), labels, "bbox")


def _documents(labels: Sequence[str], pictures: Sequence[Picture], found: Sequence[Objects]) -> tuple[dict, dict]:
    truth = [coco_boxes(each.corners, each.classes) for each in pictures]
    return coco_document(labels, truth), coco_document(labels, [each.annotations() for each in found])


def mistakes(picture: Picture, objects: Objects) -> tuple[np.ndarray, np.ndarray]:
    """(which boxes of a picture are missed, which objects are false alarms), by COCO's matching at IoU 0.5."""
    count = max([0, *picture.classes, *objects.classes]) + 1
    with contextlib.redirect_stdout(io.StringIO()):
        evaluated = coco_evaluation(*_documents([str(n) for n in range(count)], [picture], [objects]), "bbox")
    missed, false = np.ones(len(picture.classes), bool), np.ones(len(objects.classes), bool)
    for of_class in filter(None, evaluated.evalImgs[:: len(evaluated.params.areaRng)]):
        for kind, wrong in (("gt", missed), ("dt", false)):
            wrong[np.array(of_class[f"{kind}Ids"], int) - 1] = of_class[f"{kind}Matches"][0] == 0
    return missed, false


def _page(detector: Detector, pictures: Sequence[Picture], found: Sequence[Objects]) -> str:
    """The pictures with the largest missed objects, and those with the likeliest false alarms."""
    cards, badness = [], []
    for picture, objects in zip(pictures, found, strict=True):
        likely = objects.scores >= _LEAST_SCORE
        objects = Objects(objects.corners[likely], objects.scores[likely], objects.classes[likely])
        missed, false = mistakes(picture, objects)
        areas = np.prod(picture.corners[:, 2:] - picture.corners[:, :2], axis=-1) / np.prod(picture.size)
        badness.append((max([0.0, *areas[missed]]), max([0.0, *objects.scores[false]])))
        boxes = [
            DrawnBox(corners, f"missed: {detector.labels[label]}", _MISSED, dashed=True)
            for corners, label in zip(picture.corners[missed], picture.classes[missed], strict=True)
        ]
        for number in np.flatnonzero(~false | (np.cumsum(false) <= _MOST_FALSE)):
            corners, label, score, is_false = (
                each[number] for each in (objects.corners, objects.classes, objects.scores, false)
            )
            words = f"{'false: ' if is_false else ''}{detector.labels[label]} {score:.2f}"
            boxes.append(DrawnBox(corners, words, _FALSE if is_false else _FOUND))
        cards.append((picture, boxes))
    worst = [np.argsort(-column, kind="stable")[:_MOST_SHOWN] for column in np.array(badness).T]
    shown = dict.fromkeys(n for key, order in enumerate(worst) for n in order.tolist() if badness[n][key] > 0)
    drawn = [
        DrawnPicture(f"{picture.file.parent.name}/{picture.file.name}", _read(detector, picture).pixels, boxes)
        for picture, boxes in (cards[number] for number in shown)
    ]
    legend = (
        f"The largest missed objects come first, then the likeliest false alarms, up to {_MOST_FALSE} of a picture. "
        f"Objects count from a score of {_LEAST_SCORE} on, and a box is found if an object of its class covers it with "
        "an IoU of 0.5 or more."
    )
    return boxes_page("Worst misses and false alarms", drawn, [legend])

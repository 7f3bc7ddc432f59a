"""mIoU, mask AP and panoptic quality of a model that segments, with intervals, and a page of its worst pictures."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tqdm
from pycocotools import mask as rle

from keras_vit import UserError, preprocessing_of
from keras_vit.files.tables import markdown_table, with_interval
from training.evaluation.average_precision import STATS, average_precision, coco_document, write_measured
from training.input.coco import NONE, UNCOUNTED
from training.input.dataset import Split, decoded
from training.segmentation.overlay import Panel, segments_page
from training.segmentation.segmenter import FoundSegments, Segmenter, class_map

# Draws of the bootstrap over the pictures, and the ends of the interval.
_DRAWS, _ENDS = 500, (0.025, 0.975)
_MOST_SHOWN = 12
# Of panopticapi (`evaluation.py`): IoU above which two segments are one, and share of uncounted pixels of a false one.
_LEAST_IOU, _MOST_VOID = 0.5, 0.5
Truth = tuple[np.ndarray, np.ndarray]
"""Classes (n,) and segments (h, w) of a picture, as `Split.target` has them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """What was measured, and where it went wrong."""

    segmenter: Segmenter
    split: Split
    metrics: dict[str, Any]
    """Of semantic: `mean_iou`, `pixel_accuracy`, `intervals`, `classes` with their IoU. Of instance: those of
    `average_precision`. Of panoptic: `pq`, `sq`, `rq`, `intervals`, `classes`. Always `task` and `pictures`."""
    right: np.ndarray
    """(pictures,) share of the counted pixels whose class is right."""


def evaluate(segmenter: Segmenter, split: Split) -> Evaluation:
    """Segment the pictures of a split and compare them with their masks, at their own size.

    Raises UserError if nothing of the masks is counted.
    """
    measure = {"semantic": _semantic, "instance": _instance, "panoptic": _panoptic}[segmenter.kind]
    right = np.zeros(split.num_examples)

    def pairs() -> Iterator[tuple[Truth, FoundSegments]]:
        for index in tqdm.tqdm(range(split.num_examples), unit="picture", disable=None):
            pixels, truth = _read(segmenter, split, index)
            found = segmenter.segment(pixels)
            classes = class_map(truth)
            counted = classes != UNCOUNTED
            right[index] = np.mean((classes == class_map(found))[counted]) if counted.any() else 1.0
            yield truth, found

    metrics = measure(pairs(), segmenter.labels)
    return Evaluation(segmenter, split, {"task": segmenter.kind, "pictures": split.num_examples, **metrics}, right)


def _read(segmenter: Segmenter, split: Split, index: int) -> tuple[np.ndarray, Truth]:
    """The pixels of a picture (h, w, C) uint8, and its truth."""
    assert split.target is not None
    number = tf.constant(index, tf.int64)
    target = split.target(number)
    pixels = decoded(split.read(number)[0], preprocessing_of(segmenter.model)).numpy()
    return pixels, (target["labels"].numpy(), target["segments"].numpy())


def _semantic(pairs: Iterator[tuple[Truth, FoundSegments]], labels: Sequence[str]) -> dict[str, Any]:
    count, rows = len(labels), []
    for truth, found in pairs:
        wanted, got = class_map(truth), found.map
        counted = wanted >= 0
        confusion = np.bincount(wanted[counted] * count + got[counted], minlength=count**2).reshape(count, count)
        rows.append([confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)])
    sums = np.array(rows, np.float64)  # (pictures, hits and wanted and got, classes)
    if not sums[:, 1].any():
        raise UserError("No pixel of the evaluation masks is counted; give masks with classes below 255.")
    present = sums[:, 1].sum(axis=0) > 0

    def mean_iou(total: np.ndarray) -> float:
        return float(np.mean(_iou(total)[total[1] > 0]))

    def accuracy(total: np.ndarray) -> float:
        return float(total[0].sum() / total[1].sum())

    iou = _iou(sums.sum(axis=0))
    classes = {name: {"iou": float(iou[n]) if present[n] else None} for n, name in enumerate(labels)}
    return {**_with_intervals(sums, {"mean_iou": mean_iou, "pixel_accuracy": accuracy}), "classes": classes}


def _iou(total: np.ndarray) -> np.ndarray:
    """(hits and wanted and got, classes) -> (classes,)."""
    return total[0] / np.maximum(total[1] + total[2] - total[0], 1.0)


def _with_intervals(sums: np.ndarray, measures: dict[str, Callable[[np.ndarray], float]]) -> dict[str, Any]:
    """Measures of the sum over pictures (pictures, ...), and their `intervals` by a bootstrap over them."""
    rng, draws = np.random.default_rng(0), []
    for _ in range(_DRAWS):
        weights = np.bincount(rng.integers(0, len(sums), len(sums)), minlength=len(sums))
        total = np.tensordot(weights, sums, axes=1)
        draws.append([measure(total) if total.any() else np.nan for measure in measures.values()])
    ends = np.nanquantile(draws, _ENDS, axis=0)
    values = {name: measure(sums.sum(axis=0)) for name, measure in measures.items()}
    return {**values, "intervals": {name: ends[:, n].tolist() for n, name in enumerate(measures)}}


def _instance(pairs: Iterator[tuple[Truth, FoundSegments]], labels: Sequence[str]) -> dict[str, Any]:
    truths: list[list[dict[str, Any]]] = []
    guesses: list[list[dict[str, Any]]] = []
    for (classes, segments), found in pairs:
        own = [_annotation(segments == n, label) for n, label in enumerate(classes.tolist()) if (segments == n).any()]
        crowd = segments == UNCOUNTED
        if crowd.any():  # of any class
            own += [_annotation(crowd, label) | {"iscrowd": 1} for label in range(len(labels))]
        truths.append(own)
        assert found.masks is not None
        rows = zip(found.masks, found.labels.tolist(), found.scores.tolist(), strict=True)
        guesses.append([_annotation(mask, label) | {"score": score} for mask, label, score in rows])
    if not any(not each["iscrowd"] for own in coco_document(labels, truths)["annotations"] for each in [own]):
        raise UserError("The evaluation masks have no object, so nothing can be measured; give pictures with objects.")
    return average_precision(coco_document(labels, truths), coco_document(labels, guesses), labels, "segm")


def _annotation(mask: np.ndarray, label: int) -> dict[str, Any]:
    encoded = rle.encode(np.asfortranarray(mask, np.uint8))
    return {"segmentation": encoded, "area": float(mask.sum()), "bbox": list(rle.toBbox(encoded)),
            "category_id": label + 1}  # fmt: skip


def _panoptic(pairs: Iterator[tuple[Truth, FoundSegments]], labels: Sequence[str]) -> dict[str, Any]:
    rows = [panoptic_counts(truth, (found.labels, found.map), len(labels)) for truth, found in pairs]
    sums = np.array(rows)  # (pictures, classes, IoU and true and false positives and false negatives)
    if not sums[..., 1:].any():
        raise UserError("The evaluation masks have no segment, so nothing can be measured; give others.")
    measures = {"pq": _pq, "sq": lambda total: _quality(total)[1], "rq": lambda total: _quality(total)[2]}
    total = sums.sum(axis=0)
    classes = {}
    for number, name in enumerate(labels):
        there = total[number, 1] + total[number, 3] > 0
        quality = _quality(total[number : number + 1])
        classes[name] = dict(zip(("pq", "sq", "rq"), quality if there else (None,) * 3, strict=True))
    return {**_with_intervals(sums, measures), "classes": classes}


def panoptic_counts(truth: Truth, found: Truth, num_classes: int) -> np.ndarray:
    """Of each class (K, 4): sum of IoUs, true positives, false positives, false negatives, as panopticapi counts.

    Pixels of a picture without a segment are void.
    """
    counts = np.zeros((num_classes, 4))
    (classes, wanted), (labels, got) = truth, found
    pairs, areas = np.unique(np.stack([wanted.ravel(), got.ravel()]), axis=1, return_counts=True)
    area = {pair: int(size) for pair, size in zip(map(tuple, pairs.T.tolist()), areas, strict=True)}
    of_truth = dict(zip(*(each.tolist() for each in np.unique(wanted, return_counts=True)), strict=True))
    of_found = dict(zip(*(each.tolist() for each in np.unique(got, return_counts=True)), strict=True))
    void = {number: sum(area.get((none, number), 0) for none in (NONE, UNCOUNTED)) for number in of_found}
    matched_truth, matched_found = set(), set()
    for (w, g), size in area.items():
        if w < 0 or g < 0 or classes[w] != labels[g]:
            continue
        iou = size / (of_truth[w] + of_found[g] - size - void[g])
        if iou > _LEAST_IOU:
            counts[classes[w], :2] += [iou, 1]
            matched_truth.add(w)
            matched_found.add(g)
    for w in of_truth.keys() - matched_truth:
        if w >= 0:
            counts[classes[w], 3] += 1
    for g in of_found.keys() - matched_found:
        if g >= 0 and void[g] / of_found[g] <= _MOST_VOID:
            counts[labels[g], 2] += 1
    return counts


def _quality(total: np.ndarray) -> tuple[float, float, float]:
    """PQ, SQ and RQ, means over the classes (K, 4) that are there."""
    total = total[total[:, 1:].sum(axis=1) > 0]
    iou, right, false, missed = total.T
    weight = right + (false + missed) / 2
    sq = np.divide(iou, right, out=np.zeros_like(iou), where=right > 0)
    return float(np.mean(iou / weight)), float(np.mean(sq)), float(np.mean(right / weight))


def _pq(total: np.ndarray) -> float:
    return _quality(total)[0]


_MAIN = {"semantic": ("mean_iou", "pixel_accuracy"), "instance": ("ap", "ap50"), "panoptic": ("pq", "sq", "rq")}
_WORDS = {"mean_iou": "mean IoU", "pixel_accuracy": "pixel accuracy", "ap": "mask AP", "ap50": "AP50"}


def write_report(evaluation: Evaluation, output: pathlib.Path) -> None:
    """Write segmentation.json, segmentation.md and segmentation.html, the page of the worst pictures."""
    metrics, kind = evaluation.metrics, evaluation.segmenter.kind
    values = ", ".join(
        f"{_WORDS.get(name, name.upper())} {with_interval(metrics[name], metrics['intervals'].get(name))}"
        for name in _MAIN[kind]
    )
    sentence = f"{values[0].upper()}{values[1:]} on {metrics['pictures']:,} evaluation pictures."
    columns = {"semantic": ("iou",), "instance": ("objects", "ap", "ap50"), "panoptic": ("pq", "sq", "rq")}[kind]
    rows = [(name, *(with_interval(row[column]) for column in columns)) for name, row in metrics["classes"].items()]
    text = [sentence, "Intervals hold 95 % of random draws of the pictures."]
    if kind == "instance":
        sizes = [(name.replace("_", " "), with_interval(metrics[name])) for name in STATS]
        text.append(markdown_table(("metric", "value"), sizes, num_text_columns=1))
    text.append(markdown_table(("class", *columns), rows, num_text_columns=1))
    write_measured(output, "segmentation", evaluation.segmenter.name, metrics, text, _page(evaluation))


def _page(evaluation: Evaluation) -> str:
    segmenter, cards = evaluation.segmenter, []
    for index in np.argsort(evaluation.right, kind="stable")[:_MOST_SHOWN].tolist():
        pixels, (classes, segments) = _read(segmenter, evaluation.split, index)
        name = f"{evaluation.split.name(index)}: {evaluation.right[index]:.0%} of the pixels have the right class"
        found = segmenter.segment(pixels, 0.5)
        rows = (("truth", classes, segments), ("found", found.labels, found.map))
        cards.append((name, pixels, [panel_of(*row, segmenter) for row in rows]))
    return segments_page("Worst pictures", cards, "Pictures with the most pixels of a wrong class come first.")


def panel_of(title: str, classes: np.ndarray, segments: np.ndarray, segmenter: Segmenter) -> Panel:
    """Segments of a picture to draw: of panoptic and semantic in the color of the class, of instance in their own."""
    colors = np.arange(len(classes)) if segmenter.kind == "instance" else classes
    return Panel(title, segments, [segmenter.labels[label] if label >= 0 else "" for label in classes], colors)

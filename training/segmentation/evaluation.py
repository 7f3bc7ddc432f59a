"""Mean IoU, mask AP and panoptic quality of a model that segments, with intervals, and a page of its worst images.

The truth is all that the annotations say, see `Segments`. Mean IoU is that of torchmetrics and mmseg: of all counted
pixels, the mean over the classes that the truth or the model has. Mask AP is pycocotools'. PQ is panopticapi's.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tqdm
from pycocotools import mask as rle

from keras_vit import UserError, preprocessing_of
from keras_vit.cli.pages import render, thumbnail_address
from keras_vit.files.tables import markdown_table, with_interval
from keras_vit.images.preprocessing import to_channels
from keras_vit.models.config import SEGMENT_THRESHOLD, SegmentationTask
from training.data.annotations.masks import (
    MUCH_IGNORED,
    NONE,
    UNCOUNTED,
    RunLengths,
    Segments,
    ignored_pixels,
    ignored_sentence,
    of_task,
)
from training.data.dataset import Split, decoded
from training.evaluation.average_precision import STATS, average_precision, coco_document, write_measured
from training.evaluation.intervals import draws, of_draws
from training.segmentation.segmenter import FoundSegments, Segmenter, class_map

# Okabe and Ito's colors, distinct to any color vision, then lighter ones of the same.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000")
_RGB = np.array([[int(color[place : place + 2], 16) for place in (1, 3, 5)] for color in _COLORS], np.float32)
# Longest side of an image on a page, and the share of a segment's color.
_LONGEST, _SHARE = 480, 0.55
# Draws of the bootstrap over the images.
_DRAWS = 500
_MOST_SHOWN = 12
# Of panopticapi (`evaluation.py`): IoU above which two segments are one, and share of void pixels of a false one.
_MATCH_IOU, _MOST_VOID = 0.5, 0.5
Target = tuple[np.ndarray, np.ndarray]
"""Classes (n,) and map (h, w) of an image, as `of_task` makes them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """The metrics, and how right each image is."""

    segmenter: Segmenter
    split: Split
    metrics: dict[str, Any]
    """Semantic: `mean_iou`, `pixel_accuracy`, `intervals`, `classes` with their IoU. Instance: those of
    `average_precision`. Of panoptic: `pq`, `sq`, `rq`, `threshold`, `intervals`, `classes`. Always `task`, `pictures`
    and `ignored`, the share of the pixels that are not measured."""
    right: np.ndarray
    """(images,) share of the counted pixels whose class is right."""
    ignored: str
    """A sentence on the ignored pixels; "" if there are none."""


def evaluate(segmenter: Segmenter, split: Split) -> Evaluation:
    """Segment the images of a split and compare them with their masks, at their own size.

    Raises UserError if nothing of the masks is counted.
    """
    task = segmenter.kind
    measures: dict[str, Callable] = {"semantic": _semantic, "instance": _instance, "panoptic": _panoptic}
    right, ignored = np.zeros(split.num_examples), np.zeros(3, np.int64)

    def pairs() -> Iterator[tuple[Any, FoundSegments]]:
        for index in tqdm.tqdm(range(split.num_examples), unit="image", disable=None):
            pixels, truth = _read(segmenter, split, index)
            # Average precision is a mean over all thresholds.
            answer = segmenter.segment(pixels, 0.0 if task == "instance" else SEGMENT_THRESHOLD)
            target = of_task(truth, task)
            ignored[:] += ignored_pixels(target[1], task)
            shown = answer.likely(SEGMENT_THRESHOLD) if task == "instance" else answer
            right[index] = _share_right(target, shown, task)
            yield target if task == "semantic" else truth, answer

    metrics = measures[task](pairs(), segmenter.labels)
    if metrics is None:
        raise UserError(f"The evaluation masks have nothing that can be measured for {task}; give others.")
    counts = {"task": task, "pictures": split.num_examples, "ignored": float(ignored[1:].sum() / ignored[0])}
    return Evaluation(segmenter, split, {**counts, **metrics}, right, ignored_sentence(ignored, "evaluation"))


def _share_right(target: Target, answer: FoundSegments, task: SegmentationTask) -> float:
    """Return the share of the counted pixels whose class is right; outside of all objects, instance has none."""
    classes = class_map(target)
    counted = classes != UNCOUNTED if task == "instance" else classes >= 0
    return float(np.mean((classes == class_map(answer))[counted])) if counted.any() else 1.0


def _read(segmenter: Segmenter, split: Split, index: int) -> tuple[np.ndarray, Segments]:
    assert split.truth is not None
    pixels = decoded(split.read(tf.constant(index, tf.int64))[0], preprocessing_of(segmenter.model)).numpy()
    return pixels, split.truth(index)


def _semantic(pairs: Iterator[tuple[Target, FoundSegments]], labels: Sequence[str]) -> dict[str, Any] | None:
    count, rows = len(labels), []
    for target, answer in pairs:
        wanted, got = class_map(target), answer.map
        counted = wanted >= 0
        confusion = np.bincount(wanted[counted] * count + got[counted], minlength=count**2).reshape(count, count)
        rows.append([confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)])
    sums = np.array(rows, np.float64)  # (images, hits and wanted and got, classes)
    if not sums[:, 1].any():
        return None
    measures: dict[str, Callable[[np.ndarray], float]] = {
        "mean_iou": lambda total: float(np.nanmean(_iou(total))),
        "pixel_accuracy": lambda total: float(total[0].sum() / total[1].sum()),
    }
    iou = _iou(sums.sum(axis=0)).tolist()
    classes = {name: {"iou": None if np.isnan(each) else each} for name, each in zip(labels, iou, strict=True)}
    return {**_with_intervals(sums, measures), "classes": classes}


def _iou(total: np.ndarray) -> np.ndarray:
    """Return the IoU (classes,); nan for a class that neither the truth nor the model has."""
    union = total[1] + total[2] - total[0]
    return np.divide(total[0], union, out=np.full(len(union), np.nan), where=union > 0)


def _with_intervals(sums: np.ndarray, measures: dict[str, Callable[[np.ndarray], float]]) -> dict[str, Any]:
    """Return measures of the sum over images (images, ...), and their `intervals` by a bootstrap over them."""
    totals = [np.tensordot(np.bincount(rows, minlength=len(sums)), sums, axes=1) for rows in draws(len(sums), _DRAWS)]
    intervals = {
        name: of_draws([measure(total) for total in totals if total.any()]) for name, measure in measures.items()
    }
    return {**{name: measure(sums.sum(axis=0)) for name, measure in measures.items()}, "intervals": intervals}


def _instance(pairs: Iterator[tuple[Segments, FoundSegments]], labels: Sequence[str]) -> dict[str, Any] | None:
    truths: list[list[dict[str, Any]]] = []
    guesses: list[list[dict[str, Any]]] = []
    for truth, answer in pairs:
        truths.append(_annotations(truth, len(labels)))
        assert answer.masks is not None
        rows = zip(answer.masks, answer.labels.tolist(), answer.scores.tolist(), strict=True)
        guesses.append([mask_annotation(mask, label) | {"score": score} for mask, label, score in rows])
    if all(each["iscrowd"] for own in truths for each in own):
        return None
    return average_precision(coco_document(labels, truths), coco_document(labels, guesses), labels, "segm")


def _annotations(truth: Segments, num_classes: int) -> list[dict[str, Any]]:
    """Return the objects and crowds of an image for pycocotools; pixels marked as ignored are crowds of every class."""
    own = []
    for number in np.flatnonzero(truth.objects).tolist():
        mask = truth.map == number if truth.masks is None else truth.masks[number]
        stated = {"area": float(truth.areas[number]), "iscrowd": int(truth.crowds[number])}
        own.append(mask_annotation(mask, int(truth.labels[number])) | stated)
    ignored = truth.map == UNCOUNTED
    crowds = range(num_classes if ignored.any() else 0)
    return own + [mask_annotation(ignored, label) | {"iscrowd": 1} for label in crowds]


def mask_annotation(mask: np.ndarray | RunLengths, label: int) -> dict[str, Any]:
    """Return a mask (h, w) bool, or its run-length encoding, as an annotation of COCO; the category of class 0 is 1."""
    encoded = rle.encode(np.asfortranarray(mask, np.uint8)) if isinstance(mask, np.ndarray) else mask
    return {"segmentation": encoded, "area": float(rle.area(encoded)), "bbox": list(rle.toBbox(encoded)),
            "category_id": label + 1}  # fmt: skip


def _panoptic(pairs: Iterator[tuple[Segments, FoundSegments]], labels: Sequence[str]) -> dict[str, Any] | None:
    counts = [panoptic_counts(truth, (answer.labels, answer.map), len(labels)) for truth, answer in pairs]
    sums = np.array(counts)  # (images, classes, IoU and true and false positives and false negatives)
    if not sums[..., 1:].any():
        return None
    measures: dict[str, Callable[[np.ndarray], float]] = {
        "pq": lambda total: _quality(total)[0],
        "sq": lambda total: _quality(total)[1],
        "rq": lambda total: _quality(total)[2],
    }
    total = sums.sum(axis=0)
    rows = [total[number : number + 1] for number in range(len(labels))]
    qualities = [_quality(row) if row[0, 1:].any() else (None,) * 3 for row in rows]
    classes = {name: dict(zip(measures, row, strict=True)) for name, row in zip(labels, qualities, strict=True)}
    return {**_with_intervals(sums, measures), "threshold": SEGMENT_THRESHOLD, "classes": classes}


def panoptic_counts(truth: Segments, answer: tuple[np.ndarray, np.ndarray], num_classes: int) -> np.ndarray:
    """Return for each class (K, 4): sum of IoUs, true positives, false positives, false negatives.

    As `pq_compute_single_core` of panopticapi counts them: the area of a true segment is that of the file, a crowd is
    neither matched nor missed, and a false segment counts unless most of it is void or the crowd of its class. Pixels
    of no segment, and those marked as ignored, are void. The answer has classes (n,) and a map (h, w).
    """
    counts = np.zeros((num_classes, 4))
    (labels, got), wanted, areas = answer, truth.map, truth.areas
    listed = ~truth.crowds
    if truth.masks is not None:  # objects that overlap: of each, what is seen on the map
        areas = np.bincount(wanted[wanted >= 0], minlength=len(areas))
        listed = listed & (areas > 0)
    # A pair as one number: 20 times as fast as rows of two.
    pairs, sizes = np.unique((wanted.astype(np.int64) + 2) * (len(labels) + 1) + got + 1, return_counts=True)
    first, second = np.divmod(pairs, len(labels) + 1)
    common = dict(zip(zip((first - 2).tolist(), (second - 1).tolist(), strict=True), sizes.tolist(), strict=True))
    pixels = dict(zip(*(each.tolist() for each in np.unique(got[got >= 0], return_counts=True)), strict=True))
    void = {g: common.get((NONE, g), 0) + common.get((UNCOUNTED, g), 0) for g in pixels}
    matched = [set[int](), set[int]()]
    for (w, g), size in common.items():
        if w < 0 or g < 0 or truth.crowds[w] or truth.labels[w] != labels[g]:
            continue
        union = areas[w] + pixels[g] - size - void[g]
        if union > 0 and size / union > _MATCH_IOU:
            counts[labels[g], :2] += [size / union, 1]
            matched[0].add(w)
            matched[1].add(g)
    for w in set(np.flatnonzero(listed).tolist()) - matched[0]:
        counts[truth.labels[w], 3] += 1
    crowds = {int(truth.labels[w]): w for w in np.flatnonzero(truth.crowds).tolist()}  # of a class, the last
    for g in pixels.keys() - matched[1]:
        ignored = void[g] + common.get((crowds.get(int(labels[g])), g), 0)
        if ignored / pixels[g] <= _MOST_VOID:
            counts[labels[g], 2] += 1
    return counts


def _quality(total: np.ndarray) -> tuple[float, float, float]:
    """Return PQ, SQ and RQ, means over the classes (K, 4) that are there."""
    total = total[total[:, 1:].sum(axis=1) > 0]
    iou, right, false, missed = total.T
    weight = right + (false + missed) / 2
    sq = np.divide(iou, right, out=np.zeros_like(iou), where=right > 0)
    return float(np.mean(iou / weight)), float(np.mean(sq)), float(np.mean(right / weight))


_MAIN = {"semantic": ("mean_iou", "pixel_accuracy"), "instance": ("ap", "ap50"), "panoptic": ("pq", "sq", "rq")}
_WORDS = {"mean_iou": "mean IoU", "pixel_accuracy": "pixel accuracy", "ap": "mask AP", "ap50": "AP50"}


def write_report(evaluation: Evaluation, output: pathlib.Path) -> None:
    """Write segmentation.json, segmentation.md and segmentation.html, the page of the worst images."""
    metrics, kind = evaluation.metrics, evaluation.segmenter.kind
    intervals = [(name, with_interval(metrics[name], metrics["intervals"].get(name))) for name in _MAIN[kind]]
    values = ", ".join(f"{_WORDS.get(name, name.upper())} {interval}" for name, interval in intervals)
    sentence = f"{values[0].upper()}{values[1:]} on {metrics['pictures']:,} evaluation images."
    if kind == "instance":
        sentence += f" AP is a mean over all scores; predict writes those from {SEGMENT_THRESHOLD} on."
    if kind == "panoptic":
        sentence += f" Segments have a score above {SEGMENT_THRESHOLD}, as those that predict writes."
    parts = [evaluation.ignored, sentence] if metrics["ignored"] > MUCH_IGNORED else [sentence, evaluation.ignored]
    columns = {"semantic": ("iou",), "instance": ("objects", "ap", "ap50"), "panoptic": ("pq", "sq", "rq")}[kind]
    rows = [(name, *(with_interval(row[column]) for column in columns)) for name, row in metrics["classes"].items()]
    text = [" ".join(filter(None, parts)), "Intervals hold 95% of random draws of the images."]
    if kind == "instance":
        sizes = [(name.replace("_", " "), with_interval(metrics[name])) for name in STATS]
        text.append(markdown_table(("metric", "value"), sizes, num_text_columns=1))
    text.append(markdown_table(("class", *columns), rows, num_text_columns=1))
    write_measured(output, "segmentation", evaluation.segmenter.name, metrics, text, _page(evaluation))


def _page(evaluation: Evaluation) -> str:
    segmenter, cards = evaluation.segmenter, []
    for index in np.argsort(evaluation.right, kind="stable")[:_MOST_SHOWN].tolist():
        pixels, truth = _read(segmenter, evaluation.split, index)
        classes, segments = of_task(truth, segmenter.kind)
        name = f"{evaluation.split.name(index)}: {evaluation.right[index]:.0%} of the pixels have the right class"
        answer = segmenter.segment(pixels)
        truth_panel = panel_of("truth", pixels, (classes, segments), segmenter)
        cards.append((name, pixels, [truth_panel, panel_of("found", pixels, (answer.labels, answer.map), segmenter)]))
    words = f"{evaluation.ignored} Images with the most pixels of a wrong class come first."
    return segments_page("Worst images", cards, words.strip())


def panel_of(title: str, pixels: np.ndarray, target: Target, segmenter: Segmenter) -> dict[str, Any]:
    """Return an image with segments for a page: in the color of the class, of instance each in its own."""
    classes, segments = target
    colors = np.arange(len(classes)) if segmenter.kind == "instance" else classes
    numbers, counts = np.unique(segments[segments >= 0], return_counts=True)
    largest_first = numbers[np.argsort(-counts, kind="stable")]
    names = [(segmenter.labels[classes[n]] if classes[n] >= 0 else "", _hex(colors[n])) for n in largest_first]
    return _figure(title, overlay(pixels, segments, colors), names)


def overlay(pixels: np.ndarray, segments: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """Return an image (h, w, C) with its segments in color and with white outlines: (h, w, 3) uint8.

    A segment is gray below its color, so that the color is that of the list beside the image.
    """
    rgb, gray = (np.asarray(to_channels(pixels, channels, "white"), np.float32) for channels in (3, 1))
    inside = segments >= 0
    table = color_of(np.append(colors, 0))
    mixed = np.where(inside[..., None], (1 - _SHARE) * gray + _SHARE * table[np.where(inside, segments, -1)], rgb)
    edges = np.zeros(segments.shape, bool)
    edges[:, 1:] |= segments[:, 1:] != segments[:, :-1]
    edges[1:] |= segments[1:] != segments[:-1]
    mixed[edges] = 255.0
    return np.clip(np.round(mixed), 0, 255).astype(np.uint8)


def color_of(numbers: np.ndarray) -> np.ndarray:
    """Return the colors (n, 3), 0..255, of numbers from 0 on; from the ninth on lighter."""
    numbers = np.asarray(numbers, np.int64)
    lighter = np.minimum(numbers // len(_COLORS), 3)[:, None] * 0.22
    return _RGB[numbers % len(_COLORS)] * (1 - lighter) + 255.0 * lighter


def segments_page(title: str, cards: Sequence[tuple[str, np.ndarray, Sequence[dict]]], words: str = "") -> str:
    """Return HTML text of a page: for each image its name, pixels (h, w, C) and panels, see `panel_of`."""
    shown = [{"name": name, "figures": [_figure("image", pixels), *panels]} for name, pixels, panels in cards]
    return render("segments", title=title, words=words, cards=shown)


def _figure(title: str, pixels: np.ndarray, segments: list[tuple[str, str]] | None = None) -> dict[str, Any]:
    return {"title": title, "address": thumbnail_address(pixels, _LONGEST), "segments": segments}


def _hex(number: int) -> str:
    return "#" + "".join(f"{round(float(value)):02x}" for value in color_of(np.array([number]))[0])

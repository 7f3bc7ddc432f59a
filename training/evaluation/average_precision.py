"""COCO's average precision of boxes and of masks, by pycocotools, with intervals."""

import contextlib
import copy
import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name
from training.evaluation.intervals import draws, of_draws

_DRAWS = 200  # of the bootstrap over the images
# Names in the report -> what `COCOeval.stats` has at this place.
STATS = {"ap": 0, "ap50": 1, "ap75": 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar": 8}
_IOUS = {"ap": slice(None), "ap50": slice(0, 1)}  # of the ten thresholds of IoU, which a metric is the mean over


def write_measured(
    output: pathlib.Path, name: str, model: str, metrics: dict[str, Any], paragraphs: Sequence[str], page: str
) -> None:
    """Write NAME.json, NAME.md and NAME.html, the page of the worst mistakes, and print the first paragraph.

    paragraphs: sentences and tables behind the title, which names the model.
    """
    with staged(output) as stage:
        (stage / f"{name}.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        text = "\n\n".join([f"# {name.capitalize()}: {short_name(model)}", *paragraphs])
        (stage / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")
        (stage / f"{name}.html").write_text(page, encoding="utf-8")
    files = f"report in {output / f'{name}.md'}, worst images in {output / f'{name}.html'}"
    print(f"{paragraphs[0].rstrip('.')}; {files}.")


def average_precision(
    truth: Mapping[str, Any], guesses: Mapping[str, Any], labels: Sequence[str], kind: Literal["bbox", "segm"]
) -> dict[str, Any]:
    """Return COCO's metrics: `STATS`, each None without such objects, `intervals` of ap and ap50, and `classes`.

    Intervals are of 95%, by a bootstrap over the images. Truth and guesses are documents in COCO's format, see
    `coco_document`; the guesses have scores. The labels name the categories 1, 2 and so on.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        evaluated = coco_evaluation(truth, guesses, kind)
        evaluated.accumulate()
        evaluated.summarize()
        stats, precision = evaluated.stats, evaluated.eval["precision"]
        drawn = _bootstrap(evaluated)
    metrics: dict[str, Any] = {name: None if stats[place] < 0 else float(stats[place]) for name, place in STATS.items()}
    metrics["intervals"] = {name: _interval(drawn, slice(None), ious) for name, ious in _IOUS.items()}
    objects = [each["category_id"] for each in truth["annotations"] if not each["iscrowd"]]
    counts = np.bincount(np.array(objects, np.int64), minlength=len(labels) + 1)[1:]
    metrics["classes"] = {
        label: {
            "objects": int(counts[number]),
            **{name: _mean(precision[ious, :, number, 0, -1]) for name, ious in _IOUS.items()},
            "interval": _interval(drawn, slice(number, number + 1), slice(None)),
        }
        for number, label in enumerate(labels)
    }
    return metrics | {"pictures": len(truth["images"]), "objects": int(counts.sum())}


def coco_document(labels: Sequence[str], per_image: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return a document in COCO's format of the annotations of each image, which get their ids; ids begin at 1."""
    annotations = [{"iscrowd": 0, **each, "image_id": image} for image, own in enumerate(per_image, 1) for each in own]
    images: list[dict[str, Any]] = [{"id": image} for image, _ in enumerate(per_image, 1)]
    for image, own in zip(images, per_image, strict=True):
        if own and "segmentation" in own[0]:  # a run-length encoding
            image |= dict(zip(("height", "width"), own[0]["segmentation"]["size"], strict=True))
    return {
        "images": images,
        "annotations": [each | {"id": number} for number, each in enumerate(annotations, 1)],
        "categories": [{"id": number, "name": name} for number, name in enumerate(labels, 1)],
    }


class _Evaluation(COCOeval):
    """pycocotools' evaluation, for which a VOC object with "difficult" is a crowd with the overlap of an object."""

    def computeIoU(self, imgId: int, catId: int) -> Any:  # noqa: N802, N803
        """Return the overlaps of the detections with the objects of an image."""
        difficult = [each for each in self._gts[imgId, catId] if each.get("difficult")]
        for each in difficult:
            each["iscrowd"] = 0
        overlaps = super().computeIoU(imgId, catId)
        for each in difficult:
            each["iscrowd"] = 1
        return overlaps


def coco_evaluation(truth: Mapping[str, Any], guesses: Mapping[str, Any], kind: Literal["bbox", "segm"]) -> COCOeval:
    """Compare two documents in COCO's format. pycocotools prints its progress.

    In the truth, an annotation with `difficult` and `iscrowd` counts neither as found nor as missed, as in VOC.
    """
    both = COCO(), COCO()
    for coco, dataset in zip(both, (truth, guesses), strict=True):
        coco.dataset = dataset
        coco.createIndex()
    evaluated = _Evaluation(*both, kind)
    evaluated.evaluate()
    return evaluated


def _bootstrap(evaluated: COCOeval) -> list[np.ndarray]:
    """Return the precision (T IoUs, R, K) of random draws of the images, at all sizes and 100 objects."""
    parameters = copy.copy(evaluated.params)
    parameters.areaRng, parameters.maxDets = parameters.areaRng[:1], parameters.maxDets[-1:]
    count, drawn = len(parameters.imgIds), copy.copy(evaluated)
    of_class = np.arange(len(evaluated.evalImgs)).reshape(len(parameters.catIds), -1, count)[:, 0]
    precisions = []
    for rows in draws(count, _DRAWS):
        chosen = of_class[:, rows]
        # As for a first size alone: the others are skipped by their place.
        drawn.evalImgs, drawn.eval = list(evaluated.evalImgs), {}
        for place, source in zip(of_class.flat, chosen.flat, strict=True):
            drawn.evalImgs[place] = evaluated.evalImgs[source]
        drawn.accumulate(parameters)
        precisions.append(drawn.eval["precision"][..., 0, -1])
    return precisions


def _mean(precision: np.ndarray) -> float | None:
    """Return the mean of what is known, -1 being unknown."""
    known = precision[precision > -1]
    return float(known.mean()) if known.size else None


def _interval(drawn: Sequence[np.ndarray], classes: slice, ious: slice) -> list[float] | None:
    return of_draws([_mean(precision[ious, :, classes]) for precision in drawn])

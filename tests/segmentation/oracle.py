"""A segmenter that answers with given segments, and splits whose images tell it which."""

import contextlib
import dataclasses
import io
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import keras_vit
from keras_vit import SegmentationConfig
from training.data.annotations.masks import Segments
from training.data.dataset import Split
from training.segmentation.segmenter import FoundSegments, Segmenter


@dataclasses.dataclass(frozen=True, eq=False)
class Oracle(Segmenter):
    """Answers with the segments of the image whose number is its first pixel."""

    answers: Sequence[FoundSegments] = ()

    def segment(self, pixels, threshold=0.0):
        answer = self.answers[int(pixels[0, 0, 0])]
        return answer.likely(threshold) if self.kind == "instance" else answer


def oracle(kind: str, answers: Sequence[FoundSegments], labels=("a", "b"), stuff=()) -> Oracle:
    """An oracle of a task."""
    config = keras_vit.ViTConfig(patch_size=4, hidden_size=8, num_layers=1, num_heads=1, mlp_dim=8)
    task = SegmentationConfig(len(labels), 2, 1, task=kind, stuff=stuff)
    model = keras_vit.segmentation_model(config, task, image_size=8)
    return Oracle("oracle", model, tuple(labels), task, tuple(answers))


def found_of(labels, segments, scores=None, masks=None) -> FoundSegments:
    """Segments of a map, or of masks that overlap."""
    labels = np.array(labels, np.int32)
    masks = np.array([segments == number for number in range(len(labels))] if masks is None else masks)
    return FoundSegments(labels, np.ones(len(labels)) if scores is None else np.array(scores), masks, segments)


def segments_of(labels, numbers, *, objects=None, crowds=None) -> Segments:
    """The segments of a map (h, w), by default objects."""
    count = len(labels)
    areas = np.bincount(numbers[numbers >= 0], minlength=count).astype(np.float64)
    objects = np.ones(count, bool) if objects is None else np.array(objects, bool)
    crowds = np.zeros(count, bool) if crowds is None else np.array(crowds, bool)
    return Segments(np.array(labels, np.int32), objects, crowds, areas, np.asarray(numbers, np.int32))


def measured_by_pycocotools(file: pathlib.Path, results: list[dict], kind: str) -> COCOeval:
    """Evaluate the results for a file in COCO's format."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(file))
        evaluated = COCOeval(coco, coco.loadRes(results), kind)
        evaluated.evaluate()
        evaluated.accumulate()
        evaluated.summarize()
    return evaluated


def split_of(truths: Sequence[Segments]) -> Split:
    """Images of these segments."""
    images = [np.full((*truth.map.shape, 3), number, np.uint8) for number, truth in enumerate(truths)]
    return Split(
        len(truths), lambda index: (tf.constant(images[int(index)]), tf.constant(-1)), truth=lambda index: truths[index]
    )

"""A model that segments, opened: what it sees on images of any size."""

import dataclasses
import math
from collections.abc import Sequence

import keras
import numpy as np

from keras_vit import UserError, preprocessing_of, task_of
from keras_vit.models.config import SEGMENT_THRESHOLD, LinearSegmentationConfig, SegmentationConfig, SegmentationTask
from keras_vit.models.segmentation import segment_outputs
from keras_vit.run import Run
from training.data.annotations.masks import NONE, UNCOUNTED

# Objects of an image at most, as in COCO. Values of the maps that are made of them at a time.
_TOP, _MOST_VALUES = 100, 2**24


@dataclasses.dataclass(frozen=True, eq=False)
class FoundSegments:
    """The segments of an image (h, w)."""

    labels: np.ndarray
    """(n,) int32: the class of each."""
    scores: np.ndarray
    """(n,) in [0, 1]; 1 for classes of pixels."""
    masks: np.ndarray | None
    """(n, h, w) bool, which may overlap, of instance; else None."""
    map: np.ndarray
    """(h, w) int32: the number of the segment of each pixel, NONE for none; of instance the most likely."""

    def likely(self, threshold: float) -> "FoundSegments":
        """Those of instance from a score on; they are sorted by it."""
        count = int(np.count_nonzero(self.scores >= threshold))
        masks, numbers = None if self.masks is None else self.masks[:count], np.where(self.map < count, self.map, NONE)
        return FoundSegments(self.labels[:count], self.scores[:count], masks, numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Segmenter:
    """A model that segments."""

    name: str
    model: keras.Model
    labels: tuple[str, ...]
    task: SegmentationConfig | LinearSegmentationConfig

    @property
    def kind(self) -> SegmentationTask:
        """The task that it solves."""
        return self.task.task if isinstance(self.task, SegmentationConfig) else "semantic"

    def segment(self, pixels: np.ndarray, threshold: float = SEGMENT_THRESHOLD) -> FoundSegments:
        """Return the segments of an image (h, w, C) uint8, upright, whose score is above the threshold."""
        preprocessing, size = preprocessing_of(self.model), tuple(pixels.shape[:2])
        outputs = self.model.predict_on_batch(keras.ops.convert_to_numpy(preprocessing(pixels))[None])
        if self.kind != "semantic":
            outputs = _likely(outputs, threshold, nothing=self.kind == "panoptic")
        # Objects do not depend on each other, and the maps of all of a large image would take tens of gigabytes.
        parts = _parts(outputs, max(_MOST_VALUES // math.prod(size), 1)) if self.kind == "instance" else [outputs]
        answers = [segment_outputs(part, self.task, preprocessing, size, threshold=threshold) for part in parts]
        arrays = {
            name: np.concatenate([keras.ops.convert_to_numpy(answer[name])[0] for answer in answers])
            for name in answers[0]
        }
        if self.kind == "semantic":
            count = len(self.labels)
            return FoundSegments(np.arange(count, dtype=np.int32), np.ones(count), None, arrays["label_map"])
        if self.kind == "panoptic":
            numbers, places = np.unique(arrays["segment_map"], return_inverse=True)
            kept = numbers[numbers >= 0]
            renumbered = np.where(numbers >= 0, np.cumsum(numbers >= 0) - 1, NONE)[places].astype(np.int32)
            return FoundSegments(arrays["classes"][kept], arrays["scores"][kept], None, renumbered.reshape(size))
        order = np.argsort(-arrays["scores"], kind="stable")
        chosen = [n for n in order if arrays["masks"][n].any() and arrays["scores"][n] >= threshold][:_TOP]
        segments = np.full(size, NONE, np.int32)
        for place, number in reversed(list(enumerate(chosen))):
            segments[arrays["masks"][number]] = place
        return FoundSegments(arrays["classes"][chosen], arrays["scores"][chosen], arrays["masks"][chosen], segments)


def _parts(outputs: dict[str, np.ndarray], most: int) -> list[dict[str, np.ndarray]]:
    """Return the outputs of so many queries at a time."""
    logits, masks = outputs["class_logits"], outputs["mask_logits"]
    return [
        {"class_logits": logits[:, begin : begin + most], "mask_logits": masks[..., begin : begin + most]}
        for begin in range(0, logits.shape[1], most)
    ]


def _likely(outputs: dict[str, np.ndarray], threshold: float, *, nothing: bool) -> dict[str, np.ndarray]:
    """The outputs of the queries that may reach the threshold, for the masks of all of a large image are large."""
    logits = outputs["class_logits"][0]
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    best = probabilities[:, :-1].max(axis=-1)
    kept = best >= threshold
    if nothing:
        kept &= best > probabilities[:, -1]
    kept = np.flatnonzero(kept) if kept.any() else np.array([best.argmax()])
    return {"class_logits": outputs["class_logits"][:, kept], "mask_logits": outputs["mask_logits"][..., kept]}


def open_segmenter(run: Run, task: SegmentationTask | None = None) -> Segmenter:
    """Load the model of a run. Raises UserError if it does not segment, or not for this task.

    task: instead of that of the model.
    """
    own = task_of(run.model)
    if not isinstance(own, SegmentationConfig | LinearSegmentationConfig):
        raise UserError(f"{run.name} does not segment images; train a model that does with keras-vit segment fit.")
    if isinstance(own, SegmentationConfig) and task is not None:
        own = dataclasses.replace(own, task=task)
    elif task not in (None, "semantic"):
        raise UserError(f"{run.name} has a linear head, which tells classes of pixels alone; leave --task {task} out.")
    labels, model = run.labels_of(own.num_classes), run.model
    if preprocessing_of(model).resize not in ("stretch", "pad"):
        from training.loop.build import rebuilt

        # Whole images, where the original divides them into windows.
        whole = preprocessing_of(model).with_resize("pad", None, background="black")
        model = rebuilt(model, dataclasses.replace(whole, padding="after"))
    return Segmenter(run.name, model, labels, own)


def class_map(answer: FoundSegments | tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return the class of each pixel (h, w) int32: NONE where there is no segment, and UNCOUNTED stays."""
    labels, numbers = (answer.labels, answer.map) if isinstance(answer, FoundSegments) else answer
    return np.append(labels, [UNCOUNTED, NONE]).astype(np.int32)[numbers]


def names_of(labels: Sequence[str], answer: FoundSegments) -> list[tuple[str, float]]:
    """Return the name and score of each segment that is seen on the map, the largest first."""
    numbers, counts = np.unique(answer.map[answer.map >= 0], return_counts=True)
    order = numbers[np.argsort(-counts, kind="stable")]
    return [(labels[answer.labels[number]], float(answer.scores[number])) for number in order]

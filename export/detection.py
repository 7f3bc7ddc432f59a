"""Detectors, as their exports write and verify them."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import keras
import numpy as np

from export.options import SourceOptions
from export.source import open_with_classes
from export.tasks import Measures, Outputs, Task, largest_difference
from keras_vit import UserError
from keras_vit.errors import ParityError
from keras_vit.models.boxes import overlaps, to_corners
from keras_vit.models.config import DetectionConfig
from keras_vit.models.tasks import task_of
from keras_vit.runs import Run

# Of each image the likeliest patches, whose boxes a file of lower precision must keep: how many, what share of them,
# and with which overlap (IoU).
_LIKELIEST, _LEAST_AGREEMENT, _SAME_BOX = 20, 0.9, 0.9


@dataclasses.dataclass(frozen=True)
class Detection(Task):
    """A detector with classes.

    Output: detections (B, N, 4 + K) float32. Columns 0 to 3 are centre x and y, width and height of a box as shares of
    the input, the others the logits of the K classes, each of which is a probability by its sigmoid.
    """

    noun = "detector"
    all_tokens = True
    columns: ClassVar = {"max_abs_diff": "largest difference", "agreement": "equal boxes"}

    def network(self, model: keras.Model) -> keras.Model:
        parts = [model.output["boxes"], model.output["class_logits"]]
        joined = keras.layers.Concatenate(dtype="float32", name="detections")(parts)
        return keras.Model(model.input, {"detections": joined}, name=model.name)

    def measure(self, artifact: str, expected: Sequence[Outputs], found: Sequence[Outputs], *, exact: bool) -> Measures:
        difference = largest_difference(artifact, expected, found, "detections", exact=exact)
        share = float(
            np.mean(
                [agreement_of_boxes(a["detections"], b["detections"]) for a, b in zip(expected, found, strict=True)]
            )
        )
        if not share >= _LEAST_AGREEMENT:
            raise ParityError(
                f"The {artifact} keeps {share:.0%} of the likeliest boxes of the model, fewer than "
                f"{_LEAST_AGREEMENT:.0%}, so it was not kept."
            )
        return {"max_abs_diff": difference, "agreement": share}

    def sentence(self, measures: Measures) -> str:
        return f"boxes and logits within {measures['max_abs_diff']:.2g} of the Keras model"


def open_detection(run: Run, options: SourceOptions) -> Detection | None:
    """The detector of a run; None if its model is none. Raises UserError if it has no classes."""
    if not (isinstance(run.model.output, dict) and isinstance(task_of(run.model), DetectionConfig)):
        return None
    if "class_logits" not in run.model.output:
        raise UserError(
            f"{run.name} has no classes of its own; give it some by keras-vit detect predict --classes … "
            "--save DIR, and export that directory."
        )
    return Detection(open_with_classes(run, options, run.model.output["class_logits"].shape[-1]))


def agreement_of_boxes(expected: np.ndarray, found: np.ndarray) -> float:
    """Share of the 20 likeliest patches of an image with the same class and a box that overlaps by 0.9 or more.

    Detections (N, 4 + K) of the Keras model and of a file.
    """
    likeliest = np.argsort(-expected[:, 4:].max(axis=-1))[:_LIKELIEST]
    ours, theirs = expected[likeliest], found[likeliest]
    ious, _ = overlaps(to_corners(ours[:, :4]), to_corners(theirs[:, :4]))
    same = ours[:, 4:].argmax(axis=-1) == theirs[:, 4:].argmax(axis=-1)
    return float(np.mean(same & (np.asarray(ious) >= _SAME_BOX)))

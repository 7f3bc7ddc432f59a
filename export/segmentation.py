"""Models that segment, as their exports write and verify them."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import keras
import numpy as np

from export import parity
from export.options import SourceOptions
from export.source import open_with_classes
from export.tasks import Measures, Outputs, Task
from keras_vit import Preprocessing, preprocessing_of
from keras_vit.errors import ParityError
from keras_vit.models.config import LinearSegmentationConfig, SegmentationConfig, TaskConfig
from keras_vit.models.segment_outputs import segment_outputs
from keras_vit.models.tasks import task_of
from keras_vit.runs import Run

# Share of pixels that must be equal: rounding moves edges by a few, lower precision by more.
_LEAST_EQUAL, _LEAST_ROUNDED = 0.999, 0.9
# A score is a probability, of instance times the mean over a mask, whose edge may move by a pixel.
_ROUNDED_SCORE = 1e-3


class SegmentOutputs(keras.layers.Layer):
    """`segment_outputs` of a model's outputs at the size of its input."""

    def __init__(self, task: TaskConfig | None, preprocessing: Preprocessing, **kwargs):
        super().__init__(dtype="float32", **kwargs)
        self.task, self.preprocessing = task, preprocessing

    def call(self, outputs):
        outputs = segment_outputs(outputs, self.task, self.preprocessing)
        if "masks" in outputs:  # some formats have no Boolean outputs
            outputs["masks"] = keras.ops.cast(outputs["masks"], "int32")
        return outputs


@dataclasses.dataclass(frozen=True)
class Segmentation(Task):
    """A model that segments. Outputs: those of `segment_outputs` at the size of its input."""

    noun = "segmentation"
    all_tokens = True
    columns: ClassVar = {"equal_pixels": "equal pixels", "score_difference": "largest difference of a score"}

    def network(self, model: keras.Model) -> keras.Model:
        outputs = SegmentOutputs(task_of(model), preprocessing_of(model), name="segments")(model.output)
        return keras.Model(model.input, outputs, name=model.name)

    def measure(self, artifact: str, expected: Sequence[Outputs], found: Sequence[Outputs], *, exact: bool) -> Measures:
        share = float(np.mean([equal_pixels(*pair) for pair in zip(expected, found, strict=True)]))
        least = _LEAST_EQUAL if exact else _LEAST_ROUNDED
        if not share >= least:
            raise ParityError(
                f"{share:.1%} of the pixels of the {artifact} are those of the model, fewer than {least:.1%}, so it "
                "was not kept."
            )
        pairs = [(a["scores"], b["scores"]) for a, b in zip(expected, found, strict=True) if "scores" in a]
        difference = max((float(np.abs(a - b).max()) for a, b in pairs), default=0.0)
        if exact:
            parity.require_close(f"scores of the {artifact}", difference, _ROUNDED_SCORE)
        return {"equal_pixels": share, "score_difference": difference}

    def sentence(self, measures: Measures) -> str:
        return f"{measures['equal_pixels']:.2%} of the pixels are those of the Keras model"


def open_segmentation(run: Run, options: SourceOptions) -> Segmentation | None:
    """The model of a run that segments; None if its model does not."""
    task = task_of(run.model)
    if not isinstance(task, SegmentationConfig | LinearSegmentationConfig):
        return None
    return Segmentation(open_with_classes(run, options, task.num_classes))


def equal_pixels(expected: Outputs, found: Outputs) -> float:
    """Share of the pixels of an image with the same class; of masks, of the pixels that are in one.

    The latter leaves out what is in neither mask, most of a picture, which would hide small masks that differ.
    """
    if "label_map" in expected:
        return float(np.mean(expected["label_map"] == found["label_map"]))
    if "masks" in expected:
        ours, theirs = expected["masks"].astype(bool), found["masks"].astype(bool)
        return 1.0 - float((ours != theirs).sum() / max((ours | theirs).sum(), 1))
    ours, theirs = (np.append(each["classes"], -1)[each["segment_map"].astype(int)] for each in (expected, found))
    return float(np.mean(ours == theirs))

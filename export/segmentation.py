"""What the exports of models that segment share: their outputs, and how these are compared with the Keras model."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from export import parity
from export.inference_model import in_dtype
from export.options import SourceOptions
from export.source import ExportedModel, Provenance, random_images, read_folder
from keras_vit import UserError, preprocessing_of
from keras_vit.errors import ParityError
from keras_vit.files.labels import LABELS, read_labels
from keras_vit.files.tables import short_name
from keras_vit.models.config import LinearSegmentationConfig, SegmentationConfig
from keras_vit.models.segment_outputs import segment_outputs
from keras_vit.models.tasks import task_of
from keras_vit.run_directory import SAMPLES
from keras_vit.runs import Run

# Share of pixels that must be equal: rounding moves edges by a few, lower precision by more.
_LEAST_EQUAL, _LEAST_ROUNDED = 0.999, 0.9
Outputs = Mapping[str, np.ndarray]


def is_segmenter(run: Run) -> bool:
    """Whether the model of a run segments."""
    return isinstance(task_of(run.model), SegmentationConfig | LinearSegmentationConfig)


def open_segmenter(run: Run, options: SourceOptions) -> ExportedModel:
    """A model that segments with its labels and images to verify its export on."""
    count = task_of(run.model).num_classes  # type: ignore[union-attr]
    file = options.labels or run.file(LABELS)
    labels = read_labels(file) if file else tuple(map(str, range(count)))
    if len(labels) != count:
        raise UserError(f"The model has {count} classes, but {file} names {len(labels)}; name each class once.")
    if options.run is not None and run.file(SAMPLES):
        samples, seen = run.samples, "evaluation images of the run"
    elif options.images is not None:
        samples, seen = read_folder(options.images, ()), f"images of {options.images}"
    else:
        samples, seen = random_images(run.preprocessing), "random images"
    samples = dataclasses.replace(samples, labels=np.full(len(samples.encoded), -1))
    terms = options.license or run.license
    return ExportedModel(
        run.model, labels, samples, Provenance(run.name, seen, weights=short_name(run.name), license=terms)
    )


class SegmentOutputs(keras.layers.Layer):
    """`segment_outputs` of a model's outputs at the size of its input."""

    def __init__(self, model: keras.Model, **kwargs):
        super().__init__(dtype="float32", **kwargs)
        self._task, self._preprocessing = task_of(model), preprocessing_of(model)

    def call(self, outputs):
        return segment_outputs(outputs, self._task, self._preprocessing)


def segments_model(model: keras.Model) -> keras.Model:
    """The model up to its segments at the size of its input: images (B, H, W, C) -> see `segment_outputs`.

    "masks" are int32, for some formats have no Boolean outputs.
    """
    outputs = SegmentOutputs(model, name="segments")(model.output)
    if "masks" in outputs:
        outputs["masks"] = keras.ops.cast(outputs["masks"], "int32")
    return keras.Model(model.input, outputs, name=model.name)


@dataclasses.dataclass(frozen=True)
class SegmentReference:
    """Sample images and what the Keras model sees on them."""

    inputs: parity.Reference
    """Its logits are of no use."""
    outputs: Sequence[Outputs]
    """Of each image, at the size of the model's input."""

    def images(self) -> Iterator[np.ndarray]:
        """The input of each image (1, h, w, C)."""
        for _, images in self.inputs.batches():
            yield from (image[None] for image in images)


def reference_of(exported: ExportedModel) -> SegmentReference:
    """The segments of the sample images by the Keras model in float32."""
    model, preprocessing = segments_model(in_dtype(exported.model, "float32")), preprocessing_of(exported.model)
    inputs = parity.Reference(exported.samples, preprocessing, np.zeros(0))
    reference = SegmentReference(inputs, [])
    found = [{name: value[0] for name, value in model.predict_on_batch(image).items()} for image in reference.images()]
    return dataclasses.replace(reference, outputs=found)


def equal_pixels(expected: Outputs, found: Outputs) -> float:
    """Share of the pixels of an image with the same class; of masks, the share of equal pixels of all of them."""
    if "label_map" in expected:
        return float(np.mean(expected["label_map"] == found["label_map"]))
    if "masks" in expected:
        return float(np.mean(expected["masks"].astype(bool) == found["masks"].astype(bool)))
    ours, theirs = (np.append(each["classes"], -1)[each["segment_map"]] for each in (expected, found))
    return float(np.mean(ours == theirs))


def compared(name: str, expected: Sequence[Outputs], found: Sequence[Outputs], *, exact: bool) -> dict[str, float]:
    """The share of equal pixels over all images, and the largest difference of a score.

    Raises ParityError if the pixels differ by more than rounding, or with exact False by more than a tenth.

    name: of the artifact.
    """
    share = float(np.mean([equal_pixels(*pair) for pair in zip(expected, found, strict=True)]))
    least = _LEAST_EQUAL if exact else _LEAST_ROUNDED
    if not share >= least:
        raise ParityError(
            f"{share:.1%} of the pixels of the {name} are those of the model, fewer than {least:.1%}, so it was not "
            "kept."
        )
    pairs = [(a["scores"], b["scores"]) for a, b in zip(expected, found, strict=True) if "scores" in a]
    return {"equal_pixels": share, "score_difference": max((float(np.abs(a - b).max()) for a, b in pairs), default=0.0)}


def facts_of(origin: Provenance, artifact: str, files: Mapping[str, Mapping[str, Any]]) -> dict:
    """The content of report.json. files: by name, with the numbers that were measured."""
    known = {key: value for key, value in origin.as_json().items() if key in ("model", "weights", "license")}
    return {"artifact": artifact, **known, "images_from": origin.images, "files": files, "operators": {}}


def table_of(files: Mapping[str, Mapping[str, Any]]) -> tuple[str, Sequence[str], Sequence[Sequence[object]]]:
    """The table of report.md."""
    rows = [
        (name, f"{row['equal_pixels']:.4f}", f"{row['score_difference']:.3g}", f"{row['bytes']:,}")
        for name, row in files.items()
    ]
    return "Differences from the Keras model", ("file", "equal pixels", "largest difference of a score", "bytes"), rows

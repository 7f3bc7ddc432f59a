"""What the exports of detectors share: the form of their output, and how they are compared with the Keras model."""

import dataclasses
from collections.abc import Mapping, Sequence
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
from keras_vit.models.boxes import overlaps, to_corners
from keras_vit.models.config import DetectionConfig
from keras_vit.models.tasks import task_of
from keras_vit.run_directory import SAMPLES
from keras_vit.runs import Run

# Of each image the likeliest patches, whose boxes a file of lower precision must keep: how many, what share of them,
# and with which overlap (IoU).
_LIKELIEST, _LEAST_AGREEMENT, _SAME_BOX = 20, 0.9, 0.9


def is_detector(run: Run) -> bool:
    """Whether the model of a run predicts boxes."""
    return isinstance(run.model.output, dict) and isinstance(task_of(run.model), DetectionConfig)


def open_detector(run: Run, options: SourceOptions) -> ExportedModel:
    """A detector with its labels and images to verify its export on. Raises UserError if it has no classes."""
    if "class_logits" not in run.model.output:
        raise UserError(
            f"{run.name} has no classes of its own; give it some by keras-vit detect predict --classes … "
            "--save DIR, and export that directory."
        )
    count = run.model.output["class_logits"].shape[-1]
    file = options.labels or run.file(LABELS)
    labels = read_labels(file) if file else tuple(map(str, range(count)))
    if len(labels) != count:
        raise UserError(f"The detector has {count} classes, but {file} names {len(labels)}; name each class once.")
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


def detections_model(model: keras.Model) -> keras.Model:
    """The model with one output: images (B, h, w, C) -> (B, N, 4 + K) float32.

    Columns 0 to 3 are centre x and y, width and height of a box as shares of the input, the others the logits of the K
    classes, each of which is a probability by its sigmoid.
    """
    parts = [model.output["boxes"], model.output["class_logits"]]
    return keras.Model(
        model.input, keras.layers.Concatenate(dtype="float32", name="detections")(parts), name=model.name
    )


def reference_of(exported: ExportedModel) -> parity.Reference:
    """The detections (n, N, 4 + K) of the sample images by the Keras model, as `Reference.logits`."""
    model = detections_model(in_dtype(exported.model, "float32"))
    return parity.reference(model, preprocessing_of(exported.model), exported.samples)


def require_equal(name: str, expected: parity.Reference, found: np.ndarray) -> float:
    """The largest difference of detections (n, N, 4 + K). Raises ParityError if it is more than rounding.

    name: of the artifact.
    """
    difference = float(np.abs(found - expected.logits).max())
    if not difference <= expected.tolerance:
        raise ParityError(
            f"The boxes and logits of the {name} differ from the model's by up to {difference:.3g}, more than "
            f"{expected.tolerance:.3g}, so it was not kept."
        )
    return difference


def agreement(expected: np.ndarray, found: np.ndarray) -> float:
    """Share of the 20 likeliest patches of each image with the same class and a box that overlaps by 0.9 or more."""
    likeliest = np.argsort(-expected[..., 4:].max(axis=-1), axis=-1)[:, :_LIKELIEST, None]
    ours, theirs = (np.take_along_axis(each, likeliest, axis=1) for each in (expected, found))
    ious, _ = overlaps(to_corners(ours[..., :4]), to_corners(theirs[..., :4]))
    same = ours[..., 4:].argmax(axis=-1) == theirs[..., 4:].argmax(axis=-1)
    return float(np.mean(same & (np.asarray(ious) >= _SAME_BOX)))


def require_agreement(name: str, expected: parity.Reference, found: np.ndarray) -> float:
    """The `agreement` of a file of lower precision. Raises ParityError if it is below 0.9."""
    share = agreement(expected.logits, found)
    if not share >= _LEAST_AGREEMENT:
        raise ParityError(
            f"The {name} keeps {share:.0%} of the likeliest boxes of the model, fewer than {_LEAST_AGREEMENT:.0%}, so "
            "it was not kept."
        )
    return share


def facts_of(origin: Provenance, artifact: str, files: Mapping[str, Mapping[str, Any]]) -> dict:
    """The content of report.json. files: by name, with the numbers that were measured."""
    known = {key: value for key, value in origin.as_json().items() if key in ("model", "weights", "license")}
    return {"artifact": artifact, **known, "images_from": origin.images, "files": files, "operators": {}}


def table_of(files: Mapping[str, Mapping[str, Any]]) -> tuple[str, Sequence[str], Sequence[Sequence[object]]]:
    """The table of report.md."""
    rows = [
        (name, f"{row['max_abs_diff']:.3g}", f"{row['agreement']:.4f}", f"{row['bytes']:,}")
        for name, row in files.items()
    ]
    return "Differences from the Keras model", ("file", "largest difference", "equal boxes", "bytes"), rows

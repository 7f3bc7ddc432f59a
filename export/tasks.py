"""The tasks of models: what an export of each gives, and how it is compared with the Keras model and reported."""

import abc
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from export import parity, report
from export.files import identity_files
from export.inference_model import in_dtype
from export.options import LARGEST_DISAGREEMENT, Embeddings, SourceOptions
from export.parity import Outputs, Reference
from export.source import ExportedModel, open_model, open_with_classes, open_without_classes
from export.texts import preprocessing_section
from keras_vit import Preprocessing, UserError, intermediates, preprocessing_of, task_of
from keras_vit.errors import ParityError
from keras_vit.files.tables import short_name
from keras_vit.files.tflite_metadata import SEVERAL_CLASSES, calibration_text
from keras_vit.images.formats import LARGEST_IMAGE
from keras_vit.models.build import classifier_head, classifies
from keras_vit.models.config import (
    SEGMENT_THRESHOLD,
    DetectionConfig,
    LinearSegmentationConfig,
    SegmentationConfig,
    TaskConfig,
)
from keras_vit.models.detection import box_iou, to_corners
from keras_vit.models.segmentation import segment_outputs
from keras_vit.run import Run

Measures = dict[str, Any]  # what was measured on a file, by name
# Of each image the most likely patches, whose boxes a file of lower precision must keep: how many, what share of them,
# and with which overlap (IoU).
_LIKELIEST, _LEAST_AGREEMENT, _SAME_BOX = 20, 0.9, 0.9
# Share of pixels that must be equal: rounding moves edges by a few, lower precision by more.
_LEAST_EQUAL, _LEAST_ROUNDED = 0.999, 0.9
# A score is a probability, of instance times the mean over a mask, whose edge may move by a pixel.
_ROUNDED_SCORE = 1e-3
_LEAST_COSINE = 0.99  # smallest cosine of an embedding with rounded weights and that of the model


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A model of a task, as its exports take it."""

    exported: ExportedModel
    noun: ClassVar[str]
    """Names reports, such as "detector"."""
    all_tokens: ClassVar[bool]
    """Whether the outputs depend on all tokens of the last block."""
    columns: ClassVar[Mapping[str, str]]
    """Headings of the table of report.md, by the name of a measure."""

    @abc.abstractmethod
    def network(self, model: keras.Model) -> keras.Model:
        """Return the model up to the outputs of an export, a dict by name."""

    @abc.abstractmethod
    def measure(self, artifact: str, expected: Reference, found: Sequence[Outputs], *, exact: bool) -> Measures:
        """Return the differences of an artifact from the Keras model, over all images.

        Raises ParityError if they are more than rounding in float32 explains, or with exact False more than a useful
        file of lower precision has.
        """

    @abc.abstractmethod
    def sentence(self, measures: Measures) -> str:
        """Return the differences for people: "boxes and logits within 1e-6 of the Keras model"."""

    @property
    def stem(self) -> str:
        """The beginning of the names of TFLite files."""
        return self.noun

    def prepared(self, largest_disagreement: float = LARGEST_DISAGREEMENT) -> "Task":
        """Return the task of a model that can be exported. Raises UserError if it cannot.

        largest_disagreement: largest share of images with another predicted class, for files with rounded weights.
        """
        return self

    def identity(self, output: pathlib.Path) -> dict[str, str]:
        """Return files that name the model, by name. Raises UserError if the output holds exports of another model."""
        return {}

    def reference(self, *, raw_pixels: bool = False, most_pixels: int = LARGEST_IMAGE) -> Reference:
        """Run the Keras model in float32 on the sample images."""
        exported = self.exported
        images = Reference(
            exported.samples,
            exported.preprocessing,
            multi_label=exported.origin.multi_label,
            most_pixels=most_pixels,
        )
        return parity.reference(self.network(in_dtype(exported.model, "float32")), images, raw_pixels=raw_pixels)

    def description(self, form: str) -> str:
        """Return the description of a TFLite file."""
        origin = self.exported.origin
        return f"{self.noun} {short_name(origin.name)}, {form}; weights: {origin.weights}"

    def report(
        self,
        directory: pathlib.Path,
        artifact: str,
        expected: Reference,
        files: Mapping[Any, Measures],
        extra: report.Extra,
    ) -> None:
        """Write the report of an export such as "TFLite"; `files` are the measurements of each, with its "bytes"."""
        origin = self.exported.origin
        rows = [
            (name, *(f"{row[measure]:.4g}" for measure in self.columns), f"{row['bytes']:,}")
            for name, row in files.items()
        ]
        table = ("Differences from the Keras model", ("file", *self.columns.values(), "bytes"), rows)
        section = () if extra.takes_files else preprocessing_section(expected.preprocessing, raw_pixels=False)
        report.write(
            directory,
            f"{self.noun.capitalize()} {short_name(origin.name)} as {artifact}",
            {
                "artifact": f"{artifact}: {self.noun}",
                "model": origin.name,
                "weights": origin.weights,
                "license": origin.license,
                "images_from": origin.images,
                "files": files,
                "operators": {},
                "notes": list(extra.notes),
            },
            [table],
            {"bytes": {name: row["bytes"] for name, row in files.items()}},
            section,
        )


@dataclasses.dataclass(frozen=True)
class Classification(Task):
    """A classifier. Output: logits (B, K)."""

    largest_disagreement: float = LARGEST_DISAGREEMENT
    """See `prepared`."""
    noun = "classifier"
    stem = "model"
    all_tokens = False
    columns: ClassVar = {}

    def network(self, model: keras.Model) -> keras.Model:
        return keras.Model(model.input, {"logits": model.output}, name=model.name)

    def measure(self, artifact: str, expected: Reference, found: Sequence[Outputs], *, exact: bool) -> Measures:
        logits = np.stack([outputs["logits"] for outputs in found])
        parity.require_variation(artifact, expected.logits, logits)
        compared = parity.compare(expected, logits)
        if exact:
            parity.require_equal(artifact, compared)
        else:
            parity.require_agreement(artifact, compared, self.largest_disagreement)
        return dataclasses.asdict(compared)

    def sentence(self, measures: Measures) -> str:
        accuracy = "" if measures["accuracy"] is None else f", accuracy {measures['accuracy']:.1%}"
        return (
            f"logits within {measures['max_abs_diff']:.2g} of the Keras model on {measures['num_images']:,} "
            f"images{accuracy}"
        )

    def prepared(self, largest_disagreement: float = LARGEST_DISAGREEMENT) -> "Classification":
        return Classification(self.exported.with_logits(), largest_disagreement)

    def identity(self, output: pathlib.Path) -> dict[str, str]:
        return identity_files(output, self.exported.model, self.exported.labels, self.exported.origin)

    def description(self, form: str) -> str:
        origin = self.exported.origin
        text = f"{short_name(origin.name)}, {form}; weights: {origin.weights}"
        if origin.multi_label:
            text += f"; {SEVERAL_CLASSES}"
        text += "" if origin.temperature == 1.0 else calibration_text(origin.temperature)
        return text if origin.promise is None else f"{text}; promise: {json.dumps(dataclasses.asdict(origin.promise))}"

    def report(self, directory, artifact, expected, files, extra) -> None:
        origin, columns = self.exported.origin, extra.columns
        if all("unknown_agreement" in row for row in files.values()):
            columns = {"unknown agreement": lambda row: f"{row['unknown_agreement']:.1%}", **columns}
        header = (
            "format", "bytes", "max diff", "mean diff", "agreement", "accuracy", "correct only in Keras",
            "correct only here", "McNemar's p", "1 thread, ms", "2 threads, ms", "operators", *columns,
        )  # fmt: skip
        rows = [
            (name, f"{row['bytes']:,}", f"{row['max_abs_diff']:.3g}", f"{row['mean_abs_diff']:.3g}",
             f"{row['agreement']:.1%}", report.accuracy_text(row["accuracy"]), *report.loss_cells(row),
             *(f"{ms:.3g}" for ms in row["latency_ms"].values()), sum(row["operators"].values()),
             *(cell(row) for cell in columns.values()))
            for name, row in files.items()
        ]  # fmt: skip
        accuracy = report.accuracy_text(expected.accuracy)
        heading = f"{len(expected.logits):,} {origin.images}; accuracy of the Keras model {accuracy}"
        facts = {
            "artifact": artifact,
            **origin.as_json(),
            "images_from": origin.images,
            "num_images": len(expected.logits),
            "keras_accuracy": expected.accuracy,
            "preprocessing": dataclasses.asdict(expected.preprocessing),
            "formats": files,
            **extra.facts,
            "notes": list(extra.notes),
        }
        latencies = {name: row["latency_ms"]["1_threads"] for name, row in files.items()}
        bars = {
            "latency of one image on one thread, ms": latencies,
            "megabytes": {name: row["bytes"] / 1e6 for name, row in files.items()},
        }
        section = preprocessing_section(expected.preprocessing, raw_pixels=extra.raw_pixels)
        title = f"{short_name(origin.name)} as {artifact}"
        tables = [(heading, header, rows), *extra.tables]
        report.write(directory, title, facts, tables, {**bars, **extra.panels}, section)


@dataclasses.dataclass(frozen=True)
class Embedding(Task):
    """The features that the head of a model reads, or the projection of CLIP. Output: embeddings (B, D)."""

    normalize: bool = False
    """Whether each embedding is divided by its length."""
    noun = "embeddings"
    all_tokens = False
    columns: ClassVar = {"max_abs_diff": "largest difference", "least_cosine": "smallest cosine"}

    def network(self, model: keras.Model) -> keras.Model:
        output = keras.layers.UnitNormalization(name="unit_length")(model.output) if self.normalize else model.output
        return keras.Model(model.input, {"embeddings": output}, name=model.name)

    def measure(self, artifact: str, expected: Reference, found: Sequence[Outputs], *, exact: bool) -> Measures:
        difference = _largest_difference(artifact, expected, found, "embeddings", exact=exact)
        ours, theirs = (np.stack([outputs["embeddings"] for outputs in each]) for each in (expected.outputs, found))
        products = np.sum(ours * theirs, axis=1, dtype=np.float64)
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosine = float(np.min(products / np.maximum(lengths, 1e-30)))
        if not cosine >= _LEAST_COSINE:
            raise ParityError(
                f"An embedding of the {artifact} has the cosine {cosine:.4f} with that of the model, below "
                f"{_LEAST_COSINE}, so it was not kept."
            )
        return {"max_abs_diff": difference, "least_cosine": cosine}

    def sentence(self, measures: Measures) -> str:
        return f"embeddings within {measures['max_abs_diff']:.2g} of the Keras model"


@dataclasses.dataclass(frozen=True)
class Detection(Task):
    """A detector with classes.

    Output: detections (B, N, 4 + K) float32. Columns 0 to 3 are center x and y, width and height of a box as shares of
    the input, the others the logits of the K classes, each of which is a probability by its sigmoid.
    """

    noun = "detector"
    all_tokens = True
    columns: ClassVar = {"max_abs_diff": "largest difference", "agreement": "equal boxes"}

    def network(self, model: keras.Model) -> keras.Model:
        parts = [model.output["boxes"], model.output["class_logits"]]
        joined = keras.layers.Concatenate(dtype="float32", name="detections")(parts)
        return keras.Model(model.input, {"detections": joined}, name=model.name)

    def measure(self, artifact: str, expected: Reference, found: Sequence[Outputs], *, exact: bool) -> Measures:
        difference = _largest_difference(artifact, expected, found, "detections", exact=exact)
        pairs = [(a["detections"], b["detections"]) for a, b in zip(expected.outputs, found, strict=True)]
        share = float(np.mean([agreement_of_boxes(*pair) for pair in pairs]))
        if not share >= _LEAST_AGREEMENT:
            raise ParityError(
                f"The {artifact} keeps {share:.0%} of the most likely boxes of the model, fewer than "
                f"{_LEAST_AGREEMENT:.0%}, so it was not kept."
            )
        return {"max_abs_diff": difference, "agreement": share}

    def sentence(self, measures: Measures) -> str:
        return f"boxes and logits within {measures['max_abs_diff']:.2g} of the Keras model"


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

    def measure(self, artifact: str, expected: Reference, found: Sequence[Outputs], *, exact: bool) -> Measures:
        pairs = list(zip(expected.outputs, found, strict=True))
        share = float(np.mean([equal_pixels(*pair) for pair in pairs]))
        least = _LEAST_EQUAL if exact else _LEAST_ROUNDED
        if not share >= least:
            raise ParityError(
                f"{share:.1%} of the pixels of the {artifact} are those of the model, fewer than {least:.1%}, so it "
                "was not kept."
            )
        differences = [float(np.abs(a["scores"] - b["scores"]).max()) for a, b in pairs if "scores" in a]
        difference = max(differences, default=0.0)
        if exact:
            parity.require_close(f"scores of the {artifact}", difference, _ROUNDED_SCORE)
        return {"equal_pixels": share, "score_difference": difference}

    def sentence(self, measures: Measures) -> str:
        return f"{measures['equal_pixels']:.1%} of the pixels are those of the Keras model"


def open_task(run: Run, options: SourceOptions, embeddings: Embeddings | None = None) -> Task:
    """Open what a run or checkpoint does: classify, detect, segment, or give embeddings where these are asked for."""
    if embeddings is not None:
        return embedding_of(open_without_classes(run, options), normalize=embeddings == "unit-length")
    task = task_of(run.model)
    if isinstance(task, SegmentationConfig | LinearSegmentationConfig):
        return Segmentation(open_with_classes(run, options, task.num_classes))
    if isinstance(run.model.output, dict) and isinstance(task, DetectionConfig):
        if "class_logits" not in run.model.output:
            raise UserError(
                f"{run.name} has no classes of its own; give it some by keras-vit detect predict --classes … "
                "--save DIR, and export that directory."
            )
        return Detection(open_with_classes(run, options, run.model.output["class_logits"].shape[-1]))
    return Classification(open_model(run, options))


def embedding_of(exported: ExportedModel, *, normalize: bool = False) -> Embedding:
    """Return the embeddings of a model with or without a head. Raises UserError if it ends with all tokens."""
    model = exported.model
    if classifier_head(model) is not None and classifies(model):
        model = intermediates(model, "pre_logits")
    if len(model.output_shape) != 2:
        raise UserError(
            f"The model ends with all tokens, of shape {model.output_shape}; an export of embeddings needs one vector "
            "per image."
        )
    return Embedding(dataclasses.replace(exported, model=model), normalize)


def _largest_difference(
    artifact: str, expected: Reference, found: Sequence[Outputs], name: str, *, exact: bool
) -> float:
    """Return the largest difference of an output. Raises ParityError if it is not finite, or exact and not rounding."""
    ours, theirs = (np.stack([outputs[name] for outputs in each]) for each in (expected.outputs, found))
    difference = float(np.abs(ours - theirs).max())
    most = parity.tolerance_of(ours) if exact else float(np.finfo(np.float32).max)
    parity.require_close(f"{name} of the {artifact}", difference, most)
    return difference


def agreement_of_boxes(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the share of the 20 most likely patches of an image with the same class and a box that overlaps by 0.9.

    Detections (N, 4 + K) of the Keras model and of a file.
    """
    likeliest = np.argsort(-expected[:, 4:].max(axis=-1))[:_LIKELIEST]
    ours, theirs = expected[likeliest], found[likeliest]
    ious, _ = box_iou(to_corners(ours[:, :4]), to_corners(theirs[:, :4]))
    same = ours[:, 4:].argmax(axis=-1) == theirs[:, 4:].argmax(axis=-1)
    return float(np.mean(same & (np.asarray(ious) >= _SAME_BOX)))


def equal_pixels(expected: Outputs, found: Outputs) -> float:
    """Return the share of the pixels of an image with the same class; of masks, of the pixels that are in one.

    The latter leaves out what is in neither mask, most of an image, which would hide small masks that differ. A likely
    mask of another class has none of the pixels.
    """
    if "label_map" in expected:
        return float(np.mean(expected["label_map"] == found["label_map"]))
    if "masks" in expected:
        ours, theirs = expected["masks"].astype(bool), found["masks"].astype(bool)
        if ours.shape != theirs.shape:  # more or fewer masks than the model's
            return 0.0
        is_other = (expected["classes"] != found["classes"]) & (expected["scores"] >= SEGMENT_THRESHOLD)
        theirs = theirs & ~is_other[:, None, None]
        return 1.0 - float((ours != theirs).sum() / max((ours | theirs).sum(), 1))
    ours, theirs = (np.append(each["classes"], -1)[each["segment_map"].astype(int)] for each in (expected, found))
    return float(np.mean(ours == theirs))

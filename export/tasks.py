"""Models whose outputs are not the classes of a picture: what their exports write, and how these are verified."""

import abc
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from export import parity, report
from export.inference_model import in_dtype
from export.preprocessing_code import preprocessing_section
from export.source import ExportedModel
from keras_vit.files.tables import short_name

# Of one image, by name.
Outputs = Mapping[str, np.ndarray]
# What was measured on a file, by name.
Measures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TaskReference:
    """Sample images and what the Keras model gives on them."""

    samples: parity.Reference
    """Its logits are of no use."""
    outputs: Sequence[Outputs]
    """Of each image."""

    def outputs_of(self, run: Callable[[np.ndarray], Mapping[str, Any]], *, batch: bool = True) -> list[Outputs]:
        """The outputs of an artifact on each image.

        run: takes images (B, h, w, C), or with batch False (1, h, w, C).
        """
        found = list[Outputs]()
        for images in self.images(batch=batch):
            outputs = {name: np.asarray(value) for name, value in run(images).items()}
            found += [{name: value[row] for name, value in outputs.items()} for row in range(len(images))]
        return found

    def images(self, *, batch: bool = True) -> Iterator[np.ndarray]:
        """The inputs of the model, in batches or one by one."""
        for _, images in self.samples.batches():
            yield from [images] if batch else np.split(images, len(images))


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A model of a task, as its exports take it."""

    exported: ExportedModel
    noun: ClassVar[str]
    """Names files and reports, such as "detector"."""
    all_tokens: ClassVar[bool]
    """Whether the outputs depend on all tokens of the last block."""
    columns: ClassVar[Mapping[str, str]]
    """Headings of the table of report.md, by the name of a measure."""

    @abc.abstractmethod
    def network(self, model: keras.Model) -> keras.Model:
        """The model up to the outputs of an export, a dict by name."""

    @abc.abstractmethod
    def measure(self, artifact: str, expected: Sequence[Outputs], found: Sequence[Outputs], *, exact: bool) -> Measures:
        """The differences of an artifact from the Keras model, over all images.

        Raises ParityError if they are more than rounding in float32 explains, or with exact False more than a useful
        file of lower precision has.
        """

    @abc.abstractmethod
    def sentence(self, measures: Measures) -> str:
        """The differences for people: "boxes and logits within 1e-6 of the Keras model"."""

    def reference(self) -> TaskReference:
        """What the Keras model in float32 gives on the sample images."""
        model = self.network(in_dtype(self.exported.model, "float32"))
        samples = parity.Reference(self.exported.samples, self.exported.preprocessing, np.zeros(0))
        reference = TaskReference(samples, [])
        return dataclasses.replace(reference, outputs=reference.outputs_of(model.predict_on_batch))

    def report(
        self,
        directory: pathlib.Path,
        kind: str,
        files: Mapping[str, Measures],
        *,
        of_pixels: bool,
        notes: Sequence[str] = (),
    ) -> None:
        """Write the report of an export.

        Args:
            directory: for its files.
            kind: of the export, such as "TFLite".
            files: what was measured on each, with its "bytes".
            of_pixels: whether the files take pixels, so that the report says what the caller does to a picture.
            notes: further sentences.
        """
        origin = self.exported.origin
        rows = [
            (name, *(f"{row[measure]:.4g}" for measure in self.columns), f"{row['bytes']:,}")
            for name, row in files.items()
        ]
        table = ("Differences from the Keras model", ("file", *self.columns.values(), "bytes"), rows)
        report.write(
            directory,
            f"{self.noun.capitalize()} {short_name(origin.name)} as {kind}",
            {**origin.facts(f"{kind}: {self.noun}", files), "notes": list(notes)},
            [table],
            {"bytes": {name: row["bytes"] for name, row in files.items()}},
            preprocessing_section(self.exported.preprocessing, raw_pixels=False) if of_pixels else (),
        )


def largest_difference(
    artifact: str, expected: Sequence[Outputs], found: Sequence[Outputs], name: str, *, exact: bool
) -> float:
    """The largest difference of an output. Raises ParityError if it is not finite, or with `exact` more than rounding.

    Args:
        artifact: its name.
        expected: outputs of the Keras model.
        found: outputs of the artifact.
        name: of the output.
        exact: whether the artifact computes in float32.
    """
    ours, theirs = (np.stack([outputs[name] for outputs in each]) for each in (expected, found))
    difference = float(np.abs(ours - theirs).max())
    tolerance = parity.FLOAT_TOLERANCE * max(1.0, float(np.abs(ours).max()))
    parity.require_close(
        f"{name} of the {artifact}", difference, tolerance if exact else float(np.finfo(np.float32).max)
    )
    return difference

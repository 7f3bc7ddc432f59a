"""Compares an exported artifact with the Keras model on the same images."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from scipy import special

from export.options import LARGEST_DISAGREEMENT
from keras_vit import Preprocessing, UserError
from keras_vit.cli.progress import Progress
from keras_vit.errors import ParityError, explained
from keras_vit.images.files import SAMPLES, Samples
from keras_vit.images.formats import LARGEST_IMAGE, format_problem
from keras_vit.scores import Scoring, UnknownScorer

# Largest difference that rounding in float32 explains, relative to the largest logit or to 1, whichever is larger.
# Measured with logits up to 12: rounding causes 1e-5, a layer normalization with another epsilon causes 0.7.
FLOAT_TOLERANCE = 1e-4
_LEAST_PROBABILITY = 1e-7  # below it, the functions of float32 are rounded more
# Of the differences between the logits of images, how much an artifact must keep. Rounding adds to them.
_LEAST_VARIATION = 0.1
# Largest batch, in images and in pixels: the activations of a large model take much more memory than its weights.
_BATCH, _BATCH_PIXELS = 64, 200_000

Outputs = Mapping[str, np.ndarray]  # the outputs of a model for one image, by name


@dataclasses.dataclass(frozen=True)
class Reference:
    """Sample images and what the Keras model gives on them."""

    samples: Samples
    preprocessing: Preprocessing
    outputs: Sequence[Outputs] = ()
    """The outputs of the Keras model for each image."""
    multi_label: bool = False
    """Whether an image may have several classes."""
    most_pixels: int = LARGEST_IMAGE
    """Maximum number of pixels of an image file."""

    def first(self, count: int) -> "Reference":
        """Return the reference of the first images alone."""
        samples = Samples(self.samples.encoded[:count], self.samples.labels[:count], self.samples.names[:count])
        return dataclasses.replace(self, samples=samples, outputs=self.outputs[:count])

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """Logits (n, K) of a classifier."""
        return np.stack([each["logits"] for each in self.outputs])

    @property
    def tolerance(self) -> float:
        """Largest difference from these logits, or from their probabilities, that counts as rounding."""
        return tolerance_of(self.logits)

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the Keras model on the labeled images; None without labels."""
        return accuracy(self, self.logits)

    def batches(self, *, raw_pixels: bool = False) -> Iterator[tuple[tuple[bytes, ...], np.ndarray]]:
        """Yield image files with the model inputs (B, h, w, C) of them: float32, or uint8 with `raw_pixels`."""
        height, width = self.preprocessing.image_size
        size = min(_BATCH, max(1, _BATCH_PIXELS // (height * width)))
        for start in range(0, len(self.samples.encoded), size):
            files = self.samples.encoded[start : start + size]
            batch = np.stack([self._decoded(start + row) for row in range(len(files))])
            normalize = self.preprocessing.normalize
            yield files, np.round(batch).astype(np.uint8) if raw_pixels else np.asarray(normalize(batch))

    def _decoded(self, row: int) -> tf.Tensor:
        """Return an image as (height, width, channels), 0..255. Raises UserError if no graph decodes it."""
        file, names = self.samples.encoded[row], self.samples.names
        name = names[row] if names else f"Image {row} of {SAMPLES}"
        limit = f"damaged, or has more than {self.most_pixels // 10**6} megapixels; leave it out"
        with explained(f"{name} is {format_problem(file) or limit}.", tf.errors.InvalidArgumentError):
            return _decoder(self.preprocessing, self.most_pixels)(tf.constant(file))

    def outputs_of(
        self, run: Callable[[np.ndarray], Mapping[str, Any]], *, raw_pixels: bool = False, doing: str = "verifying"
    ) -> list[Outputs]:
        """Return the outputs of an artifact for each image; `run` takes images (B, h, w, C)."""
        found = list[Outputs]()
        with Progress(doing, len(self.samples.encoded)) as progress:
            for _, images in self.batches(raw_pixels=raw_pixels):
                outputs = {name: np.asarray(value) for name, value in run(images).items()}
                found += [{name: value[row] for name, value in outputs.items()} for row in range(len(images))]
                progress.update(len(images))
        return found


def tolerance_of(values: np.ndarray) -> float:
    """Largest difference from what a model gives that counts as rounding in float32."""
    return FLOAT_TOLERANCE * max(1.0, float(np.abs(values).max()))


@dataclasses.dataclass(frozen=True)
class Parity:
    """Differences between the logits of an artifact and those of the model."""

    max_abs_diff: float
    mean_abs_diff: float
    agreement: float
    """Share of images with the same predicted class or, where an image may have several, exactly the same classes."""
    accuracy: float | None
    """Accuracy on the labeled images; None without labels."""
    num_images: int
    tolerance: float = FLOAT_TOLERANCE
    """Largest difference that counts as rounding; see `Reference`."""
    lost: int = 0
    """Labeled images that the model classifies correctly and the artifact does not."""
    gained: int = 0
    """Labeled images that the artifact classifies correctly and the model does not."""
    mcnemar_p: float | None = None
    """p-value of McNemar's test of these two numbers; None without labels."""


def reference(model: keras.Model, images: Reference, *, raw_pixels: bool = False) -> Reference:
    """Run the Keras model of logits, or of a dict of outputs, on the sample images, which have no outputs yet.

    raw_pixels: run it on the rounded pixels that an artifact with uint8 input takes.
    """
    normalize = images.preprocessing.normalize

    def run(batch: np.ndarray) -> Outputs:
        outputs = model.predict_on_batch(np.asarray(normalize(batch) if raw_pixels else batch))
        return outputs if isinstance(outputs, dict) else {"logits": outputs}

    rows = images.outputs_of(run, raw_pixels=raw_pixels, doing="Running the Keras model")
    logits = np.stack([row.get("logits", np.zeros(0)) for row in rows])
    if logits.shape[1] > 1 and logits.min() >= 0.0 and np.allclose(logits.sum(axis=1), 1.0, atol=1e-3):
        raise UserError(
            f"The model {model.name!r} outputs probabilities, but an export takes logits and adds the softmax itself; "
            "export the model up to its softmax, or build it with classifier_activation='softmax'."
        )
    return dataclasses.replace(images, outputs=rows)


@functools.lru_cache(maxsize=4)
def _decoder(preprocessing: Preprocessing, most_pixels: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """An image file -> (height, width, channels) float32 0..255, as a graph, which takes a third of the time."""
    return tf.function(
        lambda data: tf.cast(preprocessing.read(data, most_pixels=most_pixels), tf.float32),
        input_signature=[tf.TensorSpec((), tf.string)],
        autograph=False,
    )


def compare(expected: Reference, logits: np.ndarray) -> Parity:
    """Compare the logits (n, K) of an artifact with those of the model."""
    difference = np.abs(logits - expected.logits)
    predicted, labels = np.argmax(logits, axis=-1), expected.samples.labels
    keras_predicted = np.argmax(expected.logits, axis=-1)
    lost = int(np.sum((keras_predicted == labels) & (predicted != labels)))
    gained = int(np.sum((keras_predicted != labels) & (predicted == labels)))
    return Parity(
        max_abs_diff=float(difference.max()),
        mean_abs_diff=float(difference.mean()),
        agreement=agreement(expected.logits, logits, multi_label=expected.multi_label),
        accuracy=accuracy(expected, logits),
        num_images=len(logits),
        tolerance=expected.tolerance,
        lost=lost,
        gained=gained,
        mcnemar_p=mcnemar(lost, gained) if (labels >= 0).any() else None,
    )


def agreement(expected: np.ndarray, logits: np.ndarray, *, multi_label: bool) -> float:
    """Share of the images with the same predicted class in two arrays of logits (n, K).

    With `multi_label` a class is predicted from the logit 0 on, and an image counts if all its classes are the same.
    """
    if multi_label:
        return float(np.mean(np.all((logits >= 0.0) == (expected >= 0.0), axis=-1)))
    return float(np.mean(np.argmax(logits, axis=-1) == np.argmax(expected, axis=-1)))


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided p-value of McNemar's exact test: how often chance alone splits the images so unevenly, or more.

    `lost` and `gained` are the images that only one of two classifiers gets right. If both are equally accurate, each
    is a fair coin (McNemar, 1947; exact form: Fagerland, Lydersen and Laake, 2013).
    """
    return min(1.0, 2.0 * float(special.bdtr(min(lost, gained), lost + gained, 0.5)))


def accuracy(expected: Reference, logits: np.ndarray) -> float | None:
    """Accuracy of logits (n, K) on the labeled images; None without labels."""
    labeled = expected.samples.labels >= 0
    if not labeled.any():
        return None
    return float(np.mean(np.argmax(logits, axis=-1)[labeled] == expected.samples.labels[labeled]))


def require_close(what: str, difference: float, tolerance: float) -> None:
    """Raise ParityError unless what an artifact gives, as "logits of the file", is close to what the model gives."""
    if not difference <= tolerance:  # also false for NaN
        raise ParityError(
            f"The {what} differ from the model's by up to {difference:.3g}, more than {tolerance:.3g}, so it was not "
            "kept."
        )


def require_equal(name: str, parity: Parity) -> None:
    """Raise ParityError unless the logits equal those of the model up to rounding."""
    require_close(f"logits of the {name}", parity.max_abs_diff, parity.tolerance)


def probability_difference(
    what: str, expected: Reference, temperature: float, found: np.ndarray, *, exact: bool = True
) -> float:
    """Return the largest difference of probabilities (n, K). Raises ParityError if exact and more than rounding.

    That is a share of each probability: of thousands of classes, or of several in an image, nearly all are tiny.
    """
    activation = tf.sigmoid if expected.multi_label else tf.nn.softmax
    ours = activation(expected.logits / temperature).numpy()
    difference = np.abs(found - ours)
    if exact:  # logits that differ by d divide or multiply a probability by at most exp(2 d)
        relative = float((difference / np.maximum(ours, _LEAST_PROBABILITY)).max())
        require_close(what, relative, 2.0 * expected.tolerance / temperature)
    return float(difference.max())


def require_agreement(name: str, parity: Parity, largest_disagreement: float = LARGEST_DISAGREEMENT) -> None:
    """Raise ParityError unless the artifact and the model predict the same class for nearly all images."""
    disagreeing = parity.num_images - round(parity.agreement * parity.num_images)
    allowed = max(1, int(largest_disagreement * parity.num_images))
    if disagreeing > allowed or not np.isfinite(parity.max_abs_diff):
        raise ParityError(
            f"The {name} disagrees with the model on {disagreeing} of {parity.num_images} images, and by up to "
            f"{parity.max_abs_diff:.3g} in a logit; at most {allowed} may differ, so it was not kept."
        )


def require_variation(name: str, expected: np.ndarray, logits: np.ndarray) -> None:
    """Raise ParityError for an artifact with nearly the same logits (n, K) for all images, unlike the model.

    If the model predicts one class for all of them, the predicted classes do not show it.
    """
    ours, theirs = (np.linalg.norm(each - each[0]) for each in (expected, logits))
    if theirs < _LEAST_VARIATION * ours:
        raise ParityError(
            f"The {name} returns nearly the same logits for all {len(logits)} images, so it was not kept."
        )


def unknown_facts(
    name: str,
    scorer: UnknownScorer,
    expected: np.ndarray,
    found: np.ndarray,
    *,
    exact: bool,
    threshold: float | None = None,
) -> dict[str, object]:
    """The fields of report.json about the scores (n,) of unknown images by an artifact, beside the model's.

    `threshold` is the artifact's; default: the model's. Raises ParityError if the scores are to be equal, which is
    `exact`, and differ by more than rounding.
    """
    difference = float(np.abs(found - expected).max())
    if exact:
        require_close(f"unknown scores of the {name}", difference, tolerance_of(expected))
    threshold = scorer.threshold if threshold is None else threshold
    agreement = float(np.mean((found > threshold) == (expected > scorer.threshold)))
    return {
        "unknown_kind": scorer.kind,
        "unknown_threshold": threshold,
        "unknown_max_abs_diff": difference,
        "unknown_agreement": agreement,
    }


def promise_facts(
    name: str, scoring: Scoring, expected: Reference, found: Mapping[str, Any], *, exact: bool
) -> dict[str, float]:
    """The field of report.json about the decisions of an artifact; none without a promise.

    Raises ParityError if the decisions are to be equal, and one differs that rounding does not explain.
    """
    if scoring.promise is None:
        return {}
    probabilities, agreement = scoring.probabilities(expected.logits), 1.0
    ours, below, above = (
        {output: np.asarray(value) for output, value in scoring.promise.decide(probabilities + shift).items()}
        for shift in (0.0, -expected.tolerance, expected.tolerance)
    )
    for output, decision in ours.items():
        differs = np.asarray(found[output]).astype(bool) != decision
        agreement = min(agreement, 1.0 - float(np.mean(differs.reshape(len(differs), -1).any(axis=1))))
        if exact and np.any(differs & (below[output] == above[output])):
            raise ParityError(f"The {output} of the {name} differs from the model's decision, so it was not kept.")
    return {"promise_agreement": agreement}


def matched_threshold(threshold: float, expected: np.ndarray, found: np.ndarray) -> float:
    """The threshold of an artifact with rounded weights, which move the scores (n,), and distances the most.

    It has the same rank among its scores as the model's threshold among the model's; beyond all of these, it is as far
    from the last one.
    """
    nearest = np.clip(threshold, expected.min(), expected.max())
    return float(threshold - nearest + np.interp(nearest, np.sort(expected), np.sort(found)))


def as_table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> str:
    """Align rows of text in columns, for the terminal."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)

"""The proof that an artifact is the model: the same images through both, and the differences as numbers."""

import dataclasses
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing, UserError
from keras_vit.run_directory import SAMPLES, Samples

# Largest difference of a logit that float32 arithmetic in another order explains.
FLOAT_TOLERANCE = 1e-4
# Share of images that an artifact with rounded weights may put in another class than the model does. One image always
# may be: among few, a single picture between two classes says nothing.
LARGEST_DISAGREEMENT = 0.02
# Images in memory at once.
_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Reference:
    """Images and what the Keras model says of them."""

    samples: Samples
    """The image files with their right classes."""
    preprocessing: Preprocessing
    """What the model expects of them."""
    logits: np.ndarray
    """(n, K) of the Keras model."""

    def batches(self) -> Iterator[tuple[tuple[bytes, ...], np.ndarray]]:
        """The image files in order, and what they are to the model: (B, H, W, C) float32."""
        return _batches(self.samples, self.preprocessing)


@dataclasses.dataclass(frozen=True)
class Parity:
    """How an artifact's logits compare with the model's."""

    max_abs_diff: float
    mean_abs_diff: float
    agreement: float
    """Share of images in the same class as by the model."""
    accuracy: float
    """Share of images in their right class."""
    num_images: int


def decode(data: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """JPEG, PNG, BMP or GIF (first frame) bytes -> (height, width, channels) float32 0..255, as evaluation does."""
    image = tf.io.decode_image(data, channels=0, dtype=tf.uint8, expand_animations=False)
    image.set_shape((None, None, None))
    return tf.cast(preprocessing.fit(image), tf.float32)


def reference(model: keras.Model, preprocessing: Preprocessing, samples: Samples) -> Reference:
    """Run the Keras model on sample images."""
    if not samples.encoded:
        raise UserError("An artifact is checked on images, and there are none.")
    logits = [model.predict_on_batch(images) for _, images in _batches(samples, preprocessing)]
    return Reference(samples, preprocessing, np.concatenate(logits))


def _batches(samples: Samples, preprocessing: Preprocessing) -> Iterator[tuple[tuple[bytes, ...], np.ndarray]]:
    for start in range(0, len(samples.encoded), _BATCH):
        files = samples.encoded[start : start + _BATCH]
        try:
            pixels = [decode(tf.constant(file), preprocessing) for file in files]
        except tf.errors.InvalidArgumentError as error:
            raise UserError(
                f"Of the images in {SAMPLES}, one from {start} to {start + len(files) - 1} cannot be decoded; "
                "train again to write them."
            ) from error
        yield files, np.asarray(preprocessing.normalize(np.stack(pixels)))


def compare(expected: Reference, logits: np.ndarray) -> Parity:
    """Differences between an artifact's logits (n, K) and those of the model."""
    difference = np.abs(logits - expected.logits)
    predicted = np.argmax(logits, axis=-1)
    return Parity(
        max_abs_diff=float(difference.max()),
        mean_abs_diff=float(difference.mean()),
        agreement=float(np.mean(predicted == np.argmax(expected.logits, axis=-1))),
        accuracy=float(np.mean(predicted == expected.samples.labels)),
        num_images=len(logits),
    )


def require_equal(name: str, parity: Parity) -> None:
    """Raise UserError unless the logits are those of the model to float rounding."""
    if not parity.max_abs_diff <= FLOAT_TOLERANCE:  # NaN is not below it either
        raise UserError(
            f"The logits of the {name} differ from the model's by up to {parity.max_abs_diff:.3g}, more than "
            f"{FLOAT_TOLERANCE:g} on {parity.num_images} images, so it was not kept."
        )


def require_agreement(name: str, parity: Parity) -> None:
    """Raise UserError unless nearly all images fall into the class that the model gives them."""
    disagreeing = parity.num_images - round(parity.agreement * parity.num_images)
    allowed = max(1, int(LARGEST_DISAGREEMENT * parity.num_images))
    if disagreeing > allowed or not np.isfinite(parity.max_abs_diff):
        raise UserError(
            f"The {name} disagrees with the model on {disagreeing} of {parity.num_images} images, and by up to "
            f"{parity.max_abs_diff:.3g} in a logit; at most {allowed} may differ, so it was not kept."
        )


def as_table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> str:
    """Rows of text in columns, for the terminal."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)

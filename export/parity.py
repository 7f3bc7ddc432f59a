"""The proof that an artifact is the model: the same images through both, and the differences as numbers."""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing, UserError
from keras_vit.run_directory import Samples

# Largest difference of a logit that float32 arithmetic in another order explains.
FLOAT_TOLERANCE = 1e-4
# Share of images that an artifact with rounded weights must still put in the model's class.
LEAST_AGREEMENT = 0.98


@dataclasses.dataclass(frozen=True)
class Reference:
    """Images and what the Keras model says of them."""

    encoded: tuple[bytes, ...]
    """The image files."""
    images: np.ndarray
    """(n, H, W, C) float32, preprocessed as in evaluation."""
    labels: np.ndarray
    """(n,) the right classes."""
    logits: np.ndarray
    """(n, K) of the Keras model."""


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
    images = np.stack([preprocessing.normalize(decode(tf.constant(file), preprocessing)) for file in samples.encoded])
    return Reference(samples.encoded, images, samples.labels, model.predict(images, batch_size=64, verbose=0))


def compare(expected: Reference, logits: np.ndarray) -> Parity:
    """Differences between an artifact's logits (n, K) and those of the model."""
    difference = np.abs(logits - expected.logits)
    predicted = np.argmax(logits, axis=-1)
    return Parity(
        max_abs_diff=float(difference.max()),
        mean_abs_diff=float(difference.mean()),
        agreement=float(np.mean(predicted == np.argmax(expected.logits, axis=-1))),
        accuracy=float(np.mean(predicted == expected.labels)),
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
    if not parity.agreement >= LEAST_AGREEMENT:
        raise UserError(
            f"The {name} agrees with the model on {parity.agreement:.2%} of {parity.num_images} images, less than "
            f"{LEAST_AGREEMENT:.0%}, so it was not kept."
        )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (n, K) of logits (n, K)."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def as_table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> str:
    """Rows of text in columns, for the terminal."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)

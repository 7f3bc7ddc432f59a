"""The proof that an artifact is the model: the same images through both, and the differences as numbers."""

import dataclasses
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from export.options import LARGEST_DISAGREEMENT
from keras_vit import Preprocessing, UserError
from keras_vit.errors import ParityError
from keras_vit.files.image_formats import format_problem
from keras_vit.run_directory import SAMPLES, Samples

# Largest difference that float32 arithmetic in another order explains, as a share of the largest logit, or of 1 where
# that is smaller: rounding errors are a share of the terms of a sum. Of logits up to some 12, rounding was measured as
# 1e-5, a layer normalisation with another epsilon as 0.7.
FLOAT_TOLERANCE = 1e-4
# Images in memory at once, at most, and pixels: what a large model computes in between is many times its weights.
_BATCH, _BATCH_PIXELS = 64, 200_000


@dataclasses.dataclass(frozen=True)
class Reference:
    """Images and what the Keras model says of them."""

    samples: Samples
    """The image files with their right classes."""
    preprocessing: Preprocessing
    """What the model expects of them."""
    logits: np.ndarray
    """(n, K) of the Keras model."""

    @property
    def tolerance(self) -> float:
        """Largest difference from these logits, or from their probabilities, that is taken for float rounding."""
        return FLOAT_TOLERANCE * max(1.0, float(np.abs(self.logits).max()))

    def batches(self, *, raw_pixels: bool = False) -> Iterator[tuple[tuple[bytes, ...], np.ndarray]]:
        """The image files in order, and what they are to the model: (B, H, W, C) float32, or uint8 pixels 0..255."""
        return _batches(self.samples, self.preprocessing, raw_pixels)


@dataclasses.dataclass(frozen=True)
class Parity:
    """How an artifact's logits compare with the model's."""

    max_abs_diff: float
    mean_abs_diff: float
    agreement: float
    """Share of images in the same class as by the model."""
    accuracy: float
    """Share in their right class of the images whose class is known; NaN where none is."""
    num_images: int
    tolerance: float = FLOAT_TOLERANCE
    """Largest difference that is taken for float rounding; see `Reference`."""


def decode(data: tf.Tensor, preprocessing: Preprocessing) -> tf.Tensor:
    """Bytes of an image file -> (height, width, channels) float32 0..255, as in evaluation; see `image_formats`.

    The header must have been looked at: TensorFlow 2.21 writes all frames of an animated WebP into the memory of one.
    """

    def stored() -> tf.Tensor:
        image = tf.io.decode_image(data, channels=0, dtype=tf.uint8, expand_animations=False)
        is_bmp = tf.equal(tf.strings.substr(data, 0, 2), b"BM")
        return tf.cond(is_bmp, lambda: image[..., :3], lambda: image)  # its fourth byte is seldom an alpha

    def png() -> tf.Tensor:
        image = tf.io.decode_png(data, channels=4)
        depth_and_type = tf.strings.substr(data, 24, 2)
        shallow = tf.reduce_any(tf.equal(depth_and_type, [b"\1\0", b"\2\0", b"\4\0"]))

        def scaled() -> tf.Tensor:  # where greys have fewer than 8 bits, so has the alpha that TensorFlow adds
            alpha = tf.where(image[..., 3:] > 0, tf.constant(255, tf.uint8), tf.constant(0, tf.uint8))
            return tf.concat([image[..., :3], alpha], axis=-1)

        return tf.cond(shallow, scaled, lambda: image)

    # With four channels a transparent colour becomes an alpha; with those of the file it is ignored.
    is_png = tf.equal(tf.strings.substr(data, 0, 8), b"\x89PNG\r\n\x1a\n")
    image = tf.cond(is_png, png, stored)
    image.set_shape((None, None, None))
    return tf.cast(preprocessing.fit(image), tf.float32)


def reference(model: keras.Model, preprocessing: Preprocessing, samples: Samples) -> Reference:
    """Run the Keras model on sample images."""
    if not samples.encoded:
        raise UserError("An artifact is checked on images, and there are none.")
    logits = [model.predict_on_batch(images) for _, images in _batches(samples, preprocessing, False)]
    return Reference(samples, preprocessing, np.concatenate(logits))


def _batches(
    samples: Samples, preprocessing: Preprocessing, raw_pixels: bool
) -> Iterator[tuple[tuple[bytes, ...], np.ndarray]]:
    height, width = preprocessing.image_size
    size = min(_BATCH, max(1, _BATCH_PIXELS // (height * width)))
    for start in range(0, len(samples.encoded), size):
        files = samples.encoded[start : start + size]
        try:
            if any(map(format_problem, files)):
                raise ValueError
            pixels = [decode(tf.constant(file), preprocessing) for file in files]
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            raise UserError(
                f"Of the images in {SAMPLES}, one from {start} to {start + len(files) - 1} cannot be decoded; "
                "train again to write them."
            ) from error
        pixels = np.stack(pixels)
        yield files, np.round(pixels).astype(np.uint8) if raw_pixels else np.asarray(preprocessing.normalize(pixels))


def compare(expected: Reference, logits: np.ndarray) -> Parity:
    """Differences between an artifact's logits (n, K) and those of the model."""
    difference = np.abs(logits - expected.logits)
    predicted = np.argmax(logits, axis=-1)
    return Parity(
        max_abs_diff=float(difference.max()),
        mean_abs_diff=float(difference.mean()),
        agreement=float(np.mean(predicted == np.argmax(expected.logits, axis=-1))),
        accuracy=accuracy(expected, logits),
        num_images=len(logits),
        tolerance=expected.tolerance,
    )


def accuracy(expected: Reference, logits: np.ndarray) -> float:
    """Share in their right class of the images whose class is known; NaN where none is."""
    known = expected.samples.labels >= 0
    if not known.any():
        return float("nan")
    return float(np.mean(np.argmax(logits, axis=-1)[known] == expected.samples.labels[known]))


def known(number: float) -> float | None:
    """A number for a report; JSON has no NaN."""
    return None if np.isnan(number) else number


def as_json(parity: Parity) -> dict:
    """The numbers for a report."""
    return {name: known(number) for name, number in dataclasses.asdict(parity).items()}


def check_share(share: float) -> None:
    """Raise UserError unless it is a share of images."""
    if not 0.0 <= share <= 1.0:
        raise UserError(f"--max-disagreement is a share of images, 0 to 1, but is {share}; give 0.02 or so.")


def require_equal(name: str, parity: Parity) -> None:
    """Raise ParityError unless the logits are those of the model to float rounding."""
    if not parity.max_abs_diff <= parity.tolerance:  # NaN is not below it either
        raise ParityError(
            f"The logits of the {name} differ from the model's by up to {parity.max_abs_diff:.3g}, more than "
            f"{parity.tolerance:.3g} on {parity.num_images} images, so it was not kept."
        )


def require_agreement(name: str, parity: Parity, largest_disagreement: float = LARGEST_DISAGREEMENT) -> None:
    """Raise ParityError unless nearly all images fall into the class that the model gives them."""
    disagreeing = parity.num_images - round(parity.agreement * parity.num_images)
    allowed = max(1, int(largest_disagreement * parity.num_images))
    if disagreeing > allowed or not np.isfinite(parity.max_abs_diff):
        raise ParityError(
            f"The {name} disagrees with the model on {disagreeing} of {parity.num_images} images, and by up to "
            f"{parity.max_abs_diff:.3g} in a logit; at most {allowed} may differ, so it was not kept."
        )


def as_table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> str:
    """Rows of text in columns, for the terminal."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)

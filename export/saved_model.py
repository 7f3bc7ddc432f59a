"""A model as a SavedModel for TF Serving: OUTPUT/<version>/, checked against the Keras model before it is there.

    python -m export.saved_model --run runs/demo --output served

Signatures (K classes, B images, any number of them, none included):
    serving_default  image_bytes (B,) JPEG, PNG, BMP or GIF files of any size, decoded, resized and normalised in the
                     graph -> probabilities (B, K), and of the five likeliest classes, likeliest first: classes (B, 5)
                     their numbers, labels (B, 5) their names, scores (B, 5) their probabilities
    image_tensor     image (B, H, W, C) float32 in the model's range -> logits (B, K), probabilities (B, K)
"""

import dataclasses
import errno
import os
import pathlib
import tempfile
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from export import parity
from keras_vit import UserError, cli, preprocessing_of, run_directory
from keras_vit.run_directory import Samples

_TOP = 5


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Export the model of a run as a SavedModel for TF Serving, and check it."""

    run: str
    """Run directory."""
    output: str
    """Directory of the model's versions; the next number is added."""


class Servable(tf.Module):
    """What a SavedModel holds beside its signatures: the bare variables, and the labels.

    Tracking the Keras model as well would store every weight twice.
    """

    def __init__(self, model: keras.Model, labels: Sequence[str], labels_file: str):
        super().__init__()
        self.weights = [weight.value for weight in model.weights]
        self.labels = tf.constant(list(labels))
        self.labels_file = tf.saved_model.Asset(labels_file)


def _signatures(model: keras.Model, labels: tf.Tensor) -> dict:
    """Concrete functions over the variables of the model; closures, because default arguments cannot be saved."""
    preprocessing = preprocessing_of(model)
    shape = (*preprocessing.image_size, preprocessing.channels)
    top = min(_TOP, labels.shape[0])

    @tf.function(input_signature=[tf.TensorSpec((None, *shape), tf.float32, name="image")])
    def image_tensor(image):
        logits = tf.cast(model(image, training=False), tf.float32)
        return {"logits": logits, "probabilities": tf.nn.softmax(logits)}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, name="image_bytes")])
    def serving_default(image_bytes):
        spec = tf.TensorSpec(shape, tf.float32)
        pixels = tf.map_fn(lambda data: parity.decode(data, preprocessing), image_bytes, fn_output_signature=spec)
        probabilities = image_tensor(preprocessing.normalize(pixels))["probabilities"]
        scores, classes = tf.math.top_k(probabilities, top)
        return {
            "probabilities": probabilities,
            "classes": classes,
            "labels": tf.gather(labels, classes),
            "scores": scores,
        }

    return {
        "serving_default": serving_default.get_concrete_function(),
        "image_tensor": image_tensor.get_concrete_function(),
    }


def export_saved_model(
    model: keras.Model, labels: Sequence[str], samples: Samples, output: pathlib.Path
) -> tuple[pathlib.Path, parity.Parity]:
    """Write the next version below `output` and return its path and its differences from the Keras model.

    Both signatures are checked on the samples after a fresh load; when they differ from the model beyond float
    rounding, UserError is raised and nothing is kept.
    """
    run_directory.check_classes(model, labels)
    run_directory.check_output(output)
    expected = parity.reference(model, preprocessing_of(model), samples)
    with run_directory.staged(output) as stage, tempfile.TemporaryDirectory() as assets:
        version = 1 + max((int(entry.name) for entry in output.iterdir() if entry.name.isdecimal()), default=0)
        labels_file = pathlib.Path(assets) / run_directory.LABELS
        labels_file.write_text(run_directory.labels_text(labels), encoding="utf-8")
        servable = Servable(model, labels, str(labels_file))
        save(servable, stage / str(version), _signatures(model, servable.labels))
        difference = verify(stage / str(version), expected)
    return output / str(version), difference


def save(module: tf.Module, path: pathlib.Path, signatures: dict) -> None:
    """tf.saved_model.save with the OSError for a full disk, for which TensorFlow has an error of its own."""
    try:
        tf.saved_model.save(module, path, signatures=signatures)
    except tf.errors.ResourceExhaustedError as error:
        full = os.strerror(errno.ENOSPC)
        if full not in error.message:
            raise
        raise OSError(errno.ENOSPC, full, str(path)) from error


def verify(path: pathlib.Path, expected: parity.Reference) -> parity.Parity:
    """Load a SavedModel afresh and compare both signatures with the Keras model. Raises UserError if they differ."""
    loaded = tf.saved_model.load(path)
    logits, probabilities = [], []
    for files, images in expected.batches():
        logits.append(loaded.signatures["image_tensor"](image=tf.constant(images))["logits"])
        probabilities.append(loaded.signatures["serving_default"](image_bytes=tf.constant(files))["probabilities"])
    difference = parity.compare(expected, np.concatenate(logits))
    parity.require_equal("SavedModel", difference)
    from_bytes = np.abs(np.concatenate(probabilities) - tf.nn.softmax(expected.logits)).max()
    if not from_bytes <= parity.FLOAT_TOLERANCE:
        raise UserError(
            f"The SavedModel's probabilities of encoded images differ from the model's by {from_bytes:.3g}, more than "
            f"{parity.FLOAT_TOLERANCE:g}, so it was not kept."
        )
    return difference


def directory_bytes(path: pathlib.Path) -> int:
    """Size of all files below a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m export.saved_model")
    model, labels = run_directory.load(parsed.run)
    samples = Samples.load(run_directory.find(parsed.run, run_directory.SAMPLES))
    path, difference = export_saved_model(model, labels, samples, pathlib.Path(parsed.output))
    print(
        f"{path}: {directory_bytes(path):,} bytes; logits within {difference.max_abs_diff:.2g} of the Keras model on "
        f"{difference.num_images:,} images, accuracy {difference.accuracy:.4f}."
    )


if __name__ == "__main__":
    cli.run(main)

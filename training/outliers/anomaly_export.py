"""A model of good parts as a SavedModel: image files in, score and map out."""

import pathlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing
from keras_vit.errors import ParityError
from keras_vit.files.atomic import atomic_folder

# Largest difference that rounding explains, relative to the largest score or to 1. Distances are roots, which double
# the relative error of a small square.
_TOLERANCE = 1e-3
_COMPARED = 4


def export_anomaly(
    model: keras.Model,
    preprocessing: Preprocessing,
    threshold: float,
    files: Sequence[pathlib.Path],
    output: pathlib.Path,
) -> None:
    """Write a SavedModel, compared with the model on some of the files before it is renamed.

    Its signature takes `image_bytes` (B,), image files of any size, and returns `score` (B,), `map` (B, height, width)
    of the whole picture at the model's size, and `defect` (B,) bool. Raises ParityError if it differs by more than
    rounding.
    """
    shape = (*preprocessing.image_size, preprocessing.channels)

    def read(data: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.cast(preprocessing.read(data), tf.float32), shape)

    def serve(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        pixels = tf.map_fn(read, image_bytes, fn_output_signature=tf.TensorSpec(shape, tf.float32))
        found = model(preprocessing.normalize(pixels), training=False)
        return {**found, "defect": found["score"] > threshold}

    with atomic_folder(output) as folder:
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("serving_default", serve, [tf.TensorSpec((None,), tf.string, name="image_bytes")])
        archive.write_out(str(folder), verbose=False)
        signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
        for file in files[:_COMPARED]:
            data = file.read_bytes()
            expected = model.predict_on_batch(np.asarray(preprocessing.normalize(read(tf.constant(data))[None])))
            found = signature(image_bytes=tf.constant([data]))
            for name in ("score", "map"):
                difference = float(np.abs(found[name].numpy() - expected[name]).max())
                if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected[name]).max())):
                    raise ParityError(
                        f"The {name} of {file.name} by the SavedModel differs from the model's by {difference:.3g}, "
                        "more than rounding, so it was not kept."
                    )

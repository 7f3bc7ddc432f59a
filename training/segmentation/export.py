"""A segmentation model as a SavedModel: images of any size in, a mask of the same size out."""

import pathlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_vit import preprocessing_of
from keras_vit.errors import ParityError
from keras_vit.files.atomic import atomic_folder
from keras_vit.files.labels import labels_text
from keras_vit.run_directory import LABELS
from training.segmentation.scenes import Scenes, as_input

# Largest difference of logits that rounding explains, relative to the largest of them or to 1.
_TOLERANCE = 1e-4
_SAMPLES = 4


def export_segmenter(model: keras.Model, scenes: Scenes, output: pathlib.Path, labels: Sequence[str]) -> None:
    """Write a SavedModel to a new folder, unless there is one; it is compared with the model before it is renamed.

    Its signature takes `image`, uint8 (B, h, w, C) of any size, and returns `mask`, uint8 (B, h, w), and `logits`,
    float32 (B, h, w, K), at the model's size.

    Raises ParityError if it differs from the model by more than rounding.
    """
    if output.exists():
        return
    preprocessing = preprocessing_of(model)
    height, width = preprocessing.image_size

    def serve(image: tf.Tensor) -> dict[str, tf.Tensor]:
        resized = tf.image.resize(tf.cast(image, tf.float32), (height, width))
        logits = tf.cast(model(preprocessing.normalize(resized), training=False), tf.float32)
        mask = tf.argmax(tf.image.resize(logits, tf.shape(image)[1:3]), axis=-1)
        return {"mask": tf.cast(mask, tf.uint8), "logits": logits}

    spec = tf.TensorSpec((None, None, None, preprocessing.channels), tf.uint8, name="image")
    with atomic_folder(output) as folder:
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("serving_default", serve, [spec])
        archive.write_out(str(folder), verbose=False)
        (folder / "assets").mkdir(exist_ok=True)
        (folder / "assets" / LABELS).write_text(labels_text(labels), encoding="utf-8")
        _compare(model, scenes, folder)
    print(f"SavedModel in {output}.")


def _compare(model: keras.Model, scenes: Scenes, folder: pathlib.Path) -> None:
    """Raise ParityError if the SavedModel differs from the model on evaluation images."""
    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    preprocessing = preprocessing_of(model)
    for number, (image, _) in enumerate(scenes.in_order().take(_SAMPLES)):
        expected = model.predict_on_batch(as_input(image, preprocessing)[None])
        found = signature(image=preprocessing.to_channels(image)[None])["logits"].numpy()
        difference = float(np.abs(found - expected).max())
        if not difference <= _TOLERANCE * max(1.0, float(np.abs(expected).max())):
            raise ParityError(
                f"The SavedModel's logits of {scenes.name(number)} differ from those of the model by {difference:.3g}, "
                "more than rounding, so it was not kept."
            )

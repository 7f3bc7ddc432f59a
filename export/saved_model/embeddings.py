"""Exports the embeddings of a model as a SavedModel with the signature `embed`, and verifies it.

embed         image_bytes (B,) image files of any size -> embeddings (B, D)
embed_tensor  image (B, h, w, C) float32 in the model's range -> embeddings (B, D)
"""

import pathlib

import keras
import numpy as np
import tensorflow as tf

from export import parity, report
from export.embeddings import embedding_model, facts_of, reference_of, require_same_direction
from export.files import directory_bytes, save_module
from export.inference_model import inference_model
from export.saved_model.export import put_as_next_version
from export.saved_model.image_decoding import decode_batch
from export.saved_model.signatures import describe
from export.source import Provenance
from keras_vit import preprocessing_of
from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name
from keras_vit.run_directory import Samples


def export_embeddings(
    model: keras.Model,
    samples: Samples,
    output: pathlib.Path,
    *,
    origin: Provenance | None = None,
    normalize: bool = False,
) -> tuple[pathlib.Path, parity.Parity]:
    """Write the next version to `output`. Returns its path and its differences from the Keras model.

    The SavedModel is loaded again and run on all samples, as tensors and as files. Raises ParityError, and writes
    nothing, if it differs by more than rounding.

    Args:
        model: with or without a head.
        samples: images to verify it on.
        output: directory of the versions.
        origin: of the model.
        normalize: whether embeddings have length 1.
    """
    origin = origin or Provenance()
    model = embedding_model(model, normalize=normalize)
    expected = reference_of(model, samples)
    with staged(output) as stage:
        version = stage / "version"
        _write(inference_model(model, for_tensorflow=True), version)
        loaded = tf.saved_model.load(version)
        embed, embed_tensor = (loaded.signatures[name] for name in ("embed", "embed_tensor"))
        from_files, from_tensors = [], []
        for files, images in expected.batches():
            from_files.append(embed(image_bytes=tf.constant(files))["embeddings"].numpy())
            from_tensors.append(embed_tensor(image=tf.constant(images))["embeddings"].numpy())
        found = parity.compare(expected, np.concatenate(from_tensors))
        parity.require_equal("SavedModel", found)
        parity.require_equal("SavedModel with encoded images", parity.compare(expected, np.concatenate(from_files)))
        cosine = require_same_direction("SavedModel", expected, np.concatenate(from_tensors))
        facts = facts_of(origin, "SavedModel of embeddings", [("SavedModel", found, cosine, directory_bytes(version))])
        title = f"Embeddings of {short_name(origin.name)} as SavedModel"
        report.write(
            version, title, facts, tables=[_table(found, cosine)], panels={"smallest cosine": {"SavedModel": cosine}}
        )
        return put_as_next_version(version, output), found


def _table(found: parity.Parity, cosine: float) -> report.Table:
    rows = [("largest difference", f"{found.max_abs_diff:.3g}"), ("smallest cosine", f"{cosine:.6f}")]
    return "Differences from the Keras model", ("measure", "value"), rows


def _write(model: keras.Model, path: pathlib.Path) -> None:
    preprocessing = preprocessing_of(model)
    shape = (*preprocessing.image_size, preprocessing.channels)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.float32, name="image")])
    def embed_tensor(image):
        return {"embeddings": model(tf.ensure_shape(image, (None, *shape)), training=False)}

    @tf.function(autograph=False, input_signature=[tf.TensorSpec(None, tf.string, name="image_bytes")])
    def embed(image_bytes):
        return embed_tensor(decode_batch(tf.ensure_shape(image_bytes, (None,)), preprocessing))

    module = tf.Module()
    module.weights = [weight.value for weight in model.weights]
    functions = {"embed": embed.get_concrete_function(), "embed_tensor": embed_tensor.get_concrete_function()}
    save_module(module, path, functions)
    describe(path, shape)

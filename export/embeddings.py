"""A model whose output are the embeddings of images, for exports without classes, and how such exports are verified."""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np

from export import parity
from export.inference_model import in_dtype
from export.source import Provenance
from keras_vit import UserError, intermediates, preprocessing_of
from keras_vit.errors import ParityError
from keras_vit.inspection.relevance import classifies
from keras_vit.models.build import classifier_head
from keras_vit.run_directory import Samples

# Smallest cosine of an embedding with rounded weights and that of the model.
_LEAST_COSINE = 0.99


def embedding_model(model: keras.Model, *, normalize: bool = False) -> keras.Model:
    """The model up to what its head reads, or to the projection of CLIP: images (B, h, w, C) -> (B, D).

    normalize: whether to divide each embedding by its length.
    """
    if classifier_head(model) is not None and classifies(model):
        model = intermediates(model, "pre_logits")
    if len(model.output_shape) != 2:
        raise UserError(
            f"The model ends with all tokens, of shape {model.output_shape}; an export of embeddings needs one vector "
            "per image."
        )
    output = keras.layers.UnitNormalization(name="unit_length")(model.output) if normalize else model.output
    return keras.Model(model.input, output, name=model.name)


def reference_of(model: keras.Model, samples: Samples) -> parity.Reference:
    """The embeddings (n, D) of the sample images by the Keras model, as `Reference.logits`."""
    without_classes = dataclasses.replace(samples, labels=np.full(len(samples.encoded), -1))
    return parity.reference(in_dtype(model, "float32"), preprocessing_of(model), without_classes)


def require_same_direction(name: str, expected: parity.Reference, found: np.ndarray) -> float:
    """The smallest cosine of the embeddings (n, D) of an artifact and the model. Raises ParityError if it is too small.

    name: of the artifact.
    """
    products = np.sum(expected.logits * found, axis=1, dtype=np.float64)
    lengths = np.linalg.norm(expected.logits, axis=1) * np.linalg.norm(found, axis=1)
    cosine = float(np.min(products / np.maximum(lengths, 1e-30)))
    if not cosine >= _LEAST_COSINE:
        raise ParityError(
            f"An embedding of the {name} has the cosine {cosine:.4f} with that of the model, below {_LEAST_COSINE}, so "
            "it was not kept."
        )
    return cosine


def facts_of(origin: Provenance, artifact: str, found: Sequence[tuple[str, parity.Parity, float, int]]) -> dict:
    """The content of report.json: for each file its name, differences, smallest cosine and bytes."""
    return {
        "artifact": artifact,
        **{key: value for key, value in origin.as_json().items() if key in ("model", "weights", "license")},
        "images_from": origin.images,
        "files": {
            name: {"max_abs_diff": difference.max_abs_diff, "least_cosine": cosine, "bytes": size}
            for name, difference, cosine, size in found
        },
    }

"""A model whose outputs are the embeddings of images, as exports without classes write and verify it."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import keras
import numpy as np

from export.options import Embeddings, SourceOptions
from export.source import ExportedModel, open_without_classes
from export.tasks import Measures, Outputs, Task, largest_difference
from keras_vit import UserError, intermediates
from keras_vit.errors import ParityError
from keras_vit.inspection.relevance import classifies
from keras_vit.models.build import classifier_head
from keras_vit.runs import Run

# Smallest cosine of an embedding with rounded weights and that of the model.
_LEAST_COSINE = 0.99


@dataclasses.dataclass(frozen=True)
class Embedding(Task):
    """What the head of a model reads, or the projection of CLIP. Output: embeddings (B, D)."""

    normalize: bool = False
    """Whether each embedding is divided by its length."""
    noun = "embeddings"
    all_tokens = False
    columns: ClassVar = {"max_abs_diff": "largest difference", "least_cosine": "smallest cosine"}

    def network(self, model: keras.Model) -> keras.Model:
        output = keras.layers.UnitNormalization(name="unit_length")(model.output) if self.normalize else model.output
        return keras.Model(model.input, {"embeddings": output}, name=model.name)

    def measure(self, artifact: str, expected: Sequence[Outputs], found: Sequence[Outputs], *, exact: bool) -> Measures:
        difference = largest_difference(artifact, expected, found, "embeddings", exact=exact)
        ours, theirs = (np.stack([outputs["embeddings"] for outputs in each]) for each in (expected, found))
        products = np.sum(ours * theirs, axis=1, dtype=np.float64)
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosine = float(np.min(products / np.maximum(lengths, 1e-30)))
        if not cosine >= _LEAST_COSINE:
            raise ParityError(
                f"An embedding of the {artifact} has the cosine {cosine:.4f} with that of the model, below "
                f"{_LEAST_COSINE}, so it was not kept."
            )
        return {"max_abs_diff": difference, "least_cosine": cosine}

    def sentence(self, measures: Measures) -> str:
        return f"embeddings within {measures['max_abs_diff']:.2g} of the Keras model"


def open_embedding(run: Run, options: SourceOptions, kind: Embeddings) -> Embedding:
    """The embeddings of the model of a run or checkpoint."""
    return embedding_of(open_without_classes(run, options), normalize=kind == "unit-length")


def embedding_of(exported: ExportedModel, *, normalize: bool = False) -> Embedding:
    """The embeddings of a model with or without a head. Raises UserError if it ends with all tokens."""
    model = exported.model
    if classifier_head(model) is not None and classifies(model):
        model = intermediates(model, "pre_logits")
    if len(model.output_shape) != 2:
        raise UserError(
            f"The model ends with all tokens, of shape {model.output_shape}; an export of embeddings needs one vector "
            "per image."
        )
    return Embedding(dataclasses.replace(exported, model=model), normalize)

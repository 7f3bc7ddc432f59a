"""Exports of models in memory, with the options of the commands."""

import pathlib
from collections.abc import Sequence

import keras
import numpy as np

import keras_vit
from export.onnx.export import export_onnx
from export.options import OnnxOptions, SavedModelOptions, SourceOptions, TFLiteOptions
from export.saved_model.export import export_saved_model
from export.source import ExportedModel, Provenance
from export.tasks import Classification, Measures
from export.tflite.export import export_tflite
from keras_vit import Preprocessing, ViTConfig
from keras_vit.images.files import Samples
from tests.support import encoded, randomize

LABELS = ("wren", "ant", "Żubr", "bee", "newt", "eel", "cod")  # in no order of their own
CONFIG = ViTConfig(patch_size=(4, 6), hidden_size=48, num_layers=2, num_heads=3, mlp_dim=64)
SIZE = (12, 30)


def exported_model(
    model: keras.Model, labels: Sequence[str], samples: Samples, origin: Provenance | None = None
) -> ExportedModel:
    """What exports take."""
    return ExportedModel(model, tuple(labels), samples, origin or Provenance())


def model_of_five(origin: Provenance | None = None) -> ExportedModel:
    """A small model of five classes with seven images."""
    photos = np.random.default_rng(0).integers(0, 256, (7, 12, 18, 3), np.uint8)
    config = ViTConfig(patch_size=(4, 6), hidden_size=24, num_layers=1, num_heads=3, mlp_dim=32)
    model = randomize(keras_vit.build(config, preprocessing=Preprocessing((12, 18)), num_classes=5))
    return exported_model(model, "abcde", Samples(tuple(map(encoded, photos)), np.full(7, -1)), origin)


def saved_model_of(model, labels, samples, output, *, origin=None, **options) -> tuple[pathlib.Path, Measures]:
    """Export it as a SavedModel."""
    chosen = SavedModelOptions(SourceOptions("a model"), str(output), **options)
    return export_saved_model(Classification(exported_model(model, labels, samples, origin)), chosen)


def tflite_of(model, labels, samples, output, formats, *, origin=None, calibration=None, **options) -> dict:
    """Export it as TFLite files."""
    chosen = TFLiteOptions(SourceOptions("a model"), str(output), tuple(formats), **options)
    return export_tflite(Classification(exported_model(model, labels, samples, origin)), chosen, calibration)


def onnx_of(model, labels, samples, output, *, origin=None, **options) -> tuple[pathlib.Path, Measures]:
    """Export it as an ONNX file."""
    chosen = OnnxOptions(SourceOptions("a model"), str(output), **options)
    return export_onnx(Classification(exported_model(model, labels, samples, origin)), chosen)

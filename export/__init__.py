"""Exports models to SavedModel, TFLite, ONNX and OpenVINO, and verifies each export against the Keras model."""

import keras_vit  # noqa: F401  (lets Keras know the layers as soon as it is imported)

"""Exports models to SavedModel, TFLite and ONNX, and verifies each export against the Keras model.

`export.to_saved_model` and `export.to_tflite` are for scripts in Keras.
"""

from typing import TYPE_CHECKING

import keras_vit  # noqa: F401  (lets Keras know the layers as soon as it is imported)
from keras_vit.lazy_imports import public_names

if TYPE_CHECKING:
    from export.from_keras import to_saved_model, to_tflite
else:
    __getattr__, __dir__ = public_names(globals())

__all__ = ["to_saved_model", "to_tflite"]

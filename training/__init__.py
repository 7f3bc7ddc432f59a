"""Data, recipes, model.fit and evaluation. Read `pretrain.py` first, then `loop/pretrain.py` and `loop/plan.py`.

`training.dataset` and `training.evaluate_model` are for scripts in Keras.
"""

from typing import TYPE_CHECKING

import keras_vit  # noqa: F401  (lets Keras know the layers as soon as it is imported)
from keras_vit.lazy_imports import public_names

if TYPE_CHECKING:
    from training.data.sources import dataset
    from training.evaluation.evaluate import evaluate_model
else:
    __getattr__, __dir__ = public_names(globals())

__all__ = ["dataset", "evaluate_model"]

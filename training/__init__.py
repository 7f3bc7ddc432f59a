"""Data, recipes, model.fit and evaluation. Read `pretrain.py` first, then `loop/pretrain.py` and `loop/setup.py`."""

import keras_vit  # noqa: F401  (lets Keras know the layers as soon as it is imported)

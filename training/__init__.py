"""Data, recipes, model.fit and evaluation. Read `pretrain.py` first, then `loop/pretrain.py` and `loop/setup.py`."""

import keras_vit  # noqa: F401  (before tensorflow: it silences the messages that TensorFlow prints on import)

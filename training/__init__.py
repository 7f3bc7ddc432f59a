"""Data, recipes, model.fit and evaluation. Start reading at `pretrain.py`, then `command.py`."""

import keras_vit  # noqa: F401  (before tensorflow, whose remarks on loading it keeps from the terminal)

"""Deployable artifacts and the proof that each is the model. Start reading at `saved_model.py`."""

import keras_vit  # noqa: F401  (before tensorflow, whose remarks on loading it keeps from the terminal)

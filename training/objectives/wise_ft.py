"""WiSE-FT: the mean of the weights before and after fine-tuning, which keeps more of what the checkpoint knew.

"Robust fine-tuning of zero-shot models" (arXiv 2109.01903), equation 1. A share of 0.5 is the paper's choice where
nothing else is known.
"""

import keras
import numpy as np

from keras_vit.checkpoints.load import weights_by_key
from training.loop.devices.jax_devices import whole


class AveragedWithStart(keras.callbacks.Callback):
    """At the end of training, replace the weights by their mean with those that the training began with.

    It changes no checkpoint, so a run that continues behind its last step averages once, too.

    Args:
        share: of the trained weights, 0 to 1.
    """

    def __init__(self, share: float):
        super().__init__()
        self.share = share
        self._start: dict[str, np.ndarray] = {}

    def remember(self, model: keras.Model) -> None:
        """Keep the weights of a model before its training."""
        self._start = {key: whole(variable) for key, variable in weights_by_key(model).items()}

    def on_train_end(self, logs=None):
        network, averages = self.model.network, self.model.ema
        averaged = {id(weight): average for weight, average in zip(network.trainable_variables, averages, strict=False)}
        for key, variable in weights_by_key(network).items():
            trained = averaged.get(id(variable), variable)
            trained.assign(self.share * whole(trained) + (1.0 - self.share) * self._start[key])

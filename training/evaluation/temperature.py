"""Temperature scaling: one number that divides the logits, so that probabilities agree with frequencies.

"On Calibration of Modern Neural Networks" (arXiv 1706.04599), section 4.2. The predicted classes stay the same.
"""

import numpy as np

from keras_vit import UserError
from keras_vit.scores import Scoring, softmax
from training.evaluation.metrics import expected_calibration_error, log_loss

# Temperatures that are considered.
_LOWEST, HIGHEST_TEMPERATURE = 0.05, 20.0
_HALVINGS = 60


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature with the lowest mean negative log-likelihood.

    The likelihood is concave in 1 / temperature, so halving an interval around the root of its derivative finds it.

    Args:
        logits: (n, K), finite.
        labels: (n,) class numbers.

    Raises UserError if no temperature is best: without a mistake in the images a lower one is always better.
    """
    if not np.isfinite(logits).all():
        raise UserError("Calibration needs finite logits, but some classes have probability 0; use the model itself.")
    logits = logits.astype(np.float64)
    own = logits[np.arange(len(labels)), labels]
    low, high = 1.0 / HIGHEST_TEMPERATURE, 1.0 / _LOWEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if np.mean((softmax(logits * middle) * logits).sum(axis=-1) - own) < 0.0:  # the loss still falls
            low = middle
        else:
            high = middle
    temperature = float(2.0 / (low + high))
    if (own >= logits.max(axis=-1)).all() or temperature < 1.01 * _LOWEST:
        raise UserError(
            f"Calibration needs images that the model gets wrong, but nearly all {len(labels)} are right; evaluate on "
            "more or other images, or leave --calibrate out."
        )
    return temperature


def calibration(logits: np.ndarray, labels: np.ndarray) -> dict:
    """The content of temperature.json: the temperature, and log loss and calibration error without and with it."""
    temperature = fit_temperature(logits, labels)
    found: dict = {"temperature": temperature, "num_examples": len(labels)}
    for name, divisor in (("before", 1.0), ("after", temperature)):
        probabilities = Scoring(divisor).probabilities(logits)
        found[name] = {
            "log_loss": log_loss(probabilities, labels),
            "ece": expected_calibration_error(probabilities, labels),
        }
    return found

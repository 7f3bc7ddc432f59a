"""Decide by the promise of a model, from its logits. Needs NumPy alone, and promise.json of the run beside this file.

Exports of a run with a promise write both files beside the model, for programs that run it.
"""

import json
import pathlib

import numpy as np


def decide(logits, folder=None):
    """Return decisions by name: answered (n,) and label_set (n, K) bool, as far as they are promised.

    Args:
        logits: (n, K), as the model gives them.
        folder: of promise.json. Default: that of this file.
    """
    file = pathlib.Path(folder or pathlib.Path(__file__).parent) / "promise.json"
    promise = json.loads(file.read_text(encoding="utf-8"))
    logits = np.asarray(logits, np.float64) / promise["temperature"]
    if promise["multi_label"]:
        probabilities = np.exp(-np.logaddexp(0.0, -logits))
    else:
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probabilities = powers / powers.sum(axis=-1, keepdims=True)
    probabilities = probabilities.astype(np.float32)
    highest = probabilities.max(axis=-1, keepdims=True)
    decisions = {}
    if promise["max_error"] is not None:  # else a person decides
        decisions["answered"] = highest[:, 0] >= np.float32(promise["answer_from"])
    if promise["coverage"] is not None:  # the classes that are listed
        listed = probabilities >= np.float32(promise["listed_from"])
        decisions["label_set"] = listed | (probabilities >= highest) & (not promise["multi_label"])
    return decisions

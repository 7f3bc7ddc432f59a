"""Whether an image belongs to none of a model's classes: a score of its features and logits, and a threshold.

The score is a function on `keras.ops`, so that a SavedModel and a TFLite file compute the same.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from keras_vit.errors import reading
from keras_vit.files.npz import read_npz, write_npz

if TYPE_CHECKING:
    import keras

UnknownKind = Literal["max-logit", "energy", "knn", "mahalanobis", "combined"]
KINDS: tuple[UnknownKind, ...] = get_args(UnknownKind)
UNKNOWN = "unknown.npz"
# The output of exported files.
UNKNOWN_SCORE = "unknown_score"
# The cosine of an image and its nearest training images counts at the last of these.
NEIGHBORS = 5
# What each kind needs beside the model.
_ARRAYS: dict[UnknownKind, tuple[str, ...]] = {
    "max-logit": (),
    "energy": (),
    "knn": ("bank",),
    "mahalanobis": ("mean", "whitening", "centers"),
    "combined": ("mean", "whitening", "centers", "scales"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class UnknownScorer:
    """Scores how little an image looks like the classes of a model; `keras-vit unknown` fits one."""

    kind: UnknownKind
    """max-logit: minus the largest logit (arXiv 1911.11132). energy: minus log sum exp of the logits (2010.03759). knn:
    1 minus the cosine of the features with the 5th nearest training image (2204.06507). mahalanobis: distance of the
    features to the nearest class center under one shrunk covariance (1807.03888).
    combined: the sum of energy and mahalanobis, each in standard deviations of training images."""
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """knn: "bank" (n, D), features of training images of length 1. mahalanobis: "mean" (D,), "whitening" (D, D) and
    "centers" (K, D), the class centers after both. combined: the same, and "scales" (4,): mean and standard deviation
    of energy and of distance. float32."""
    threshold: float = np.inf
    """An image with a larger score is unknown."""
    false_alarms: float = 0.05
    """The share of images of the classes that exceed the threshold, as it was asked for."""
    model_checksum: int = 0
    """CRC-32 of the file of the model to whose features it was fitted."""
    auroc: tuple[float, ...] = ()
    """Of each of `KINDS`: the area under the ROC curve between known and left-out classes, when it was fitted."""

    def score(self, features, logits):
        """Tensors or arrays (B, D) and (B, K) -> a tensor (B,) float32, larger for unknown images."""
        from keras import ops  # lazy: importing Keras takes seconds

        features, logits = ops.cast(features, "float32"), ops.cast(logits, "float32")
        if self.kind == "max-logit":
            return -ops.max(logits, axis=-1)
        energy = -ops.logsumexp(logits, axis=-1)
        if self.kind == "energy":
            return energy
        if self.kind == "knn":
            lengths = ops.sqrt(ops.sum(ops.square(features), axis=-1, keepdims=True))
            cosines = ops.matmul(features / ops.maximum(lengths, 1e-12), np.ascontiguousarray(self.arrays["bank"].T))
            nearest = ops.top_k(cosines, min(NEIGHBORS, len(self.arrays["bank"])))[0]  # (B, 5)
            return 1.0 - ops.min(nearest, axis=-1)
        distance = self._distance(features)
        if self.kind == "mahalanobis":
            return distance
        means, deviations = self.arrays["scales"].reshape(2, 2).T.tolist()
        return (energy - means[0]) / deviations[0] + (distance - means[1]) / deviations[1]

    def _distance(self, features):
        from keras import ops

        mean, whitening, centers = (self.arrays[name] for name in _ARRAYS["mahalanobis"])
        white = ops.matmul(features - mean, whitening)  # (B, D)
        products = ops.matmul(white, np.ascontiguousarray(centers.T))  # (B, K)
        lengths = ops.sum(ops.square(white), axis=-1, keepdims=True)
        squared = lengths - 2.0 * products + np.sum(np.square(centers), axis=-1)
        return ops.sqrt(ops.maximum(ops.min(squared, axis=-1), 0.0))

    def scores(self, model: "keras.Model", batches: Iterable[np.ndarray]) -> np.ndarray:
        """The scores (n,) of batches of a model's inputs (B, h, w, C)."""
        from keras import ops

        network, scores = features_and_logits(model), []
        for images in batches:
            inside = network.predict_on_batch(images)
            scores.append(ops.convert_to_numpy(self.score(inside["pre_logits"], inside["logits"])))
        return np.concatenate(scores)

    @property
    def num_bytes(self) -> int:
        """Size of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def save(self, path: str | os.PathLike) -> None:
        """Write an .npz file of numbers."""
        numbers = {
            "kind": np.array(KINDS.index(self.kind)),
            "threshold": np.array(self.threshold),
            "false_alarms": np.array(self.false_alarms),
            "model_checksum": np.array(self.model_checksum, np.int64),
            "auroc": np.array(self.auroc, np.float64),
        }
        write_npz(path, {**numbers, **self.arrays})


def read_unknown(path: str | os.PathLike) -> UnknownScorer:
    """Read the file that `UnknownScorer.save` writes. Raises UserError for any other."""
    arrays = read_npz(path)
    advice = "write it again by keras-vit unknown"
    with reading(path, "a score for unknown images", KeyError, IndexError, TypeError, advice=advice):
        kind = KINDS[int(arrays["kind"])]
        return UnknownScorer(
            kind,
            {name: arrays[name].astype(np.float32) for name in _ARRAYS[kind]},
            float(arrays["threshold"]),
            float(arrays["false_alarms"]),
            int(arrays["model_checksum"]),
            tuple(arrays["auroc"].tolist()),
        )


def features_and_logits(model: "keras.Model") -> "keras.Model":
    """The model with what its head reads: images (B, h, w, C) -> {"pre_logits": (B, D), "logits": (B, K)}.

    Raises UserError for a model without such a head.
    """
    from keras_vit.models.build import intermediates

    return intermediates(model, ["pre_logits", "logits"])


def threshold_of(scores: np.ndarray, false_alarms: float) -> float:
    """The threshold that a new image like these exceeds with at most this probability, in 0..1.

    The smallest score with rank (n + 1) (1 - false_alarms), as in conformal prediction; with too few scores for that,
    the largest.
    """
    rank = int(np.ceil((len(scores) + 1) * (1.0 - false_alarms)))
    return float(np.sort(scores)[min(rank, len(scores)) - 1])

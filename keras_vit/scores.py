"""From logits to probabilities, ranked classes, and a score of images of none of the classes.

One place for prediction, inspection, evaluation and exports. The score is a function on `keras.ops`, so that a
SavedModel and a TFLite file compute the same.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from keras_vit.errors import UserError, reading
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.remote import to_path
from keras_vit.images.formats import image_files
from keras_vit.promise import ANSWERED, LABEL_SET, Promise

if TYPE_CHECKING:
    import keras

TOP_K = 5  # how many classes of an image are shown, and counted by the top-5 accuracy
_HALF = 0.5  # the probability from which on an image of several classes has a class, unless another is given

UnknownKind = Literal["max-logit", "energy", "knn", "mahalanobis", "combined"]
KINDS: tuple[UnknownKind, ...] = get_args(UnknownKind)
UNKNOWN = "unknown.npz"
UNKNOWN_SCORE = "unknown_score"  # the output of exported files
NEIGHBORS = 5  # the cosine of an image and its nearest training images counts at the last of these
# What each kind needs beside the model.
_ARRAYS: dict[UnknownKind, tuple[str, ...]] = {
    "max-logit": (),
    "energy": (),
    "knn": ("bank",),
    "mahalanobis": ("mean", "whitening", "centers"),
    "combined": ("mean", "whitening", "centers", "scales"),
}


@dataclasses.dataclass(frozen=True)
class RankedClasses:
    """The classes of one image."""

    likeliest: tuple[tuple[str, float], ...]
    """The `TOP_K` most likely classes with their probabilities, in this order; of an image that may have several
    classes, all that reach the threshold if these are more."""
    chosen: tuple[tuple[str, float], ...]
    """Those that count: of an image that may have several classes, only the ones that reach the threshold."""
    is_rejected: bool = False
    """Whether no class reaches the threshold."""
    unknown: float | None = None
    """The score of an image of none of the classes, see `UnknownScorer`; None without one."""
    is_unknown: bool = False
    """Whether this score exceeds its threshold."""
    is_answered: bool | None = None
    """Whether a promise of few errors covers the answer, see `Promise`; None without one."""
    label_set: tuple[str, ...] | None = None
    """The classes among which a promise has the true one, the likeliest first; None without one."""


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How the logits of a model become probabilities and classes."""

    temperature: float = 1.0
    """Divides the logits; see `keras-vit evaluate --calibrate`."""
    threshold: float | None = None
    """An image whose most likely class has a lower probability, 0 to 1, is rejected. Of an image that may have several
    classes, those that reach it count; default 0.5. None: no image is rejected."""
    is_multi_label: bool = False
    """Whether an image may have any number of classes: its probabilities are the sigmoid of the logits, not the
    softmax."""
    promise: Promise | None = None
    """The promise that holds for the answers, if there is one."""

    @property
    def least(self) -> float | None:
        """The threshold, or the default of images that may have several classes."""
        return _HALF if self.threshold is None and self.is_multi_label else self.threshold

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities (n, K) float64 of logits (n, K)."""
        logits = logits.astype(np.float64) / self.temperature
        return sigmoid(logits) if self.is_multi_label else softmax(logits)

    def rank(self, logits: np.ndarray, labels: Sequence[str] = ()) -> tuple[RankedClasses, ...]:
        """Return the classes of each image; of equal probabilities, the first class comes first.

        Args:
            logits: (n, K).
            labels: names of the K classes. Default: their numbers.

        Raises UserError for another number of names.
        """
        if labels and len(labels) != logits.shape[-1]:
            raise UserError(f"The model has {logits.shape[-1]} classes, but there are {len(labels)} class names.")
        names = labels or [f"class {number}" for number in range(logits.shape[-1])]
        probabilities = self.probabilities(logits)
        order = np.argsort(-probabilities, axis=-1, kind="stable")
        decisions = {} if self.promise is None else self.promise.decide(probabilities)
        answered, listed = (np.asarray(decisions[o]) if o in decisions else None for o in (ANSWERED, LABEL_SET))
        return tuple(
            dataclasses.replace(
                self._ranked(probabilities[row, best], [names[k] for k in best]),
                is_answered=None if answered is None else bool(answered[row]),
                label_set=None if listed is None else tuple(names[k] for k in best if listed[row, k]),
            )
            for row, best in enumerate(order)
        )

    def _ranked(self, probabilities: np.ndarray, names: Sequence[str]) -> RankedClasses:
        least = self.least
        num_reaching = len(names) if least is None else int(np.sum(probabilities >= least))
        num_shown = max(TOP_K, num_reaching) if self.is_multi_label else TOP_K
        pairs = tuple((name, float(share)) for name, share in zip(names[:num_shown], probabilities, strict=False))
        return RankedClasses(pairs, pairs[:num_reaching] if self.is_multi_label else pairs, not num_reaching)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return probabilities (n, K) float64. Minus infinity gives 0."""
    logits = logits.astype(np.float64)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return probabilities (n, K) float64, without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))


def predict(
    model: "keras.Model",
    images: str | os.PathLike | bytes | Sequence[str | os.PathLike | bytes],
    *,
    batch_size: int = 32,
) -> list[dict[str, float]]:
    """Classify image files, and return the probability of each class by its name, the most likely class first.

    Args:
        model: built by `keras_vit.build`, with a head.
        images: a file, a folder, or a list of files; the bytes of a file stand for it.
        batch_size: images per forward pass.

    Returns:
        For each image a dict of all classes. Their names are numbers where `keras_vit.classes_of` is None. The
        probabilities sum to 1, unless an image may have several classes.

    Raises UserError for a file that is no image, and for a model without a head.
    """
    from keras_vit.models import build  # lazy: imports Keras

    preprocessing = build.preprocessing_of(model)
    build.check_classifies(model, f"The model {model.name!r}")
    files = [images] if isinstance(images, str | os.PathLike | bytes) else list(images)
    if len(files) == 1 and not isinstance(files[0], bytes) and to_path(files[0]).is_dir():
        files = list(image_files(to_path(files[0])))
    classes, scoring = build.saved_classes(model), Scoring(is_multi_label=build.is_multi_label(model))
    # A model of its logits would be traced anew in each call.
    is_probabilities = build.classifier_activation_of(model) is not None
    network = model if is_probabilities else build.logits_model(model)
    results = list[dict[str, float]]()
    for begin in range(0, len(files), batch_size):
        batch = np.stack([preprocessing(preprocessing.decode(file)) for file in files[begin : begin + batch_size]])
        outputs = np.asarray(network.predict_on_batch(batch))
        rows = outputs if is_probabilities else scoring.probabilities(outputs)
        names = classes.labels if classes else tuple(map(str, range(rows.shape[-1])))
        results += [{names[k]: float(row[k]) for k in np.argsort(-row, kind="stable")} for row in rows]
    return results


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
    """For each of `KINDS` the area under the ROC curve between known and left-out classes, when it was fitted."""

    def score(self, features, logits):
        """Return a tensor (B,) float32, larger for unknown images, of features (B, D) and logits (B, K)."""
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
        """Return the scores (n,) of batches of a model's inputs (B, h, w, C)."""
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
    """Images (B, h, w, C) -> {"pre_logits": (B, D), "logits": (B, K)}. Raises UserError for a model without these."""
    from keras_vit.models.build import intermediates

    return intermediates(model, ["pre_logits", "logits"])


def threshold_of(scores: np.ndarray, false_alarms: float) -> float:
    """Return the threshold that a new image like these exceeds with at most this probability, in 0..1.

    The smallest score with rank (n + 1) (1 - false_alarms), as in conformal prediction; with too few scores for that,
    the largest. It is a little more than that score, so that an export, which rounds otherwise, decides alike.
    """
    rank = int(np.ceil((len(scores) + 1) * (1.0 - false_alarms)))
    score = float(np.sort(scores)[min(rank, len(scores)) - 1])
    return score + 1e-5 * max(1.0, abs(score))

"""From logits to probabilities and ranked classes, in one place for prediction, inspection, evaluation and exports."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_vit.errors import UserError

# How many classes of an image are shown, and counted by the top-5 accuracy.
TOP_K = 5
# The probability from which on an image of several classes has a class, unless another is given.
_HALF = 0.5


@dataclasses.dataclass(frozen=True)
class RankedClasses:
    """The classes of one image."""

    likeliest: tuple[tuple[str, float], ...]
    """The `TOP_K` likeliest classes with their probabilities, the likeliest first; of an image that may have several
    classes, all that reach the threshold if these are more."""
    chosen: tuple[tuple[str, float], ...]
    """Those that count: of an image that may have several classes, only the ones that reach the threshold."""
    is_rejected: bool = False
    """Whether no class reaches the threshold."""
    unknown: float | None = None
    """The score of an image of none of the classes, see `keras_vit/unknown_score.py`; None without one."""
    is_unknown: bool = False
    """Whether this score exceeds its threshold."""


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How the logits of a model become probabilities and classes."""

    temperature: float = 1.0
    """Divides the logits; see `keras-vit evaluate --calibrate`."""
    threshold: float | None = None
    """An image whose likeliest class has a lower probability, 0 to 1, is rejected. Of an image that may have several
    classes, those that reach it count; default 0.5. None: no image is rejected."""
    is_multi_label: bool = False
    """Whether an image may have any number of classes: its probabilities are the sigmoid of the logits, not the
    softmax."""

    @property
    def least(self) -> float | None:
        """The threshold, or the default of images that may have several classes."""
        return _HALF if self.threshold is None and self.is_multi_label else self.threshold

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """(n, K) -> (n, K) float64."""
        logits = logits.astype(np.float64) / self.temperature
        return sigmoid(logits) if self.is_multi_label else softmax(logits)

    def rank(self, logits: np.ndarray, labels: Sequence[str] = ()) -> tuple[RankedClasses, ...]:
        """The classes of each image; of equal probabilities, the first class comes first.

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
        return tuple(
            self._ranked(row[best], [names[k] for k in best]) for row, best in zip(probabilities, order, strict=True)
        )

    def _ranked(self, probabilities: np.ndarray, names: Sequence[str]) -> RankedClasses:
        """Rank probabilities in falling order."""
        least = self.least
        num_reaching = len(names) if least is None else int(np.sum(probabilities >= least))
        num_shown = max(TOP_K, num_reaching) if self.is_multi_label else TOP_K
        pairs = tuple((name, float(share)) for name, share in zip(names[:num_shown], probabilities, strict=False))
        return RankedClasses(pairs, pairs[:num_reaching] if self.is_multi_label else pairs, not num_reaching)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities (n, K) float64. Minus infinity gives 0."""
    logits = logits.astype(np.float64)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Probabilities (n, K) float64, without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))

"""Options of the commands that fit something to frozen features."""

import dataclasses

from training.options.common import FeatureOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewshotOptions(FeatureOptions):
    """Few-shot linear accuracy of frozen features."""

    shots: tuple[int, ...] = (1, 5, 10, 25)
    """Images of each class to learn from."""
    seeds: int = 3
    """How many random choices of them."""
    l2: float = 1024.0
    """Strength of the penalty on the squared weights."""
    sweep: bool = False
    """Instead of --l2 try 2^-10 to 2^19, and take the best on training images that are not among the shots."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProbeOptions(FeatureOptions):
    """Accuracy of logistic regression on frozen features."""

    c: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0, 10.0)
    """Inverse strengths of the penalty to choose from, scikit-learn's C; of a single one nothing is chosen."""
    max_iterations: int = 1000
    """Of the solver (L-BFGS), for each strength."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnnOptions(FeatureOptions):
    """Accuracy of the nearest neighbours among frozen features."""

    neighbors: tuple[int, ...] = (1, 10, 20, 100)
    """How many neighbours vote; each number is a row of the table."""
    temperature: float = 0.07
    """A neighbour votes with exp(cosine / temperature): the smaller, the more the nearest count."""

"""Options of the commands that evaluate frozen features."""

import dataclasses
from typing import Annotated

from keras_vit import UserError
from keras_vit.parser import Count, Positive, Range
from training.options.common import FeatureOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewshotOptions(FeatureOptions):
    """Few-shot linear accuracy of frozen features."""

    shots: tuple[Count, ...] | None = None
    """Training images per class. Default: those of 1, 5, 10 and 25 that every class has."""
    seeds: Count = 3
    """Number of random selections of these images."""
    l2: Positive = 1024.0
    """Strength of the L2 penalty."""
    sweep: bool = False
    """Instead of --l2 try 2^-10 to 2^19, and choose the best on training images outside the shots."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProbeOptions(FeatureOptions):
    """Accuracy of logistic regression on frozen features, and with --workdir a model that consists of both."""

    workdir: str | None = None
    """Directory of a new run: the model with the probe as its head, to predict, evaluate, inspect and export."""

    c: tuple[Positive, ...] = (0.001, 0.01, 0.1, 1.0, 10.0)
    """Inverse strengths of the penalty to choose from, scikit-learn's C; a single value is used as it is."""
    max_iterations: Count = 1000
    """Maximum iterations of the solver (L-BFGS), for each strength."""
    folds: Annotated[int, Range("[2, 100]")] | None = None
    """Also measure by cross-validation in that many stratified folds of all images, copies in one fold; for few
    images, of which a single split says little."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workdir is not None and self.random_weights:
            raise UserError(
                "--random-weights measures an untrained model, which --workdir would save; give one of them."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnnOptions(FeatureOptions):
    """Accuracy of the nearest neighbors among frozen features."""

    neighbors: tuple[Count, ...] = (1, 10, 20, 100)
    """Numbers of neighbors that vote; each is a row of the table."""
    temperature: Positive = 0.07
    """A neighbor votes with exp(cosine / temperature): the smaller, the more the nearest ones count."""

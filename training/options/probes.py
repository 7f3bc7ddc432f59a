"""Options of the commands that evaluate frozen features."""

import dataclasses
import pathlib
from typing import Annotated, Any

from keras_vit.cli.options import Count, Positive, Range
from keras_vit.errors import refuse_without_effect
from keras_vit.files.remote import to_path
from training.options.common import FeatureOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions(FeatureOptions):
    """Options of the probes that a model can be made of."""

    workdir: str | None = None
    """Directory of a new run: the model with the probe as its head, to predict, evaluate, inspect and export."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_effect(self, [(("random_weights",), self.workdir is None, "measurements, without --workdir")])

    @property
    def directory(self) -> pathlib.Path | None:
        """The directory of the new run."""
        return None if self.workdir is None else to_path(self.workdir)

    def settings(self) -> dict[str, Any]:
        """The settings of the probe for config.json of the run."""
        names = ("features", "image_size", "resize", "crop_from")
        return {"source": self.source.settings(), **{name: getattr(self, name) for name in names}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewshotOptions(ProbeOptions):
    """Few-shot linear accuracy of frozen features, and with --workdir a model: that of the most shots, first seed."""

    shots: tuple[Count, ...] | None = None
    """Training images per class. Default: those of 1, 5, 10 and 25 that every class has."""
    seeds: Count = 3
    """Number of random selections of these images."""
    l2: Positive = 1024.0
    """Strength of the L2 penalty."""
    sweep: bool = False
    """Instead of --l2 try 2^-10 to 2^19, and choose the best on training images outside the shots."""

    def settings(self) -> dict[str, Any]:
        """As those of `ProbeOptions`, with the shots and the penalty."""
        shots = None if self.shots is None else list(self.shots)
        return {"command": "fewshot", **super().settings(), "shots": shots, "l2": self.l2, "sweep": self.sweep}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProbeOptions(ProbeOptions):
    """Accuracy of logistic regression on frozen features, and with --workdir a model that consists of both."""

    c: tuple[Positive, ...] = (0.001, 0.01, 0.1, 1.0, 10.0)
    """Inverse strengths of the penalty to choose from, scikit-learn's C; a single value is used as it is."""
    max_iterations: Count = 1000
    """Maximum iterations of the solver (L-BFGS), for each strength."""
    folds: Annotated[int, Range("[2, 100]")] | None = None
    """Also measure by cross-validation in that many stratified folds of all images, copies in one fold; for few
    images, of which a single split says little."""

    def settings(self) -> dict[str, Any]:
        """As those of `ProbeOptions`, with the strengths to choose from."""
        return {"command": "linear_probe", **super().settings(), "c": list(self.c)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnnOptions(FeatureOptions):
    """Accuracy of the nearest neighbors among frozen features. It measures only: the vote needs the features of all
    training images, so no ordinary model computes it; fewshot and linear-probe make models.
    """

    neighbors: tuple[Count, ...] = (1, 10, 20, 100)
    """Numbers of neighbors that vote; each is a row of the table."""
    temperature: Positive = 0.07
    """A neighbor votes with exp(cosine / temperature): the smaller, the more the nearest ones count."""

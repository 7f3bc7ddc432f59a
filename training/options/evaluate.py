"""Options of `training.evaluate`."""

import dataclasses
from typing import Annotated

import tyro

from training.options.common import DataOptions, InputOptions, StrategyOptions


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """Measure a model on the evaluation images of a data set."""

    run: Annotated[str, tyro.conf.arg(aliases=("--checkpoint",))]
    """Run directory, .keras file, checkpoint file or folder, address, official name, SavedModel directory or .tflite
    file."""
    source: Annotated[DataOptions, tyro.conf.arg(name="")]
    batch_size: int = 256
    """Images per forward pass; does not change the metrics."""
    output: str | None = None
    """Directory of the report; default the run directory."""
    real_labels: str | None = None
    """JSON file with a list of accepted class indices for each image, as ImageNet's real.json; images with an empty
    list do not count for this accuracy."""
    save_predictions: bool = False
    """Also write predictions.npz: logits (n, K) and labels (n,)."""
    calibrate: bool = False
    """Fit a temperature to the evaluation images and store it in the run: training.predict and exports of the run then
    divide the logits by it, so that probabilities agree with frequencies."""
    input: Annotated[InputOptions, tyro.conf.arg(name="")] = dataclasses.field(default_factory=InputOptions)
    devices: Annotated[StrategyOptions, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: StrategyOptions("single")
    )

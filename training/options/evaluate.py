"""Options of `keras-vit evaluate`, `keras-vit verify-official` and `keras-vit soup`."""

import dataclasses
from typing import Annotated

from keras_vit.cli.options import Aliases, Count, MayBeEmpty, MayLead, Positional
from keras_vit.errors import refuse_without_effect
from training.options.common import CsvOptions, DataOptions, InputOptions, StrategyOptions


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(CsvOptions):
    """Measure a model on the evaluation images of a data set; without --data, of that which a run was trained on."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, official name, SavedModel directory or .tflite
    file."""
    # Without --data, `training.evaluation.opening.with_data` takes the options of the run.
    source: DataOptions = dataclasses.field(default_factory=lambda: DataOptions(""))
    classes: Annotated[tuple[str, ...] | None, MayBeEmpty()] = None
    """Of a checkpoint with a text tower (CLIP, SigLIP): texts that are its classes, or a .txt file with one in each
    line; alone: the names of the data's classes, with spaces for underscores."""
    templates: tuple[str, ...] | None = None
    """Sentences in which each text replaces {}, whose embeddings are averaged; clip, siglip or a .txt file, as for
    keras-vit predict. Default: the texts as they are."""
    batch_size: Count = 256
    """Images per forward pass; does not change the metrics."""
    output: str | None = None
    """Directory of the report; default the run directory."""
    real_labels: str | None = None
    """JSON file with a list of accepted class indices for each image, as ImageNet's real.json; images with an empty
    list do not count for this accuracy."""
    save_predictions: bool = False
    """Also write predictions.npz: logits (n, K) and labels (n,)."""
    compare: str | None = None
    """Directory of an earlier report on the same images, such as another run: say whether the difference is within the
    noise."""
    calibrate: bool = False
    """Fit a temperature to the evaluation images and store it in the run: keras-vit predict and exports of the run then
    divide the logits by it, so that probabilities agree with frequencies."""
    input: InputOptions = dataclasses.field(default_factory=InputOptions)
    devices: StrategyOptions = dataclasses.field(default_factory=lambda: StrategyOptions("single"))

    def __post_init__(self) -> None:
        refuse_without_effect(self, [(("templates",), self.classes is not None, "--classes")])


@dataclasses.dataclass(frozen=True)
class VerifyOfficialOptions:
    """Compare the accuracy of a published checkpoint on ImageNet with the published one."""

    name: Annotated[str, Positional("NAME")]
    """Official name with a published accuracy, such as imagenet21k+imagenet2012/ViT-B_16-224."""
    source: DataOptions
    batch_size: Count = 256
    """Images per forward pass; does not change the result."""
    devices: StrategyOptions = dataclasses.field(default_factory=lambda: StrategyOptions("single"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoupOptions:
    """Average the weights of runs."""

    runs: Annotated[tuple[str, ...], Positional("RUNS")]
    """Run directories of one architecture and the same classes, fine-tuned from one checkpoint."""
    output: str
    """Run directory of the average."""
    greedy: bool = False
    """Begin with the most accurate run, and keep of the others those that make the average no less accurate, on the
    evaluation images of the runs; train the runs with an --eval-split that is not the test images. Default: average
    all."""

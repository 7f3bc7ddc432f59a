"""Options of the commands that measure runs: `keras-vit evaluate`, `verify-official`, `soup` and `unknown`."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from keras_vit.cli.options import Aliases, Count, MayBeEmpty, MayLead, Positional, Range, Seed
from keras_vit.cli.parser import arguments_of
from keras_vit.errors import refuse_without_effect
from keras_vit.images.resizing import Resize
from keras_vit.scores import UnknownKind
from training.options.common import CsvOptions, DataOptions, FalseAlarms, StrategyOptions

if TYPE_CHECKING:
    from keras_vit import Preprocessing


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """A model's input size, and the preprocessing of a checkpoint or export that does not specify its own."""

    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize the input of a Keras model or checkpoint to; default its own."""
    num_heads: int | None = None
    """Attention heads, if the checkpoint does not specify them."""
    resize: Resize | None = None
    """How images are resized to the model's input; default the model's own, or stretch if it specifies none."""
    crop_from: int | None = None
    """For --resize resize-small: length of the smaller side before the center crop, in pixels; default the
    model's own."""
    value_range: tuple[float, float] | None = None
    """Values that 0 and 255 are mapped to; default the model's own, or -1 1 if it specifies none."""

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def as_typed(self) -> str:
        """Return `, with --image-size 96 96` for the options that are set; "" if none is."""
        typed = " ".join(arguments_of(self))
        return f", with {typed}" if typed else ""

    def preprocessing(self, own: "Preprocessing") -> "Preprocessing":
        """Return a model's own preprocessing with the overrides applied. Raises UserError where they do not fit it."""
        resize = self.resize or own.resize
        refuse_without_effect(self, [(("crop_from",), resize == "resize-small", "--resize resize-small")])
        changes: dict[str, Any] = {"value_range": self.value_range} if self.value_range is not None else {}
        if self.resize is None and self.crop_from is None:
            return dataclasses.replace(own, **changes)
        kept = own.crop_from if own.resize == resize else None
        return own.with_resize(resize, (self.crop_from or kept) if resize == "resize-small" else None, **changes)


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(CsvOptions):
    """Measure a model on the evaluation images of a data set; without --data, of that which a run was trained on."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, official name, SavedModel directory or .tflite
    file."""
    # Without --data, `training.checks.with_data` takes the options of the run.
    source: DataOptions = dataclasses.field(default_factory=lambda: DataOptions(""))
    classes: Annotated[tuple[str, ...] | None, MayBeEmpty()] = None
    """For a checkpoint with a text tower (CLIP, SigLIP): texts that are its classes, or a .txt file with one in each
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
    max_error: Annotated[float, Range("(0, 1)")] | None = None
    """Promise: largest share of wrong answers, 0 to 1, kept with 95% confidence. Fitted to the evaluation images and
    stored in the run: prediction and exports answer only the images that it covers, and leave the others to a
    person."""
    coverage: Annotated[float, Range("(0, 1)")] | None = None
    """Promise, stored likewise: share of images whose class is in a list of classes, 0 to 1; of images of several
    classes each, the mean share of them that is in it."""
    by_class: bool = False
    """Promise --coverage to the images of each class, for longer lists."""
    input: InputOptions = dataclasses.field(default_factory=InputOptions)
    devices: StrategyOptions = dataclasses.field(default_factory=lambda: StrategyOptions("single"))

    def __post_init__(self) -> None:
        applies = [
            (("templates",), self.classes is not None, "--classes"),
            (("by_class",), self.coverage is not None, "--coverage"),
        ]
        refuse_without_effect(self, applies)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnknownOptions:
    """Fit a score that tells images of none of the classes, and store it in the run."""

    run: Annotated[str, MayLead()]
    """Run directory."""
    source: DataOptions
    false_alarms: FalseAlarms = 0.05
    """Share of evaluation images, which are of the classes, that the threshold calls unknown."""
    kind: UnknownKind | None = None
    """The score; default the one that tells left-out classes best, or combined where that is hardly worse."""
    images: Count = 10_000
    """Most training images to fit it to, drawn at random."""
    batch_size: Count = 256
    """Images per forward pass."""
    seed: Seed = 0
    """Seed of the draws."""

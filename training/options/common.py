"""What several commands take, as frozen dataclasses; without TensorFlow and Keras, which `--help` need not wait for."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from keras_vit import UserError
from keras_vit.models.config import Resize

if TYPE_CHECKING:
    from keras_vit import Preprocessing

OnBadImage = Literal["stop", "skip"]
StrategyKind = Literal["auto", "single", "mirrored", "multi-worker", "tpu"]
Precision = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Where the images come from."""

    data: str
    """digits, tfds:NAME[:CONFIG], folder:PATH of class folders or of train and test with class folders, or
    tfrecord:GLOB of the files that training.shard writes."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default TFDS' own."""
    train_split: str = "train"
    """TFDS split to train on, such as train[:90%]."""
    eval_split: str | None = None
    """TFDS split to evaluate on; default test, else validation."""
    on_bad_image: OnBadImage = "stop"
    """What cannot be decoded in a folder or in TFRecord files: name it and stop, or name, count and skip it. To skip in
    TFRecord files, all of them are read once."""


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """Where to compute."""

    strategy: StrategyKind = "auto"
    """single: the first GPU, else the CPU. mirrored: all GPUs of this machine. multi-worker: the machines of TF_CONFIG
    or of a SLURM job. tpu: a Cloud TPU. auto: what there is of these, the largest first."""
    replicas: int | None = None
    """Devices for mirrored; default all GPUs. Without any GPU the CPU is split into so many, to try things out."""
    tpu: str = "local"
    """Name or grpc:// address of the Cloud TPU; local on a TPU VM."""
    worker_timeout: int = 600
    """Seconds to wait for another worker, at the start and in a step; more than saving and evaluating take."""

    def __post_init__(self) -> None:
        for field in ("replicas", "worker_timeout"):
            if getattr(self, field) is not None and getattr(self, field) < 1:
                raise UserError(f"--{field.replace('_', '-')} must be at least 1, but is {getattr(self, field)}.")


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a run is computed."""

    precision: Precision = "float32"
    """Numbers that layers compute with; weights and the update are float32 in any case, float16 scales the loss."""
    evaluate_every: int | None = None
    """Steps between two evaluations, each with its line in metrics.jsonl; default those of an epoch."""
    checkpoint_every: int | None = None
    """Steps between two saved states; default those of the evaluations alone."""
    xla: Literal["auto", "on", "off"] = "auto"
    """Compile the step by XLA: auto where it helps, on a single GPU."""
    steps_per_execution: int = 1
    """Steps between two returns to Python; more help where a step is short, above all on a TPU."""
    remat: bool = False
    """Compute each encoder block a second time for its gradient rather than keep what is inside: less memory."""

    inspect_every: int | None = None
    """Epochs between two looks inside the model, written to the run directory and TensorBoard; default none."""

    def __post_init__(self) -> None:
        for field in ("evaluate_every", "checkpoint_every", "steps_per_execution", "inspect_every"):
            if getattr(self, field) is not None and getattr(self, field) < 1:
                raise UserError(f"--{field.replace('_', '-')} must be at least 1, but is {getattr(self, field)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What every command that trains takes."""

    source: Annotated[DataOptions, tyro.conf.arg(name="")]
    workdir: str
    """Run directory: new, or that of the same command, which then continues. Several workers share it."""
    seed: int = 0
    """Seed of initial weights, order, augmentation and dropout."""
    deterministic: bool = False
    """Repeat bit for bit on a CPU, some per cent slower."""
    dry_run: bool = False
    """Print the whole configuration, the steps, learning rate, operations and memory of the run, and stop."""
    devices: Annotated[StrategyOptions, tyro.conf.arg(name="")] = dataclasses.field(default_factory=StrategyOptions)
    execution: Annotated[Execution, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Execution)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """Of which model and data."""

    run: Annotated[str, tyro.conf.arg(aliases=("--checkpoint",))]
    """Run directory, .keras file, checkpoint file or folder, address, or official name such as augreg:B_16."""
    source: Annotated[DataOptions, tyro.conf.arg(name="")]
    output: str | None = None
    """Directory of the report; default the run directory."""
    random_weights: bool = False
    """Take the model with fresh random weights (seed 0) instead of its own: what its architecture alone gives."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to take the model to; default its own."""
    num_heads: int | None = None
    """Attention heads, where the checkpoint does not tell them."""
    crop_from: int | None = None
    """Stretch pictures to a square of this side in pixels and cut out the centre, as the papers do (256 for models of
    224); default the model's own preprocessing."""
    batch_size: int = 256
    """Images per forward pass."""
    cache: str | None = None
    """Directory of computed features; default features/ in KERAS_VIT_CACHE, else in ~/.cache/keras_vit."""


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """What a model is given, where it does not tell that or other than it tells."""

    image_size: tuple[int, int] | None = None
    """Height and width in pixels to take a Keras model or a checkpoint to; default its own."""
    num_heads: int | None = None
    """Attention heads, where a checkpoint does not tell them."""
    resize: Resize | None = None
    """How pictures are brought to the model's size; default as the model tells, stretch where it does not."""
    crop_from: int | None = None
    """For --resize resize-small: length of the smaller side before the centre is cut out, in pixels."""
    value_range: tuple[float, float] | None = None
    """What 0 and 255 become; default as the model tells, -1 1 where it does not."""

    def preprocessing(self, own: "Preprocessing") -> "Preprocessing":
        """A model's own, but for what was given."""
        changes = {"value_range": self.value_range} if self.value_range is not None else {}
        if self.resize is not None or self.crop_from is not None:
            changes |= {"resize": self.resize or own.resize, "crop_from": self.crop_from}
        return dataclasses.replace(own, **changes)

    def refuse(self, names: Iterable[str], kind: str) -> None:
        """Raise UserError for an option that means nothing to a kind of model."""
        for name in names:
            if getattr(self, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} means nothing to {kind}; leave it out.")

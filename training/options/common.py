"""Options that several commands share, and those of the commands that write data. No TensorFlow or Keras."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from keras_vit.cli.options import Aliases, Count, MayLead, Natural, Positional, Range, Seed, check_ranges
from keras_vit.cli.parser import arguments_of
from keras_vit.errors import refuse_without_effect
from keras_vit.files.remote import to_path
from keras_vit.models.config import identifying_fields
from training.recipes.recipe import Recipe

OnBadImage = Literal["stop", "skip"]
# Names of a split to train on and of one to evaluate on, in the order in which they are looked for.
TRAINING_NAMES = ("train", "training")
EVALUATION_NAMES = ("test", "testing", "val", "valid", "validation")
# Fields of DataOptions that config.json has only where they are set.
_NEWER_OF_DATA = ("split_seed", "exclude")
# What `--group` takes beside a regular expression, and kinds of data without splits of their own.
AUTO, FOLDER, ALONE = "auto", "folder", "none"
DRAWN = ("folder", "csv", "tar")
FOR_SEVERAL_CLASSES = (
    "--loss multi-label is for images of several classes each, from --data csv:FILE with a column labels; leave it out."
)
StrategyKind = Literal["auto", "single", "mirrored", "multi-worker", "tpu"]
Runner = Literal["DirectRunner", "DataflowRunner", "FlinkRunner", "SparkRunner"]
FalseAlarms = Annotated[float, Range("(0, 1)")]
Precision = Literal["float32", "bfloat16", "float16"]

# The file of the lengths of all records, beside TFRecord files.
RECORD_INDEX = "records.npz"
# What the files of a folder that a pipeline fills are of.
PIPELINE = "pipeline.json"
# Folder, inside the output, of the images that cannot be read.
PROBLEMS = "problems"


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Where the images come from."""

    data: str
    """digits, tfds:NAME[:CONFIG], folder:PATH of class folders or of train and test with class folders, csv:FILE with
    the columns path and label (or labels, several classes as cat|dog; or probabilities, as cat=0.7|dog=0.3),
    tfrecord:GLOB of the files that keras-vit shard writes, or tar:GLOB of webdataset's tar files; PATH, FILE and GLOB
    may be in a bucket, as gs://bucket/folder."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default TFDS' own."""
    train_split: str = "train"
    """TFDS split to train on, such as train[:90%]."""
    eval_split: str | None = None
    """TFDS split to evaluate on; default test, else validation."""
    on_bad_image: OnBadImage = "stop"
    """For an image that cannot be decoded, in a folder, TFRecord or tar files: stop: name it and stop; skip: name,
    count and skip it. To skip images in TFRecord or tar files, all files are read once."""
    split_seed: Natural | None = None
    """Without splits, in a folder or CSV file: draw the tenth of each class that is kept for evaluation with this seed;
    default every tenth image by name. Give the same to keras-vit evaluate."""
    exclude: str | None = None
    """decisions.csv of keras-vit review, for a folder or CSV file: its images with the decision drop are left out
    and those with relabel get their new label. Give the same to keras-vit evaluate."""
    group: str = AUTO
    """Without splits, in a folder, CSV or tar files: images that belong together are never on both sides. auto: near
    copies, and bursts of one camera within a minute; folder: also those of one folder; a regular expression on the
    path: also those with the same first group in it, such as a patient; none: each image alone."""

    @property
    def kind(self) -> str:
        """The part before the colon: digits, tfds, folder, csv, tfrecord or tar."""
        return self.data.partition(":")[0]

    @property
    def path(self) -> pathlib.Path:
        """The path of a folder or file."""
        return to_path(self.data.partition(":")[2])

    def arguments(self) -> list[str]:
        return arguments_of(self)

    def settings(self) -> dict[str, Any]:
        """Return the fields as config.json stores them: without what is newer and not set, as runs did before it."""
        fields = dataclasses.asdict(self)
        if self.kind not in DRAWN or self.group == ALONE:
            del fields["group"]
        return {name: value for name, value in fields.items() if value is not None or name not in _NEWER_OF_DATA}

    @classmethod
    def of_settings(cls, fields: dict[str, Any]) -> "DataOptions":
        """Return the options that `settings` stored; runs before there were groups drew each image alone."""
        is_drawn = str(fields["data"]).partition(":")[0] in DRAWN
        return cls(**{**({"group": ALONE} if is_drawn else {}), **fields})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of a command."""

    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, or official name such as augreg:B_16."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to resize the model's input to; default its own."""
    num_heads: int | None = None
    """Attention heads, if the checkpoint does not specify them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnnotatedData:
    """Images with masks or boxes."""

    data: str
    """A kind and a path, such as coco:FILE.json."""
    images: str | None = None
    """Folder of the images, for data whose file names them; default that of the file."""
    allow_outside: bool = False
    """Read images that the annotations name outside of the folder of --data or --images, also by links. Give it only
    for annotations that you trust."""
    group: str = AUTO
    """Without an evaluation split: images that belong together are never on both sides. auto: near copies, and bursts
    of one camera within a minute; folder: also those of one folder; a regular expression on the path: also those with
    the same first group in it, such as a patient; none: each image alone."""

    def settings(self) -> dict[str, Any]:
        """Return the fields as config.json stores them: without what is newer and not set, as runs did before it."""
        fields = dataclasses.asdict(self)
        newer = {"allow_outside": False, "group": ALONE}
        return {name: value for name, value in fields.items() if name not in newer or value != newer[name]}

    @property
    def kind(self) -> str:
        """The part before the colon."""
        return self.data.partition(":")[0]

    @property
    def path(self) -> pathlib.Path:
        """The part after the colon."""
        return pathlib.Path(self.data.partition(":")[2])

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the images."""
        return pathlib.Path(self.images or (self.path if self.path.is_dir() else self.path.parent))


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """Which devices to use."""

    strategy: StrategyKind = "auto"
    """single: the first GPU, else the CPU. mirrored: all GPUs of this machine. multi-worker: the machines of TF_CONFIG
    or of a SLURM job. tpu: a Cloud TPU. auto: the largest of these that is available."""
    replicas: Count | None = None
    """Number of devices for mirrored; default all GPUs. Without a GPU, the CPU is split into as many, for testing."""
    tpu: str = "local"
    """Name or grpc:// address of the Cloud TPU; local on a TPU VM."""
    worker_timeout: Count = 600
    """Seconds to wait for another worker, at the start and in a step; must exceed the time to save and evaluate."""

    def __post_init__(self) -> None:
        applies = [
            (("tpu",), self.strategy in ("auto", "tpu"), "--strategy tpu"),
            (("worker_timeout",), self.strategy in ("auto", "multi-worker"), "--strategy multi-worker"),
        ]
        refuse_without_effect(self, applies)

    def may_be_one_of_several(self) -> bool:
        """Return whether several processes may be given the same workdir, of which one takes the lock."""
        is_started = not {"TF_CONFIG", "SLURM_PROCID"}.isdisjoint(os.environ)
        return self.strategy == "multi-worker" or (self.strategy == "auto" and is_started)


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a run is computed."""

    precision: Precision = "float32"
    """Computation dtype of the layers; bfloat16 and float16 are mixed precision with float32 weights, float16 with loss
    scaling."""
    evaluate_every: Count | None = None
    """Steps between two evaluations, each a line in metrics.jsonl; default one epoch."""
    checkpoint_every: Count | None = None
    """Steps between two checkpoints, besides those at each evaluation; default none."""
    deterministic: bool = False
    """Bit-exact repeatability on a CPU, a few percent slower."""
    xla: Literal["auto", "on", "off"] = "auto"
    """Compile the training step with XLA; auto: on a single GPU, where it helps."""
    steps_per_execution: Count = 1
    """Training steps per call of the compiled function; more help if steps are short, especially on a TPU."""
    remat: bool = False
    """Rematerialization: compute each encoder block again for its gradient, to save memory."""
    inspect_every: Count | None = None
    """Epochs between two inspections of the model, written to the run directory and TensorBoard; default none."""
    profile_steps: tuple[Count, Count] | None = None
    """First and last step to profile, such as 10 20; the trace is for TensorBoard, in profile/ of the run directory."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.profile_steps is not None:  # in either order
            object.__setattr__(self, "profile_steps", (min(self.profile_steps), max(self.profile_steps)))


# Options that may change when a run is resumed: they change where and how it is computed, not the result.
_CHANGEABLE = ("workdir", "devices", "execution", "dry_run", "chips", "model_parallel", "shard_weights", "data_service")
# Defaults of options that older runs do not have, and continue without; of pretraining too, and of the recipe.
_NEWER = (("zero_shot_head", False), ("templates", None), ("wise_ft", 1.0), ("knn_every", None), ("new_head", False))
_NEWER_OF_PRETRAINING, _NEWER_OF_RECIPE = ("checkpoint", None), ("class_weights", False)
# Options of which runs without --unlabelled say nothing.
_OF_UNLABELLED = ("unlabelled", "learn_by", "confidence", "rounds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvOptions:
    """How a command writes .csv files."""

    raw: bool = False
    """Write the cells of a .csv file as they are, for programs. Else a ' stands before those that a spreadsheet would
    run as a formula, such as =1+1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of all commands that train."""

    source: DataOptions
    workdir: Annotated[str, Aliases(("--output-dir",))]
    """Run directory, or an address such as gs://bucket/run. If it holds an unfinished run of the same command, that run
    continues. All workers share it."""
    seed: Seed = 0
    """Seed of initial weights, data order, augmentation and dropout."""
    dry_run: bool = False
    """Print the configuration, steps, learning rate, operations and memory of the run, and stop."""
    model_parallel: Count = 1
    """With KERAS_BACKEND=jax, devices that share one model: the weights of attention and MLP are divided among them."""
    shard_weights: bool = False
    """With KERAS_BACKEND=jax, divide all weights, gradients and the optimizer's state among the devices, which collect
    the weights of a layer to compute it (ZeRO-3, FSDP)."""
    data_service: str | None = None
    """Address of the dispatcher of a tf.data service, such as grpc://host:5050, whose workers make the batches of
    training; the result is the same. They read the files of --data under the same paths."""
    devices: StrategyOptions = dataclasses.field(default_factory=StrategyOptions)
    execution: Execution = dataclasses.field(default_factory=Execution)
    recipe: Recipe
    """How to train."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.data_service is not None:
            is_served = not self.source.data.startswith("tar:") and not self.devices.may_be_one_of_several()
            refuse_without_effect(self, [(("data_service",), is_served, "one training machine, without tar files")])

    @property
    def directory(self) -> pathlib.Path:
        return to_path(self.workdir)

    def settings(self, command: str, recipe_name: str) -> dict[str, Any]:
        """Return everything but the images that changes the result of a run, as in config.json."""
        newer = (*_NEWER, *([_NEWER_OF_PRETRAINING] if command == "pretrain" else []))
        fields = dataclasses.asdict(self).items()
        settings = {name: value for name, value in fields if name not in _CHANGEABLE and (name, value) not in newer}
        if settings.get("unlabelled") is None:
            settings = {name: value for name, value in settings.items() if name not in _OF_UNLABELLED}
        recipe = settings["recipe"].items()
        settings["recipe"] = {name: value for name, value in recipe if (name, value) != _NEWER_OF_RECIPE}
        if isinstance(model := settings["recipe"].get("model"), dict):
            settings["recipe"]["model"] = identifying_fields(model)
        settings["source"] = self.source.settings()
        execution = {name: getattr(self.execution, name) for name in ("precision", "deterministic")}
        return {"command": command, "recipe_name": recipe_name, **execution, **settings}


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """Write a data set as TFRecord files."""

    source: DataOptions
    output: str
    """Directory of the files; must not hold TFRecord files yet."""
    shards: Count = 1
    """Number of files per split."""
    runner: Runner | None = None
    """Run as an Apache Beam pipeline on many machines; --data is then a csv:FILE with the columns path, label and
    split. Options of the pipeline follow --; see embed."""


@dataclasses.dataclass(frozen=True)
class SamplesOptions:
    """Write evaluation images of a data set to samples.npz, and its class names to labels.txt."""

    source: DataOptions
    output: pathlib.Path
    """Directory to write into."""
    count: Count = 128
    """Maximum number of images, drawn in a shuffled order."""


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Make a clean folder of images."""

    folder: Annotated[pathlib.Path, Positional("IN")]
    """Folder of images, such as one of class folders; it is not changed."""
    output: Annotated[pathlib.Path, Positional("OUT")]
    """New folder for the images, and for prepared.csv, which says what was done to each."""


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Where a pipeline runs."""

    runner: Runner
    arguments: tuple[str, ...]
    """Beam's own options, such as --project."""
    table: str | None = None
    """The CSV file of `--data csv:FILE`."""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the options of the command, and those of Beam, which stand behind --."""
    place = [*arguments, "--"].index("--")
    return [*arguments[:place]], tuple(arguments[place + 1 :])

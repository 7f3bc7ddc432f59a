"""Options of the commands that train, and of those that run the papers' experiments."""

import dataclasses
from typing import Annotated, Literal

from keras_vit.cli.options import Aliases, Count, Positive, Range, Seed, Share
from keras_vit.errors import UserError, refuse_without_effect
from keras_vit.files.keras_model import KERAS_WEIGHTS
from keras_vit.images.resizing import Resize
from training.options.common import DataOptions, Execution, StrategyOptions, TrainingOptions
from training.recipes.finetune import FINETUNE_RECIPES, RECIPE_NAME, TASKS
from training.recipes.recipe import PretrainRecipe, Recipe

# Fields that come first in the help of the commands that train.
USUAL = (
    "checkpoint", "model", "data", "workdir", "seed", "precision", "strategy", "image_size", "batch_size",
    "learning_rate", "epochs", "steps", "resize", "flip",
)  # fmt: skip
LearnBy = Literal["noisy-student", "ema-teacher"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainOptions(TrainingOptions):
    """Train a model from scratch by a recipe, whose fields are options."""

    checkpoint: Annotated[str | None, Aliases(("--run",))] = None
    """Without labels: the model to go on from, as for keras-vit finetune, instead of random weights. It replaces the
    recipe's model, and a tenth of the recipe's learning rate is the default."""
    knn_every: Count | None = None
    """Without labels: epochs between two measurements of the features by nearest neighbors, with the labels of the
    data. When they get worse, the run stops and keeps the best weights. Default: only with --checkpoint, before the
    first and after the last step."""
    chips: str | None = None
    """With --dry-run: a slice of Cloud TPU such as v5e-16, to say what the recipe would take there: steps, operations,
    days and memory. --data may then be imagenet-1k, imagenet-21k or jft-300m, of which only the size is needed."""
    recipe: PretrainRecipe

    def __post_init__(self) -> None:
        super().__post_init__()
        without_labels = (
            "recipes without labels, such as mae-vit-b16 (for classes, keras-vit finetune takes checkpoints)"
        )
        applies = [
            (("checkpoint", "knn_every"), self.recipe.learns_features, without_labels),
            (("knn_every",), self.devices.strategy != "multi-worker", "one machine"),
            (("chips",), self.dry_run and self.recipe.target == "classes", "--dry-run and --target classes"),
        ]
        refuse_without_effect(self, applies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainingOptions):
    """Fine-tune a checkpoint."""

    checkpoint: Annotated[str | None, Aliases(("--run",))] = None
    """A run directory or .keras file of keras_vit; an .npz or .safetensors file or folder of any published layout; an
    https:// or gs:// address; or an official name, such as imagenet21k/ViT-B_16, augreg:B_16 or bit:BiT-M-R50x1."""
    model: str | None = None
    """Instead of --checkpoint: an official model, such as ViT-B_16, whose ImageNet-21k checkpoint is used. With a
    .weights.h5 file as --checkpoint: the model that the weights are of."""
    channels: int | None = None
    """Image channels; default those of the checkpoint. For another number, the kernel of the first layer is adapted."""
    num_heads: int | None = None
    """Attention heads, if the checkpoint does not specify them."""
    dropout_rate: float = 0.0
    """Rate of all dropout layers of the encoder."""
    stochastic_depth_rate: float = 0.0
    """Rate of the last block; it increases linearly from 0 at the first block."""
    new_head: bool = False
    """Begin with a head of zeros also where classes of the checkpoint are the data's, whose rows are kept otherwise."""
    zero_shot_head: bool = False
    """For a checkpoint with a text tower (CLIP, SigLIP): begin with the names of the classes as texts for the head,
    with spaces for underscores, instead of zeros; its projection and normalization stay."""
    templates: tuple[str, ...] | None = None
    """For --zero-shot-head: sentences in which each name replaces {}, whose embeddings are averaged; clip, siglip or a
    .txt file, as for keras-vit predict. Default: the names as they are."""
    wise_ft: Share = 1.0
    """Share of the trained weights in the saved ones; the rest are those before the training (WiSE-FT, where 0.5 is
    usual). The metrics of the run are those of the trained weights."""

    unlabelled: str | None = None
    """folder:PATH of images without labels, to learn from too. The run is compared with one of the labels alone, and
    kept only if it classifies the evaluation images better."""
    learn_by: LearnBy = "noisy-student"
    """With --unlabelled, noisy-student: learn the probabilities of a trained model for strongly changed images, in
    several rounds. ema-teacher: learn the classes of the run's own moving average while training (Semi-ViT)."""
    confidence: Annotated[float, Range("(0, 1)")] = 0.6
    """Images without labels are learned from this probability of their most likely class on."""
    rounds: Count = 2
    """For noisy-student: rounds, each with the student of the last one as its teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        recipe, whole = self.recipe, self.recipe.lora == 0 and self.wise_ft == 1.0
        one_class = recipe.loss == "softmax" and recipe.teacher is None and whole
        here = not self.dry_run and self.data_service is None and self.devices.strategy != "multi-worker"
        applies = [
            (("unlabelled",), one_class, "one class per image, without --loss, --teacher, --lora and --wise-ft"),
            (("unlabelled",), here, "runs here, without --dry-run, --data-service and --strategy multi-worker"),
            (("templates",), self.zero_shot_head, "--zero-shot-head"),
            (("learn_by", "confidence"), self.unlabelled is not None, "--unlabelled"),
            (("wise_ft",), not recipe.lora, "whole weights, without --lora"),
            (("channels", "num_heads", "new_head"), not self.zero_shot_head, "checkpoints without a text tower"),
            (("rounds",), self.unlabelled is not None and self.learn_by == "noisy-student", "noisy-student"),
        ]
        refuse_without_effect(self, applies)
        has_weights_alone = (self.checkpoint or "").endswith(KERAS_WEIGHTS)
        if (self.model is None) == (self.checkpoint is None or has_weights_alone):
            raise UserError(
                f"Say where to start: --checkpoint FILE_OR_NAME, or --model NAME. A {KERAS_WEIGHTS} file needs both."
            )
        if self.recipe.distillation == "features":
            raise UserError("--distillation features leaves a model without a head; give it to keras-vit pretrain.")

    @property
    def start(self) -> str:
        """The path, address or official name of the checkpoint. Raises UserError for a model without one."""
        from keras_vit.published import upstream_checkpoint

        return self.checkpoint or upstream_checkpoint(self.model or "")


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Start several workers of a command on this machine."""

    workers: Count = 2
    """Number of processes."""
    grace: float = 60.0
    """Seconds that the other workers have to end by themselves after one failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Train a classifier on your images in the way that suits the data and this machine."""

    source: DataOptions
    checkpoint: Annotated[str | None, Aliases(("--run",))] = None
    """Published checkpoint or run to start from; default hf:facebook/dinov2-small, if available."""
    workdir: str = "runs/auto"
    """Directory of the new run."""
    minutes: Positive | None = None
    """Time for fine-tuning all weights. Default: on a GPU as long as it takes, on a CPU none."""
    unlabelled: str | None = None
    """folder:PATH of images without labels, for fine-tuning all weights; see keras-vit finetune."""
    resize: Resize | None = None
    """How images are resized to the model's input; default what classifies better on frozen features."""
    seed: Seed = 0
    """Seed of fine-tuning and of training from scratch."""


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """Train, evaluate, export and verify a small ViT on handwritten digits."""

    workdir: str = "runs/demo"
    """Run directory; the exports and summary.json are written there, too."""
    seed: Seed = 0
    """Seed of initial weights, data order and augmentation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """A study; the fields of its base recipe are options."""

    source: DataOptions
    workdir: str
    """Directory of the report, and of the run directories in runs/."""
    recipe: PretrainRecipe
    seeds: Count = 3
    """Runs of each setting, for the confidence intervals."""
    shots: Count = 5
    """Images per class for the few-shot accuracy."""
    train_images: tuple[Count, ...] | None = None
    """Only for data-size and small-data: numbers of training images; default 1, 10 and 100% of the training split."""
    jobs: Count | None = None
    """Runs in parallel; default one per core, at most 8, or one if there is a GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VtabOptions:
    """Fine-tune a checkpoint to the tasks of VTAB-1k."""

    checkpoint: Annotated[str, Aliases(("--run",))]
    """As for training.finetune: a run, a file, a folder, an address, or an official name."""
    workdir: str
    """Directory of the runs and the report; the same command continues there."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default TFDS' own."""
    tasks: tuple[str, ...] = tuple(task.name for task in TASKS)
    """Which of the 19 tasks to run."""
    learning_rates: tuple[float, ...] = (0.01,)
    """Peak learning rates to choose from."""
    steps: tuple[int, ...] = (2500,)
    """Training steps to choose from."""
    warmup_steps: int = 0
    """Steps of the warm-up, included in the training steps."""
    batch_size: int = 512
    """Images per step."""
    image_size: tuple[int, int] = (384, 384)
    """Height and width of the model's input in pixels."""
    num_heads: int | None = None
    """Attention heads, if the checkpoint does not specify them."""
    seed: Seed = 0
    """Seed of data order, augmentation and dropout."""
    devices: StrategyOptions = dataclasses.field(default_factory=StrategyOptions)
    execution: Execution = dataclasses.field(default_factory=lambda: Execution(checkpoint_every=500))

    def recipe(self) -> Recipe:
        """Return the recipe of all runs, before its learning rate and steps are chosen."""
        named = FINETUNE_RECIPES[RECIPE_NAME]
        schedule = dataclasses.replace(named.schedule, warmup_steps=self.warmup_steps)
        return dataclasses.replace(named, image_size=self.image_size, batch_size=self.batch_size, schedule=schedule)

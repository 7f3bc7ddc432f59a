"""Options of the commands that train."""

import dataclasses
from typing import Annotated, Literal

from keras_vit.cli.options import Aliases, Count, Range, Share
from keras_vit.errors import UserError, refuse_without_effect
from keras_vit.files.keras_model import KERAS_WEIGHTS
from training.options.common import TrainingOptions
from training.recipes.recipe import PretrainRecipe

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
        if (self.checkpoint or self.knn_every) and not self.recipe.learns_features:
            raise UserError(
                "--checkpoint and --knn-every are for recipes without labels, such as mae-vit-b16; for classes, give "
                "the checkpoint to keras-vit finetune."
            )
        refuse_without_effect(self, [(("knn_every",), self.devices.strategy != "multi-worker", "one machine")])
        if self.chips is not None and (not self.dry_run or self.recipe.target != "classes"):
            raise UserError("--chips is for the --dry-run of a recipe that learns classes; leave it out.")


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
    """Of a checkpoint with a text tower (CLIP, SigLIP): begin with the names of the classes as texts for the head, with
    spaces for underscores, instead of zeros; its projection and normalization stay."""
    templates: tuple[str, ...] | None = None
    """For --zero-shot-head: sentences in which each name replaces {}, whose embeddings are averaged; clip, siglip or a
    .txt file, as for keras-vit predict. Default: the names as they are."""
    wise_ft: Share = 1.0
    """Share of the trained weights in the saved ones; the rest are those before the training (WiSE-FT, where 0.5 is
    usual). The metrics of the run are those of the trained weights."""

    unlabelled: str | None = None
    """folder:PATH of pictures without labels, to learn from too. The run is compared with one of the labels alone, and
    kept only if it classifies the evaluation images better."""
    learn_by: LearnBy = "noisy-student"
    """With --unlabelled, noisy-student: learn the probabilities of a trained model for strongly changed pictures, in
    several rounds. ema-teacher: learn the classes of the run's own moving average while training (Semi-ViT)."""
    confidence: Annotated[float, Range("(0, 1)")] = 0.6
    """Pictures without labels are learned from this probability of their likeliest class on."""
    rounds: Count = 2
    """Of noisy-student: the student of one round is the teacher of the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_effect(
            self,
            [
                (("templates",), self.zero_shot_head, "--zero-shot-head"),
                (("learn_by", "confidence"), self.unlabelled is not None, "--unlabelled"),
                (("wise_ft",), not self.recipe.lora, "whole weights, without --lora"),
                (("channels", "num_heads", "new_head"), not self.zero_shot_head, "checkpoints without a text tower"),
                (("rounds",), self.unlabelled is not None and self.learn_by == "noisy-student", "noisy-student"),
            ],
        )
        has_weights_alone = (self.checkpoint or "").endswith(KERAS_WEIGHTS)
        if (self.model is None) == (self.checkpoint is None or has_weights_alone):
            raise UserError(
                "Give either --checkpoint, a file, folder, address or name, or --model, an official model; both with a "
                f"{KERAS_WEIGHTS} file, which holds weights alone."
            )
        recipe, averages = self.recipe, self.wise_ft < 1.0
        if recipe.distillation == "features":
            raise UserError("--distillation features leaves a model without a head; give it to keras-vit pretrain.")
        if self.unlabelled is None:
            return
        if recipe.loss != "softmax" or recipe.teacher is not None or recipe.lora or averages:
            raise UserError(
                "--unlabelled learns one class per image and all weights; leave --loss, --teacher, --lora and "
                "--wise-ft out."
            )
        if self.dry_run or self.data_service is not None or self.devices.strategy == "multi-worker":
            raise UserError(
                "--unlabelled makes several runs on this machine; leave --dry-run, --data-service and --strategy "
                "multi-worker out."
            )


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Start several workers of a command on this machine."""

    workers: Count = 2
    """Number of processes."""
    grace: float = 60.0
    """Seconds that the other workers have to end by themselves after one failed."""

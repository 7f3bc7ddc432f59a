"""Options of the commands that train."""

import dataclasses

from keras_vit import UserError
from keras_vit.errors import refuse_without_effect
from keras_vit.parser import Share, check_ranges
from training.options.common import TrainingOptions
from training.recipes.recipe import PretrainRecipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainOptions(TrainingOptions):
    """Train a model from scratch by a recipe, whose fields are options."""

    recipe: PretrainRecipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainingOptions):
    """Fine-tune a checkpoint."""

    checkpoint: str | None = None
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
    zero_shot_head: bool = False
    """Of a checkpoint with a text tower (CLIP, SigLIP): begin with the names of the classes as texts for the head, with
    spaces for underscores, instead of zeros; its projection and normalization stay."""
    templates: tuple[str, ...] | None = None
    """For --zero-shot-head: sentences in which each name replaces {}, whose embeddings are averaged; clip, siglip or a
    .txt file, as for keras-vit predict. Default: the names as they are."""
    wise_ft: Share = 1.0
    """Share of the trained weights in the saved ones; the rest are those before the training (WiSE-FT, where 0.5 is
    usual). The metrics of the run are those of the trained weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)
        refuse_without_effect(self, [(("templates",), self.zero_shot_head, "--zero-shot-head")])
        for name in ("channels", "num_heads") if self.zero_shot_head else ():
            if getattr(self, name) is not None:
                raise UserError(f"Two towers tell their own --{name.replace('_', '-')}; leave it out.")
        if self.wise_ft < 1.0 and self.recipe.lora:
            raise UserError("WiSE-FT averages whole weights, but --lora trains factors of their change; give one.")


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Start several workers of a command on this machine."""

    workers: int = 2
    """Number of processes."""
    grace: float = 60.0
    """Seconds that the other workers have to end by themselves after one failed."""

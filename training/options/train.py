"""Options of the commands that train."""

import dataclasses

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


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Start several workers of a command on this machine."""

    workers: int = 2
    """Number of processes."""
    grace: float = 60.0
    """Seconds that the other workers have to end by themselves after one failed."""

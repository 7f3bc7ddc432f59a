"""Options of the commands that train."""

import dataclasses
from typing import Annotated

import tyro

from training.options.common import TrainingOptions
from training.recipes.recipe import PretrainRecipe, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainOptions(TrainingOptions):
    """Train a model from scratch by a recipe, whose fields are options."""

    recipe: Annotated[PretrainRecipe, tyro.conf.arg(name="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainingOptions):
    """Fine-tune a checkpoint."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    checkpoint: str | None = None
    """A run directory or .keras file of ours; an .npz, .safetensors or folder of any published layout; an https:// or
    gs:// address; or an official name, such as imagenet21k/ViT-B_16, augreg:B_16 or bit:BiT-M-R50x1."""
    model: str | None = None
    """Instead of --checkpoint an official model, such as ViT-B_16: its checkpoint of ImageNet-21k."""
    channels: int | None = None
    """Image channels; default those of the checkpoint. Other kernels of the first layer spread their sum."""
    num_heads: int | None = None
    """Attention heads, where the file does not tell them."""
    dropout_rate: float = 0.0
    """Of every dropout of the encoder."""
    stochastic_depth_rate: float = 0.0
    """Of the last block; the first has 0 and those between lie on a line."""

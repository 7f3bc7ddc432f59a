"""Options of `keras-vit auto`."""

import dataclasses
from typing import Annotated

from keras_vit.cli.options import Aliases, Positive, Seed
from keras_vit.images.resizing import Resize
from training.options.common import DataOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Train a classifier on your pictures in the way that suits the data and this machine."""

    source: DataOptions
    checkpoint: Annotated[str | None, Aliases(("--run",))] = None
    """Published checkpoint or run to start from; default hf:facebook/dinov2-small, if it can be had."""
    workdir: str = "runs/auto"
    """Directory of the new run."""
    minutes: Positive | None = None
    """Time for fine-tuning all weights. Default: on a GPU as long as it takes, on a CPU none."""
    unlabelled: str | None = None
    """folder:PATH of pictures without labels, for fine-tuning all weights; see keras-vit finetune."""
    resize: Resize | None = None
    """How images are resized to the model's input; default what classifies better on frozen features."""
    seed: Seed = 0
    """Seed of fine-tuning and of training from scratch."""

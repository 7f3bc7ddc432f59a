"""Options of the command. This module does not import Keras, so `--help` and mistakes are fast."""

import dataclasses
import pathlib
from typing import Annotated, Literal, get_args

from keras_vit.cli.options import Aliases, Count, MayLead

Figure = Literal["filters", "positions", "distance", "rollout", "attention", "norms", "relevance", "queries"]
FIGURES: tuple[Figure, ...] = get_args(Figure)


@dataclasses.dataclass(frozen=True)
class InspectionOptions:
    """Plot the paper's figures for a model and write an HTML report."""

    output: pathlib.Path
    """Output directory."""
    run: Annotated[str, Aliases(("--checkpoint", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, or official name such as augreg:B_16."""
    images: str | None = None
    """Image file, folder of images, samples.npz, or a data set as --data of training takes it; default the run's
    samples.npz."""
    count: Count = 128
    """Maximum number of images in the average of the attention distance."""
    show: Count = 8
    """Number of images with maps; the first ones are taken."""
    figures: tuple[Figure, ...] | None = None
    """Which of them; default all figures of the model."""
    layers: tuple[int, ...] | None = None
    """Blocks in the attention maps, from 0; default all."""
    heads: tuple[int, ...] | None = None
    """Heads in the attention maps, from 0; default all."""
    labels: pathlib.Path | None = None
    """Text file with one class name per line; default the run's labels.txt."""
    image_size: tuple[int, int] | None = None
    """Height and width of the input in pixels; position embeddings are resized. Default as stored."""
    num_heads: int | None = None
    """Number of attention heads, if the checkpoint does not contain it."""
    num_groups: int | None = None
    """Number of groups of GroupNorm, if the checkpoint does not contain it."""
    data_dir: str | None = None
    """Directory of prepared TFDS data sets; default is the TFDS default."""

"""Options of `keras-vit unknown` and `keras-vit anomaly`. Imports no TensorFlow."""

import dataclasses
from typing import Annotated

from keras_vit.cli.options import Aliases, Count, MayLead, Positional, Range, Seed
from keras_vit.scores import UnknownKind
from training.options.common import CsvOptions, DataOptions
from training.options.features import TABLES
from training.options.predict import check_ending

FalseAlarms = Annotated[float, Range("(0, 1)")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnknownOptions:
    """Fit a score that tells pictures of none of the classes, and store it in the run."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnomalyFitOptions:
    """Learn from pictures of good parts what is normal."""

    checkpoint: Annotated[str, Aliases(("--run", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, or official name, of a Vision Transformer."""
    data: str
    """Folder of pictures of good parts, searched recursively; folder:PATH is the same."""
    workdir: str
    """New directory: model.keras, anomaly.json, and saved_model/1."""
    blocks: tuple[int, ...] | None = None
    """Blocks whose patch tokens are compared, concatenated; negative numbers count from the last. Default: the middle
    one, whose patches know most of textures."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to which pictures are stretched; default the model's own."""
    coreset: Annotated[float, Range("(0, 1]")] = 0.1
    """Share of the patches that is kept in memory, at most 10,000."""
    false_alarms: FalseAlarms = 0.05
    """Share of good parts, of those held out, that the threshold calls defective."""
    batch_size: Count = 8
    """Pictures per forward pass."""
    seed: Seed = 0
    """Seed of the projection and of the pictures that are held out."""

    @property
    def folder(self) -> str:
        """The folder of good parts."""
        return self.data.removeprefix("folder:")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnomalyPredictOptions(CsvOptions):
    """Find what differs from the good parts."""

    pictures: Annotated[tuple[str, ...], Positional("PICTURES")]
    """Image files, folders and patterns."""
    run: Annotated[str, MayLead()]
    """Directory that keras-vit anomaly fit has written."""
    output: str | None = None
    """File for the results, which ends in .csv or .html (a page with heat maps)."""

    def __post_init__(self) -> None:
        check_ending(self.output, TABLES)

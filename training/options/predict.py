"""Options of `keras-vit predict` and `keras-vit anomaly`."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

from keras_vit import UserError
from keras_vit.cli.options import Aliases, Count, MayLead, Port, Positional, Range, Seed, Share
from keras_vit.errors import refuse_without_effect
from training.options.common import CsvOptions, FalseAlarms, ModelOptions, Runner

Explanation = Literal["rollout", "relevance"]
HOST = "127.0.0.1"
OUTPUTS = (".csv", ".json", ".html", ".parquet")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions(CsvOptions, ModelOptions):
    """Classify image files."""

    images: Annotated[tuple[str, ...], Positional("IMAGES")] = ()
    """Image files, folders, which are searched recursively, and patterns such as 'pictures/*.png'."""
    labels: str | None = None
    """Text file with one class name per line; default the run's labels.txt or the names in a config.json, else class
    numbers."""
    classes: tuple[str, ...] | None = None
    """For a checkpoint with a text tower (CLIP, SigLIP): texts that are its classes, such as cat dog "a rabbit", or a
    .txt file with one in each line, or with a name and its texts, as in "cat: a cat | a kitten". Behind them, a value
    with a slash or the ending of an image, such as pictures/ or ./cat.jpg, and all values after it are IMAGES."""
    templates: tuple[str, ...] | None = None
    """Sentences in which each text replaces {}, such as "a photo of a {}.", whose embeddings are averaged; clip: the 80
    of CLIP; siglip: the one of SigLIP; or a .txt file with one in each line. Default: the texts as they are."""
    output: str | None = None
    """File for the results, which ends in .csv, .json, .html or .parquet; with --runner, a folder of Parquet files."""
    excel: bool = False
    """Begin a .csv file with a byte order mark, by which Excel knows that it is UTF-8."""
    threshold: Share | None = None
    """Reject an image whose most likely class has a lower probability than this, 0 to 1. For a
    multi-label model, show every class at or above it; default 0.5."""
    explain: Explanation | None = None
    """Show beside each image, in the page, which parts count: attention rollout, or relevance (Grad-CAM)."""
    serve: bool = False
    """Serve a page on 127.0.0.1 that classifies one image after the other."""
    port: Port = 8000
    """Port of the page."""
    runner: Runner | None = None
    """Run as an Apache Beam pipeline on many machines; IMAGES may then be in a bucket, and be a .csv file with a
    column path. Options of the pipeline follow --; see embed."""

    def __post_init__(self) -> None:
        if self.runner is not None and (self.output is None or pathlib.Path(self.output).suffix or self.explain):
            raise UserError("--runner needs --output with a folder for Parquet files, and makes no page; give that.")
        if self.runner is None:
            check_ending(self.output, OUTPUTS)
        applies = [
            (("port",), self.serve, "--serve"),
            (("explain",), self.serve or (self.output or "").endswith(".html"), "--output FILE.html or --serve"),
            (("output",), not self.serve, "results outside of the page of --serve"),
            (("labels",), self.classes is None, "a model without --classes, which are its names"),
            (("templates",), self.classes is not None, "--classes"),
            (("excel", "raw"), (self.output or "").endswith(".csv"), "--output FILE.csv"),
        ]
        refuse_without_effect(self, applies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnomalyFitOptions:
    """Learn from images of good parts what is normal."""

    checkpoint: Annotated[str, Aliases(("--run", "--model")), MayLead()]
    """Run directory, .keras file, checkpoint file or folder, address, or official name, of a Vision Transformer."""
    data: str
    """Folder of images of good parts, searched recursively; folder:PATH is the same."""
    workdir: str
    """New directory: model.keras, anomaly.json, and saved_model/1."""
    blocks: tuple[int, ...] | None = None
    """Blocks whose patch tokens are compared, concatenated; negative numbers count from the last. Default: the middle
    one, whose patches know most of textures."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels to which images are stretched; default the model's own."""
    coreset: Annotated[float, Range("(0, 1]")] = 0.1
    """Share of the patches that is kept in memory, at most 10,000."""
    false_alarms: FalseAlarms = 0.05
    """Share of good parts, of those held out, that the threshold calls defective."""
    batch_size: Count = 8
    """Images per forward pass."""
    seed: Seed = 0
    """Seed of the projection and of the images that are held out."""

    @property
    def folder(self) -> str:
        """The folder of good parts."""
        return self.data.removeprefix("folder:")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnomalyPredictOptions(CsvOptions):
    """Find what differs from the good parts."""

    images: Annotated[tuple[str, ...], Positional("IMAGES")]
    """Image files, folders and patterns."""
    run: Annotated[str, MayLead()]
    """Directory that keras-vit anomaly fit has written."""
    output: str | None = None
    """File for the results, which ends in .csv or .html (a page with heat maps)."""

    def __post_init__(self) -> None:
        check_ending(self.output, (".csv", ".html"))


def check_ending(output: str | None, endings: Sequence[str]) -> None:
    """Raise UserError unless the name of the file for --output has one of these endings, or there is none."""
    if output is not None and pathlib.Path(output).suffix not in endings:
        listed = f"{', '.join(endings[:-1])} or {endings[-1]}"
        raise UserError(f"--output accepts a file that ends in {listed}, but is {output!r}.")

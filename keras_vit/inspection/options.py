"""Options of the command. This module does not import Keras, so `--help` and mistakes are fast."""

import dataclasses
import pathlib
from typing import Annotated, Literal, get_args

from keras_vit import run_directory
from keras_vit.cli.options import Aliases, Count, MayLead
from keras_vit.errors import UserError
from keras_vit.files.remote import to_path
from keras_vit.runs import Run, open_run

Figure = Literal["filters", "positions", "distance", "rollout", "attention", "norms", "relevance", "queries"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
# How the name of a data set begins, as `--data` of the training commands takes it.
DATA_SETS = ("digits", "tfds:", "folder:", "csv:", "tfrecord:", "tar:")


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

    def open_run(self) -> Run:
        """The model to inspect. Raises UserError for what is none."""
        return open_run(self.run, image_size=self.image_size, num_heads=self.num_heads, num_groups=self.num_groups)

    def check(self, run: Run) -> None:
        """Raise UserError for what is wrong with names, paths and numbers, without the model."""
        if self.labels is not None:
            run.check_label_file(self.labels)
        check_images(self.image_source(run))
        run_directory.output_folder(self.output)

    def next_commands(self, run: Run) -> list[tuple[str, ...]]:
        """Commands to go on with after the inspection."""
        if run.file(run_directory.CONFIG):
            return run.next_commands("inspect")
        heads = () if self.num_heads is None else ("--num-heads", str(self.num_heads))
        model = ("--run", run.name, *heads)
        if not run.class_names:
            return [("saved-model", *model, "--embeddings", "features", "--output", "features")]
        return [("predict", *model, "--serve"), ("saved-model", *model, "--output", "served")]

    def image_source(self, run: Run) -> str:
        """The argument --images, or the samples of the run directory if there is none."""
        if self.images:
            return self.images
        if run.file(run_directory.SAMPLES) is None:
            raise UserError(
                f"{run.name} has no images of its own; give --images, an image, a folder of images, or a data set."
            )
        return str(run.file(run_directory.SAMPLES))


def check_images(source: str) -> None:
    """Raise UserError unless `source` is an image, a folder of images, a samples.npz or the name of a data set."""
    if not to_path(source).exists() and not source.startswith(DATA_SETS):
        raise UserError(
            f"There is no image or folder {source!r}; --images takes one of these, a run's samples.npz, digits, "
            "tfds:NAME, folder:PATH, csv:FILE, tfrecord:GLOB or tar:GLOB."
        )

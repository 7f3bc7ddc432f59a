"""Options of the commands that write data."""

import dataclasses
import os
import pathlib
from typing import Annotated

from keras_vit import UserError, run_directory
from keras_vit.cli.options import Count, Positional
from keras_vit.errors import Rules, refuse_first
from keras_vit.files.atomic import is_temporary
from keras_vit.files.remote import existing_folder, is_remote
from keras_vit.images.formats import is_hidden
from training.options.common import DataOptions
from training.options.pipeline import PIPELINE, PROBLEMS, Runner

# The file of the lengths of all records, beside TFRecord files.
RECORD_INDEX = "records.npz"


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """Write a data set as TFRecord files."""

    source: DataOptions
    output: str
    """Directory of the files; must not hold TFRecord files yet."""
    shards: Count = 1
    """Number of files per split."""
    runner: Runner | None = None
    """Run as an Apache Beam pipeline on many machines; --data is then a csv:FILE with the columns path, label and
    split. Options of the pipeline follow --; see embed."""

    def check_output(self) -> None:
        """Raise UserError for a folder with files of something else, such as pictures: they would be mixed."""
        if is_remote(self.output) or not (folder := run_directory.output_folder(self.output)).is_dir():
            return
        ours = (RECORD_INDEX, run_directory.LABELS, PIPELINE, PROBLEMS)
        for entry in sorted(folder.iterdir()):
            is_ours = entry.suffix == ".tfrecord" or entry.name in ours
            if not (is_ours or is_temporary(entry) or is_hidden(entry.name)):
                raise UserError(
                    f"{folder} should be new or empty, but holds {entry.name}; give --output a folder of its own."
                )


@dataclasses.dataclass(frozen=True)
class SamplesOptions:
    """Write evaluation images of a data set to samples.npz, and its class names to labels.txt."""

    source: DataOptions
    output: pathlib.Path
    """Directory to write into."""
    count: Count = 128
    """Maximum number of images, drawn in a shuffled order."""

    def __post_init__(self) -> None:
        if not is_remote(self.output) and (self.output / run_directory.CONFIG).is_file():
            raise UserError(f"{self.output} is a run directory; give --output a folder of its own.")


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Make a clean folder of pictures."""

    folder: Annotated[pathlib.Path, Positional("IN")]
    """Folder of pictures, such as one of class folders; it is not changed."""
    output: Annotated[pathlib.Path, Positional("OUT")]
    """New folder for the pictures, and for prepared.csv, which says what was done to each."""

    def __post_init__(self) -> None:
        refuse_first(self._rules())

    def _rules(self) -> Rules:
        for path in (self.folder, self.output):
            yield (
                is_remote(path),
                f"IN and OUT are folders of this machine, but one is {path}; copy the pictures first.",
            )
        existing_folder(self.folder, "give a folder of pictures")
        yield (
            self.folder.resolve() in self.output.resolve().parents,
            f"OUT should be outside of {self.folder}, but is {self.output}; choose another folder.",
        )
        yield (
            os.path.lexists(self.output),
            f"{self.output} exists, but OUT should be a new folder; choose another name.",
        )

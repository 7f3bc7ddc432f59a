"""Options of the commands that write data."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from keras_vit import UserError, run_directory
from keras_vit.files.atomic import is_temporary
from keras_vit.files.remote import is_remote, to_path
from keras_vit.images.formats import is_hidden
from training.options.common import DataOptions

# The file of the lengths of all records, beside TFRecord files.
RECORD_INDEX = "records.npz"


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """Write a data set as TFRecord files."""

    source: Annotated[DataOptions, tyro.conf.arg(name="")]
    output: str
    """Directory of the files; must not hold TFRecord files yet."""
    shards: int = 1
    """Number of files per split."""

    def check_output(self) -> None:
        """Raise UserError for a folder with files of something else, such as pictures: they would be mixed."""
        folder = to_path(self.output)
        if is_remote(self.output) or not folder.is_dir():
            return
        for entry in sorted(folder.iterdir()):
            is_ours = entry.suffix == ".tfrecord" or entry.name in (RECORD_INDEX, run_directory.LABELS)
            if not (is_ours or is_temporary(entry) or is_hidden(entry.name)):
                raise UserError(
                    f"{folder} should be new or empty, but holds {entry.name}; give --output a folder of its own."
                )


@dataclasses.dataclass(frozen=True)
class SamplesOptions:
    """Write evaluation images of a data set to samples.npz, and its class names to labels.txt."""

    source: Annotated[DataOptions, tyro.conf.arg(name="")]
    output: pathlib.Path
    """Directory to write into."""
    count: int = 128
    """Maximum number of images, drawn in a shuffled order."""

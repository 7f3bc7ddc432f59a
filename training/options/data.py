"""Options of the commands that write data, and of those that also run as Apache Beam pipelines. Imports no Beam."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

from keras_vit.cli.options import Count, Positional
from training.options.common import DataOptions, Runner

# The file of the lengths of all records, beside TFRecord files.
RECORD_INDEX = "records.npz"
# What the files of a folder that a pipeline fills are of.
PIPELINE = "pipeline.json"
# Folder, inside the output, of the pictures that cannot be read.
PROBLEMS = "problems"


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


@dataclasses.dataclass(frozen=True)
class SamplesOptions:
    """Write evaluation images of a data set to samples.npz, and its class names to labels.txt."""

    source: DataOptions
    output: pathlib.Path
    """Directory to write into."""
    count: Count = 128
    """Maximum number of images, drawn in a shuffled order."""


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Make a clean folder of images."""

    folder: Annotated[pathlib.Path, Positional("IN")]
    """Folder of images, such as one of class folders; it is not changed."""
    output: Annotated[pathlib.Path, Positional("OUT")]
    """New folder for the images, and for prepared.csv, which says what was done to each."""


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Where a pipeline runs."""

    runner: Runner
    arguments: tuple[str, ...]
    """Beam's own options, such as --project."""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the options of the command, and those of Beam, which stand behind --."""
    place = [*arguments, "--"].index("--")
    return [*arguments[:place]], tuple(arguments[place + 1 :])

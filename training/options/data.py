"""Options of the commands that write data."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from training.options.common import DataOptions


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """Write a data set as TFRecord files."""

    source: Annotated[DataOptions, tyro.conf.arg(name="")]
    output: str
    """Directory of the files; must not hold TFRecord files yet."""
    shards: int = 1
    """Number of files per split."""


@dataclasses.dataclass(frozen=True)
class SamplesOptions:
    """Write evaluation images of a data set to samples.npz, and its class names to labels.txt."""

    source: Annotated[DataOptions, tyro.conf.arg(name="")]
    output: pathlib.Path
    """Directory to write into."""
    count: int = 128
    """Maximum number of images, drawn in a shuffled order."""

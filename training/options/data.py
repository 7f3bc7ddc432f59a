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
    """Files of each split."""


@dataclasses.dataclass(frozen=True)
class SamplesOptions:
    """Write some evaluation images of a data set into samples.npz, and the names of its classes into labels.txt."""

    source: Annotated[DataOptions, tyro.conf.arg(name="")]
    output: pathlib.Path
    """Directory to write into."""
    count: int = 128
    """Images at most, taken in an evenly mixed order."""

"""Options of the commands that also run as Apache Beam pipelines. Imports neither Beam nor TensorFlow."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Runner = Literal["DirectRunner", "DataflowRunner", "FlinkRunner", "SparkRunner"]
# What the files of a folder that a pipeline fills are of.
PIPELINE = "pipeline.json"
# Folder, inside the output, of the pictures that cannot be read.
PROBLEMS = "problems"


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Where a pipeline runs."""

    runner: Runner
    arguments: tuple[str, ...]
    """Beam's own options, such as --project."""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """(the options of the command, those of Beam, which stand behind --)."""
    if "--" not in arguments:
        return [*arguments], ()
    place = [*arguments].index("--")
    return [*arguments[:place]], tuple(arguments[place + 1 :])

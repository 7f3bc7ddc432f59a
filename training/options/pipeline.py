"""Options of the commands that also run as Apache Beam pipelines. Imports neither Beam nor TensorFlow."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Literal

from keras_vit import UserError
from keras_vit.errors import refuse_first
from keras_vit.files.remote import existing_file, is_remote

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


def pipeline_options(
    runner: Runner | None, arguments: tuple[str, ...], run: str | None, paths: Sequence[str | None]
) -> PipelineOptions | None:
    """How a command runs as a pipeline; None without --runner.

    Args:
        runner: `--runner`.
        arguments: Beam's options.
        run: `--run`, which may also be a name that each worker downloads.
        paths: what the workers read and write: pictures, tables and the output; of these None is left out.

    Raises UserError for Beam's options without a runner, if Beam is not installed, and for paths that the workers of
    Dataflow cannot reach.
    """
    local = [path for path in paths if path is not None and not is_remote(path)]
    local += [run] if run is not None and not is_remote(run) and pathlib.Path(run).exists() else []
    refuse_first(
        [
            (
                runner is None and arguments,
                f"Options behind -- are those of a pipeline, as {' '.join(arguments[:1])!r}; give --runner, too.",
            ),
            (
                runner is not None and importlib.util.find_spec("apache_beam") is None,
                "--runner needs Apache Beam, which is not installed; install it in an environment of its own, by "
                "pip install '.[train,beam]' in a checkout.",
            ),
            (
                runner == "DataflowRunner" and local,
                f"The workers of Dataflow have no {' '.join(local[:1])!r}, which is on this machine; copy it into a "
                "bucket, and give that address.",
            ),
        ]
    )
    return None if runner is None else PipelineOptions(runner, arguments)


def table_path(data: str) -> str:
    """The path of `--data csv:FILE`. Raises UserError for other data, which a pipeline does not read."""
    kind, _, path = data.partition(":")
    if kind != "csv" or not path:
        raise UserError(
            f"With --runner, --data takes csv:FILE with the columns path, label and split, but was given {data!r}; "
            "write such a file, or leave --runner out."
        )
    if not is_remote(path):
        existing_file(path, "--data csv:FILE takes one with the columns path, label and split")
    return path

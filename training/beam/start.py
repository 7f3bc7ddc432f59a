"""Check what must be right before a pipeline starts. Imports neither Beam nor TensorFlow."""

import importlib.util
import pathlib
from collections.abc import Sequence

from keras_vit import UserError
from keras_vit.files.remote import existing_file, is_remote
from training.options.common import Runner
from training.options.data import PipelineOptions


def pipeline_options(
    runner: Runner | None, arguments: tuple[str, ...], run: str | None, paths: Sequence[str | None]
) -> PipelineOptions | None:
    """Return how a command runs as a pipeline; None without --runner.

    Args:
        runner: `--runner`.
        arguments: Beam's options.
        run: `--run`, which may also be a name that each worker downloads.
        paths: what the workers read and write: images, tables and the output; of these None is left out.

    Raises UserError for Beam's options without a runner, if Beam is not installed, and for paths that the workers of
    Dataflow cannot reach.
    """
    if runner is None:
        if arguments:
            raise UserError(f"Options behind -- are those of a pipeline, as {arguments[0]!r}; give --runner, too.")
        return None
    if importlib.util.find_spec("apache_beam") is None:
        raise UserError(
            "--runner needs Apache Beam, which is not installed; install it in an environment of its own, by "
            "pip install '.[train,beam]' in a checkout."
        )
    local = [path for path in paths if path is not None and not is_remote(path)]
    local += [run] if run is not None and not is_remote(run) and pathlib.Path(run).exists() else []
    if runner == "DataflowRunner" and local:
        raise UserError(
            f"The workers of Dataflow have no {local[0]!r}, which is on this machine; copy it into a bucket, and give "
            "that address."
        )
    return PipelineOptions(runner, arguments)


def table_path(data: str) -> str:
    """Return the path of `--data csv:FILE`. Raises UserError for other data, which a pipeline does not read."""
    kind, _, path = data.partition(":")
    if kind != "csv" or not path:
        raise UserError(
            f"With --runner, --data takes csv:FILE with the columns path, label and split, but was given {data!r}; "
            "write such a file, or leave --runner out."
        )
    if not is_remote(path):
        existing_file(path, "--data csv:FILE takes one with the columns path, label and split")
    return path

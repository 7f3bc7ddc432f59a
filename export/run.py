"""Open the model to export, and check the place to export to. Imports no TensorFlow."""

import pathlib
import shlex

from export.options import SourceOptions
from keras_vit import run_directory, runs
from keras_vit.cli.options import option_name
from keras_vit.errors import UserError
from keras_vit.files.remote import to_path
from keras_vit.runs import Run

_OF_CHECKPOINT = ("labels", "images", "image_size", "num_heads", "num_groups")


def open_run(source: SourceOptions) -> Run:
    """Open the model to export. Raises UserError unless one is there, and for settings of a checkpoint beside a run."""
    if (source.run is None) == (source.checkpoint is None):
        raise UserError("An export takes either --run DIR or --checkpoint FILE; pass one of them.")
    if source.checkpoint is not None:
        size, heads, groups = source.image_size, source.num_heads, source.num_groups
        run = runs.open_run(source.checkpoint, image_size=size, num_heads=heads, num_groups=groups)
        if source.labels is not None:
            run.check_label_file(source.labels)
        return run
    if given := [option_name(name) for name in _OF_CHECKPOINT if getattr(source, name) is not None]:
        raise UserError(f"{', '.join(given)} belong to --checkpoint, but --run is set; leave them out.")
    assert source.run is not None
    _check_directory(source.run)
    return runs.open_run_directory(source.run)


def export_folder(output: str) -> pathlib.Path:
    """The path of --output. Raises UserError for a place where nothing can be written, and for a run directory."""
    folder = run_directory.output_folder(output)
    if run_directory.is_run(folder):
        raise UserError(f"{output} is a run directory, which would no longer be used as one; give another --output.")
    return folder


def _check_directory(run: str) -> None:
    """Raise UserError for a file as the run to export, unless it is the model of one."""
    path = to_path(run)
    if path.is_file() and not (path.name == run_directory.MODEL and (path.parent / run_directory.LABELS).is_file()):
        run_directory.check_model_file(run)
        if path.suffix == ".tflite":
            raise UserError(f"{run} is an export already; give the directory of the run that it was exported from.")
        raise UserError(f"--run takes a directory, but {run} is a file; give --checkpoint {shlex.quote(run)}.")

"""Checks of options that commands make before TensorFlow is imported, which takes seconds."""

import os
import pathlib
import socket

from keras_vit import UserError
from keras_vit.errors import explained
from keras_vit.files.atomic import is_temporary
from keras_vit.files.labels import LABELS, check_classes
from keras_vit.files.lock import check_unlocked
from keras_vit.files.remote import is_remote, output_folder, to_path
from keras_vit.images.formats import is_hidden
from keras_vit.run import CONFIG, Run
from training.data.checks import check_data, listed_classes
from training.data.known_images import check_split
from training.loop.devices.backend import may_be_slice
from training.options.common import DataOptions, TrainingOptions
from training.options.data import PIPELINE, PROBLEMS, RECORD_INDEX
from training.options.features import FeatureOptions, ProbeOptions

# Until a host that does not answer counts as absent.
_CONNECT_SECONDS = 5


def check_data_service(options: TrainingOptions) -> None:
    """Raise UserError unless something listens at `--data-service`."""
    if options.service_place is not None:
        with explained(
            lambda reason: (
                f"No data service answers at {options.data_service} ({reason}); start its dispatcher there, "
                "or leave --data-service out."
            ),
            OSError,
            UnicodeError,
        ):
            socket.create_connection(options.service_place, _CONNECT_SECONDS).close()


def check_shards(output: str) -> None:
    """Raise UserError for a folder with files of something else, such as pictures: they would be mixed."""
    if is_remote(output) or not (folder := output_folder(output)).is_dir():
        return
    ours = (RECORD_INDEX, LABELS, PIPELINE, PROBLEMS)
    for entry in sorted(folder.iterdir()):
        is_ours = entry.suffix == ".tfrecord" or entry.name in ours
        if not (is_ours or is_temporary(entry) or is_hidden(entry.name)):
            raise UserError(
                f"{folder} should be new or empty, but holds {entry.name}; give --output a folder of its own."
            )


def check_outside(workdir: str, data: str) -> None:
    """Raise UserError for a run directory in the folder of the images, where it would be taken for one of a class."""
    kind, _, folder = data.partition(":")
    inner, outer = (to_path(path) if is_remote(path) else pathlib.Path(path).resolve() for path in (workdir, folder))
    if kind == "folder" and inner.is_relative_to(outer):
        raise UserError(
            f"--workdir must not lie in the folder of the data, but {workdir} is in {folder}; give one outside of it, "
            "such as runs/mine."
        )


def check_new_workdir(workdir: str) -> None:
    """Raise UserError for the directory of a finished run, and if something exists that is no run directory."""
    run = Run.at(workdir)
    run.check_free()
    if run.is_finished:
        raise UserError(f"{workdir} holds a finished run; choose another --workdir, or delete {workdir}.")


def check_workdir(options: TrainingOptions, command: str, recipe_name: str, *, is_final: bool) -> None:
    """Raise UserError if a workdir holds something else, or a run with other settings, is locked, or lies in the data.

    Args:
        options: of the command.
        command: see `TrainingOptions.settings`.
        recipe_name: see `TrainingOptions.settings`.
        is_final: whether the recipe of the options is that of the run, and does not depend on the data.
    """
    check_outside(options.workdir, options.source.data)
    if is_remote(options.workdir):
        return  # the rest is checked where TensorFlow reads it
    run = Run.at(options.workdir)
    run.check_free()
    try:
        saved = run.config["settings"]
        now = options.settings(command, recipe_name) | {"images": saved["images"]}
        if not is_final:
            now["recipe"] = saved["recipe"]
        elif saved["recipe"]["loss"] == "multi-label":  # which images of several classes each choose
            now["recipe"]["loss"] = "multi-label"
    except (ValueError, KeyError, TypeError):
        pass  # there is none, or it is reported later
    else:
        run.check_settings(now)
    hosts_of_slice = os.environ.get("KERAS_BACKEND") == "jax" and may_be_slice()
    if not (run.is_finished or options.devices.may_be_one_of_several() or hosts_of_slice):
        check_unlocked(run.path)


def open_backbone(options: FeatureOptions) -> Run:
    """Open the model whose features are measured. Raises UserError for it, its data, and an unusable output."""
    check_data(options.source)
    run = Run.open(options.run, image_size=options.image_size, num_heads=options.num_heads)
    workdir = options.workdir if isinstance(options, ProbeOptions) else None
    if workdir is not None:
        check_outside(workdir, options.source.data)
        check_new_workdir(workdir)
    if workdir is None or options.output is not None:
        report_directory(run, options.output)
    check_split(run, options.source)
    return run


def check_measured(run: Run, source: DataOptions, output: str | None) -> None:
    """Raise UserError unless a model can be measured on data that it does not know, and the report written."""
    check_data(source)
    report_directory(run, output)
    check_split(run, source)
    if run.labels and (classes := listed_classes(source)) is not None:
        check_classes(sorted(run.labels), sorted(classes))  # in whatever order


def report_directory(run: Run, output: str | None) -> pathlib.Path:
    """Return the directory of a report: `--output`, or that of the run; creates nothing.

    Raises UserError if there is neither, if it cannot be written, and for the directory of another run.
    """
    own = run.directory if run.file(CONFIG) else None
    if output is None and own is None:
        raise UserError(f"{run.name!r} is not a run directory to put the report into; give --output a directory.")
    directory = output_folder(output or own or "")
    if (directory / CONFIG).is_file() and not (own and directory.samefile(own)):
        raise UserError(
            f"{directory} is the directory of another run, not of {run.name}; give --output a directory of its own."
        )
    return directory

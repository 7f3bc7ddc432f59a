"""Checks of a directory to train into: empty, or a run of the same settings. No TensorFlow or Keras."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from keras_vit import UserError, run_directory
from keras_vit.files.atomic import is_temporary
from keras_vit.files.remote import is_remote, to_path
from keras_vit.runs import Run
from training.lock import LOCK, check_unlocked
from training.loop.devices.backend import may_be_slice
from training.options.common import TrainingOptions
from training.options.probes import ProbeOptions

# Options that may change when a run is resumed: they change where and how it is computed, not the result.
_CHANGEABLE = ("workdir", "devices", "execution", "dry_run", "chips", "model_parallel", "shard_weights", "data_service")
# Defaults of fields that older runs do not have.
_NEWER = (("zero_shot_head", False), ("templates", None), ("wise_ft", 1.0), ("knn_every", None), ("new_head", False))
_NEWER_IN_RECIPE = (("class_weights", False),)
# The same of runs that have --unlabelled only where it is given, and the options for it.
_OF_UNLABELLED = ("unlabelled", "learn_by", "confidence", "rounds")
# The same of pretraining; of fine-tuning, all runs have it.
_NEWER_OF_PRETRAINING = (("checkpoint", None),)
# Settings of another run that a message names.
_MOST_DIFFERENCES = 5


def check_workdir(path: pathlib.Path) -> None:
    """Raise UserError if something exists that is no run directory, finished or not."""
    if (path / run_directory.CONFIG).is_file():
        return
    places = (path,) if is_remote(path) else (path, *path.parents)
    there = next((place for place in places if place.exists()), None)
    is_free = there != path or (path.is_dir() and all(map(_is_of_no_run, path.iterdir())))
    if there is not None and not (there.is_dir() and is_free):
        raise UserError(f"{there} exists and is not a run directory; give a new or empty --workdir.")


def _is_of_no_run(entry: pathlib.Path) -> bool:
    return is_temporary(entry) or entry.name.endswith(LOCK)


def check_new_workdir(workdir: str) -> None:
    """Raise UserError for the directory of a finished run, and if something exists that is no run directory."""
    path = to_path(workdir)
    check_workdir(path)
    if (path / run_directory.MODEL).is_file():
        raise UserError(f"{path} holds a finished run; choose another --workdir, or delete {path}.")


def check_probe_workdir(run: Run, options: ProbeOptions) -> None:
    """Raise UserError unless the run of a probe, if any, and its report can be written."""
    if options.workdir is not None:
        check_outside(options.workdir, options.source.data)
        check_new_workdir(options.workdir)
    if options.workdir is None or options.output is not None:
        report_directory(run, options.output)


def report_directory(run: Run, output: str | None) -> pathlib.Path:
    """The directory of a report: `--output`, or that of the run; creates nothing.

    Raises UserError if there is neither, if it cannot be written, and for the directory of another run.
    """
    own = run.directory if run.file(run_directory.CONFIG) else None
    if output is None and own is None:
        raise UserError(f"{run.name!r} is not a run directory to put the report into; give --output a directory.")
    directory = run_directory.output_folder(output or own or "")
    if (directory / run_directory.CONFIG).is_file() and not (own and directory.samefile(own)):
        raise UserError(
            f"{directory} is the directory of another run, not of {run.name}; give --output a directory of its own."
        )
    return directory


def check_outside(workdir: str, data: str) -> None:
    """Raise UserError for a run directory in the folder of the images, where it would be taken for one of a class."""
    kind, _, folder = data.partition(":")
    inner, outer = (to_path(path) if is_remote(path) else pathlib.Path(path).resolve() for path in (workdir, folder))
    if kind == "folder" and inner.is_relative_to(outer):
        raise UserError(
            f"--workdir must not lie in the folder of the data, but {workdir} is in {folder}; give one outside of it, "
            "such as runs/mine."
        )


def check_workdir_of(options: TrainingOptions, command: str, recipe_name: str, *, is_final: bool) -> None:
    """Raise UserError if a workdir holds something else, or a run with other settings, is locked, or lies in the data.

    Args:
        options: of the command.
        command: see `run_settings`.
        recipe_name: see `run_settings`.
        is_final: whether the recipe of the options is that of the run, and does not depend on the data.
    """
    check_outside(options.workdir, options.source.data)
    if is_remote(options.workdir):
        return  # the rest is checked where TensorFlow reads it
    path = options.directory
    check_workdir(path)
    try:
        saved = json.loads((path / run_directory.CONFIG).read_text(encoding="utf-8"))["settings"]
        now = run_settings(options, command, recipe_name) | {"images": saved["images"]}
        if not is_final:
            now["recipe"] = saved["recipe"]
        elif saved["recipe"]["loss"] == "multi-label":  # which images of several classes each choose
            now["recipe"]["loss"] = "multi-label"
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or it is reported later
    else:
        check_settings(path, saved, now)
    hosts_of_slice = os.environ.get("KERAS_BACKEND") == "jax" and may_be_slice()
    if not ((path / run_directory.MODEL).is_file() or options.devices.may_be_one_of_several() or hosts_of_slice):
        check_unlocked(path)


def run_settings(options: TrainingOptions, command: str, recipe_name: str) -> dict[str, Any]:
    """Everything but the images that changes the result of a run, as in config.json."""
    settings = {name: value for name, value in dataclasses.asdict(options).items() if name not in _CHANGEABLE}
    # Runs did not have them before, and continue without.
    newer = _NEWER + (_NEWER_OF_PRETRAINING if command == "pretrain" else ())
    settings = {name: value for name, value in settings.items() if (name, value) not in newer}
    if settings.get("unlabelled") is None:
        settings = {name: value for name, value in settings.items() if name not in _OF_UNLABELLED}
    recipe = settings["recipe"].items()
    settings["recipe"] = {name: value for name, value in recipe if (name, value) not in _NEWER_IN_RECIPE}
    settings["source"] = options.source.settings()
    execution = {name: getattr(options.execution, name) for name in ("precision", "deterministic")}
    return {"command": command, "recipe_name": recipe_name, **execution, **settings}


def check_settings(path: pathlib.Path, saved: dict, now: dict) -> None:
    """Raise UserError if the settings of the run in a directory are not those of now."""
    now = json.loads(json.dumps(now))  # tuples become lists, as in the file
    if saved == now:
        return
    there, here = _command_of(saved), _command_of(now)
    what = f"a run of {there}, but this one is of {here}"  # then most of the other settings differ too
    if there == here:
        what = f"another run, which differs in {differences(saved, now)}"
    raise UserError(f"{path} already holds {what}; choose another --workdir, or delete {path}.")


def _command_of(settings: dict) -> str:
    """The command of a run, with its recipe if it has one."""
    recipe = settings.get("recipe_name")
    return f"training.{settings.get('command')}" + (f" with the recipe {recipe}" if recipe else "")


def differences(there: dict, here: dict) -> str:
    """Return `field (there 1, here 2)` for nested settings that differ: of the first fields, and how many more do."""

    def flat(settings, prefix: str = "") -> dict:
        if not isinstance(settings, dict):
            return {prefix: settings}
        return {key: leaf for name, part in settings.items() for key, leaf in flat(part, f"{prefix}.{name}").items()}

    there, here = flat(there), flat(here)
    found = [
        f"{key[1:]} (there {there.get(key)!r}, here {here.get(key)!r})"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    more = len(found) - _MOST_DIFFERENCES
    return ", ".join(found[:_MOST_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")

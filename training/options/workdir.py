"""Run directories to write into: what one may hold, its lock, and the settings of its run.

Imports neither TensorFlow nor Keras.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import socket
import time
from collections.abc import Iterator
from typing import Any

from keras_vit import UserError, run_directory
from keras_vit.files.atomic import is_temporary
from keras_vit.files.remote import is_remote, to_path
from training.options.common import TrainingOptions

# Name of the file that a process locks while it writes into a run directory, or its ending.
LOCK = ".lock"
# How long a process waits for the lock of another: one that was just killed holds it a moment longer.
_LOCK_WAIT = 5.0
# Errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
# Options that may change when a run is resumed: they change where and how it is computed, not the result.
_CHANGEABLE = ("workdir", "devices", "execution", "dry_run", "model_parallel")
# Settings of another run that a message names.
_MOST_DIFFERENCES = 5


def check_workdir(path: pathlib.Path) -> None:
    """Raise UserError if something exists that is no run directory, finished or not."""
    nearest = next((parent for parent in path.parents if parent.exists()), None)
    if not is_remote(path) and nearest is not None and not nearest.is_dir():
        raise UserError(f"{nearest} is a file, so there can be no {path}; give another --workdir.")
    if (path / run_directory.CONFIG).is_file() or not path.exists():
        return
    if not path.is_dir() or not all(is_temporary(entry) or entry.name.endswith(LOCK) for entry in path.iterdir()):
        raise UserError(f"{path} exists and is not a run directory; give a new or empty --workdir.")


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
    path = to_path(options.workdir)
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
    if not (path / run_directory.MODEL).is_file() and not _has_workers(options):
        check_unlocked(path)


def _has_workers(options: TrainingOptions) -> bool:
    """Whether several processes may be given the same workdir, of which one takes the lock."""
    strategy = options.devices.strategy
    return strategy == "multi-worker" or (
        strategy == "auto" and not {"TF_CONFIG", "SLURM_PROCID"}.isdisjoint(os.environ)
    )


@contextlib.contextmanager
def locked(folder: pathlib.Path, name: str = LOCK) -> Iterator[None]:
    """Hold an exclusive lock on a directory, which is created if needed.

    The operating system releases the lock when the process ends, so a lock file that a killed process left behind does
    no harm. It works across machines on file systems with locks, such as NFS, but not on a mounted bucket.

    Args:
        folder: the directory.
        name: of the lock file in it; different names are independent locks.

    Raises UserError if another process still holds the lock after some seconds.
    """
    if is_remote(folder):
        print(f"{folder} has no locks; make sure that no other process trains there.")
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a new or empty directory as --workdir.")
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _lock_taken(folder / name):
            yield
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


@contextlib.contextmanager
def _lock_taken(file: pathlib.Path) -> Iterator[None]:
    end = time.monotonic() + _LOCK_WAIT
    while True:
        with open(file, "a+", encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _lock_held(file) from None
                time.sleep(0.1)
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                print(f"The file system of {file.parent} has no locks; make sure that no other process trains there.")
            if not _is_same_file(file, stream.fileno()):
                continue  # its last holder removed it between open and flock
            _warn_of_other_machine(file)
            stream.truncate(0)
            stream.write(f"{os.getpid()} on {socket.gethostname()}")
            stream.flush()
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return


def check_unlocked(folder: pathlib.Path) -> None:
    """Raise UserError if another process holds the lock of a directory for some seconds; takes and creates nothing."""
    file = folder / LOCK
    end = time.monotonic() + _LOCK_WAIT
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _lock_held(file) from None
                time.sleep(0.1)


def _lock_held(file: pathlib.Path) -> UserError:
    return UserError(
        f"Another process, {_lock_holder(file)}, writes into {file.parent}; wait until it ends, or give another "
        "--workdir."
    )


def _is_same_file(file: pathlib.Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock_holder(file: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")[:200].strip() or "which has just started"
    return "which is just ending"


def _warn_of_other_machine(file: pathlib.Path) -> None:
    """Warn of a lock file left by another machine: its process was killed, or the file system hides its lock."""
    holder = _lock_holder(file)
    if " on " in holder and not holder.endswith(f" on {socket.gethostname()}"):
        print(
            f"Process {holder} did not remove its lock of {file.parent}. If it still runs, end one of the two: some "
            "file systems, such as a mounted bucket, do not share locks between machines."
        )


def check_no_run(output: str) -> None:
    """Raise UserError for a run directory as the place of a data set: its labels.txt would be replaced."""
    if not is_remote(output) and (to_path(output) / run_directory.CONFIG).is_file():
        raise UserError(f"{output} is a run directory; give --output a folder of its own.")


def run_settings(options: TrainingOptions, command: str, recipe_name: str) -> dict[str, Any]:
    """Everything but the images that changes the result of a run, as in config.json."""
    settings = {name: value for name, value in dataclasses.asdict(options).items() if name not in _CHANGEABLE}
    settings["source"] = options.source.settings()
    return {"command": command, "recipe_name": recipe_name, "precision": options.execution.precision, **settings}


def check_settings(path: pathlib.Path, saved: dict, now: dict) -> None:
    """Raise UserError if the settings of the run in a directory are not those of now."""
    now = json.loads(json.dumps(now))  # tuples become lists, as in the file
    there, here = _command_of(saved), _command_of(now)
    if there != here:  # then most of the other settings differ too
        raise UserError(
            f"{path} already holds a run of {there}, but this one is of {here}; give another --workdir, or remove "
            "that one."
        )
    if saved != now:
        raise UserError(
            f"{path} already holds another run, which differs in {differences(saved, now)}; give another --workdir, "
            "or remove that one."
        )


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

"""The run directory: what a run is, what it gave, and what it needs to go on. `keras_vit.run_directory` reads it.

config.json, labels.txt, model.keras, samples.npz, calibration.npz, metrics.jsonl, tensorboard/, checkpoints/,
curves.png. Every file of ours is written under a temporary name and renamed, so that each is whole or not there. The
first is config.json, which makes the directory a run; the last is model.keras, which makes the run finished.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import platform
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError, run_directory
from keras_vit.files.atomic import atomic_write, is_temporary, write_text
from keras_vit.files.labels import labels_text

# The file whose lock says that a process writes into the directory, and for how many seconds a process waits for it:
# one that was just killed holds it a moment longer.
LOCK = ".lock"
_LOCK_WAIT = 5.0
# What a file system says that has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory by its path."""

    path: pathlib.Path

    @property
    def config_file(self) -> pathlib.Path:
        return self.path / run_directory.CONFIG

    @property
    def labels_file(self) -> pathlib.Path:
        return self.path / run_directory.LABELS

    @property
    def model_file(self) -> pathlib.Path:
        return self.path / run_directory.MODEL

    @property
    def metrics_file(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_folder(self) -> pathlib.Path:
        return self.path / "checkpoints"

    def start(self, settings: dict, labels: tuple[str, ...]) -> None:
        """Make the directory, or see that it holds this very run. Raises UserError when it holds anything else.

        Args:
            settings: what decides the numbers of the run, as JSON can hold it.
            labels: names of the classes.
        """
        settings = json.loads(json.dumps(settings))  # tuples become lists, as they will be when read back
        unfinished = self._unfinished()
        if self.config_file.is_file():
            self._check_same(settings, labels)
        elif self.path.exists() and not (self.path.is_dir() and self._holds_only(unfinished)):
            raise UserError(f"{self.path} exists and is no run directory; give a new or empty --workdir.")
        for file in unfinished:
            file.unlink()
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.config_file.is_file():
            config = {"id": uuid.uuid4().hex, "settings": settings, "environment": environment()}
            write_text(self.config_file, json.dumps(config, indent=2) + "\n")
        if not self.labels_file.is_file():
            write_text(self.labels_file, labels_text(labels))
        self.checkpoints_folder.mkdir(exist_ok=True)

    def _holds_only(self, unfinished: list[pathlib.Path]) -> bool:
        return all(file in unfinished or file.name.endswith(LOCK) for file in self.path.iterdir())

    def _unfinished(self) -> list[pathlib.Path]:
        """Temporary files that a killed process left."""
        folders = [folder for folder in (self.path, self.checkpoints_folder) if folder.is_dir()]
        return [file for folder in folders for file in folder.iterdir() if is_temporary(file)]

    def _check_same(self, settings: dict, labels: tuple[str, ...]) -> None:
        """Raises UserError when the directory holds a run of other settings or other classes."""
        try:
            there = json.loads(self.config_file.read_text(encoding="utf-8"))["settings"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.config_file} is damaged or of no run of ours; give another --workdir, or remove that one."
            ) from None
        if self.labels_file.is_file():
            known = run_directory.load_labels(self.path)
            if known != labels:
                raise UserError(
                    f"{self.path} began with {len(known)} classes and the data have {len(labels)}, of which "
                    f"{', '.join(sorted(set(known) ^ set(labels))[:5]) or 'only the order'} differ; "
                    "give another --workdir, or the data as they were."
                )
        if there != settings:
            raise UserError(
                f"{self.path} already holds another run, which differs in {differences(there, settings)}; "
                "give another --workdir, or remove that one."
            )

    def save_model(self, model: keras.Model) -> None:
        """Write model.keras, of a model that is not compiled: whoever loads it needs keras_vit alone."""
        try:
            with atomic_write(self.model_file) as temporary:
                model.save(temporary)
        except OSError as error:
            raise UserError(
                f"The trained model could not be written to {self.path} ({error.strerror or error}); its last state is "
                "whole: make room, and the same command continues."
            ) from error

    def metrics(self) -> list[dict]:
        """One record for each finished epoch."""
        if not self.metrics_file.is_file():
            return []
        try:
            return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]
        except ValueError:
            raise UserError(f"{self.metrics_file} is damaged; remove {self.path} to begin anew.") from None

    def write_metrics(self, records: list[dict]) -> None:
        """Replace metrics.jsonl."""
        write_text(self.metrics_file, "".join(json.dumps(record) + "\n" for record in records))


@contextlib.contextmanager
def locked(folder: pathlib.Path, name: str = LOCK) -> Iterator[None]:
    """Within it no other process that asks for the same lock writes into the directory, which is made if need be.

    The operating system holds the lock and frees it with the process, so that a file which a killed one left is no
    obstacle. Machines see each other's where the file system carries locks, as NFS does; a mounted bucket does not.

    Args:
        folder: a directory, or what shall become one.
        name: of the file in it, so that who holds one lock may run what takes another.

    Raises UserError, after some seconds, when another process has it.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a new or empty directory as --workdir.")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _lock_taken(folder / name):
            yield
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not empty: something was written
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
                    raise UserError(
                        f"Another process, {_holder(file)}, writes into {file.parent}; wait for its end, or give "
                        "another --workdir."
                    ) from None
                time.sleep(0.1)
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                print(f"The file system of {file.parent} has no locks; see that no other process trains there.")
            if not _is_still(file, stream.fileno()):
                continue  # its last holder removed it between the two lines above
            _warn_of_elsewhere(file)
            stream.truncate(0)
            stream.write(f"{os.getpid()} on {socket.gethostname()}")
            stream.flush()
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return


def _is_still(file: pathlib.Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(file: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")[:200].strip() or "which has just begun"
    return "which is just ending"


def _warn_of_elsewhere(file: pathlib.Path) -> None:
    """A process of another machine left its name: it was killed, or the file system hides its lock."""
    before = _holder(file)
    if " on " in before and not before.endswith(f" on {socket.gethostname()}"):
        print(
            f"Process {before} left {file.parent} without a word; if it still runs, which a file system without locks "
            "between machines, such as a mounted bucket, would hide, end one of the two."
        )


def differences(there: dict, here: dict) -> str:
    """`field (there 1, here 2)` for every field of nested settings that differs."""

    def flat(settings, prefix: str = "") -> dict:
        if not isinstance(settings, dict):
            return {prefix: settings}
        return {key: leaf for name, part in settings.items() for key, leaf in flat(part, f"{prefix}.{name}").items()}

    there, here = flat(there), flat(here)
    return ", ".join(
        f"{key[1:]} (there {there.get(key)!r}, here {here.get(key)!r})"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    )


def environment() -> dict:
    """The versions that the numbers of a run depend on, and the commit of this code where it is a git checkout."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    versions = {"python": platform.python_version(), "tensorflow": tf.__version__, "keras": keras.__version__}
    return {"git_commit": commit, **versions, "numpy": np.__version__}

"""The run directory: what a run is, what it gave, and what it needs to go on. `keras_vit.run_directory` reads it.

config.json, labels.txt, model.keras, samples.npz, calibration.npz, metrics.jsonl, tensorboard/, checkpoints/,
curves.png. Every file of ours is written under a temporary name and renamed, so that each is whole or not there. The
first is config.json, which makes the directory a run; the last is model.keras, which makes the run finished.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError, run_directory

# What `written_whole` and `write_npz` call a file until it is whole.
_TEMPORARY = re.compile(r".+\.\d+\.tmp(\.\w+)?")


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
    def states_folder(self) -> pathlib.Path:
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
        elif self.path.exists() and (not self.path.is_dir() or set(self.path.iterdir()) - set(unfinished)):
            raise UserError(f"{self.path} exists and is no run directory; give a new or empty --workdir.")
        for file in unfinished:
            file.unlink()
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.config_file.is_file():
            config = {"settings": settings, "environment": environment()}
            write_text(self.config_file, json.dumps(config, indent=2) + "\n")
        if not self.labels_file.is_file():
            write_text(self.labels_file, run_directory.labels_text(labels))
        self.states_folder.mkdir(exist_ok=True)

    def _unfinished(self) -> list[pathlib.Path]:
        """Temporary files that a killed process left."""
        folders = [folder for folder in (self.path, self.states_folder) if folder.is_dir()]
        return [file for folder in folders for file in folder.iterdir() if _TEMPORARY.fullmatch(file.name)]

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
        with written_whole(self.model_file) as temporary:
            model.save(temporary)

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


@contextlib.contextmanager
def written_whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a temporary path to write to, which becomes `path` when the block ends well and else is removed."""
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a small file whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")

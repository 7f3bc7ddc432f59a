"""The run directory: what a run is, what it gave, and what it needs to go on. `keras_vit.run_directory` reads it.

config.json, labels.txt, model.keras, samples.npz, metrics.jsonl, tensorboard/, checkpoints/, curves.png. Every file of
ours is written under a temporary name and renamed, so that each is whole or not there.
"""

import dataclasses
import json
import os
import pathlib
import platform
import subprocess

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError, run_directory
from keras_vit.npz import read_npz, write_npz


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory by its path."""

    path: pathlib.Path

    @property
    def config_file(self) -> pathlib.Path:
        return self.path / run_directory.CONFIG

    @property
    def model_file(self) -> pathlib.Path:
        return self.path / run_directory.MODEL

    @property
    def metrics_file(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def state_file(self) -> pathlib.Path:
        return self.path / "checkpoints" / "state.npz"

    def start(self, settings: dict, labels: tuple[str, ...]) -> None:
        """Make the directory, or see that it holds this very run. Raises UserError when it holds anything else.

        Args:
            settings: what decides the numbers of the run, as JSON can hold it.
            labels: names of the classes.
        """
        settings = json.loads(json.dumps(settings))  # tuples become lists, as they will be when read back
        if self.config_file.is_file():
            there = json.loads(self.config_file.read_text()).get("settings", {})
            if there != settings:
                raise UserError(
                    f"{self.path} already holds another run, which differs in {_differences(there, settings)}; "
                    "give another --workdir, or remove that one."
                )
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(f"{self.path} exists and is no run directory; give a new or empty --workdir.")
        self.state_file.parent.mkdir(parents=True)
        write_text(self.path / run_directory.LABELS, "".join(f"{label}\n" for label in labels))
        config = {"settings": settings, "environment": environment()}
        write_text(self.config_file, json.dumps(config, indent=2) + "\n")

    def save_model(self, model: keras.Model) -> None:
        """Write model.keras, without the optimizer."""
        temporary = self.path / f"model.{os.getpid()}.tmp.keras"
        try:
            model.save(temporary, include_optimizer=False)
            os.replace(temporary, self.model_file)
        finally:
            temporary.unlink(missing_ok=True)

    def metrics(self) -> list[dict]:
        """One record for each finished epoch."""
        if not self.metrics_file.is_file():
            return []
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]

    def write_metrics(self, records: list[dict]) -> None:
        """Replace metrics.jsonl."""
        write_text(self.metrics_file, "".join(json.dumps(record) + "\n" for record in records))


def _differences(there: dict, here: dict) -> str:
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


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a small file whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def save_state(run: Run, model: keras.Model, epoch: int) -> None:
    """Everything that training goes on from after `epoch` finished epochs: weights, optimizer, random state."""
    arrays = {f"{group}/{index:05d}": variable.numpy() for group, index, variable in _state_variables(model)}
    write_npz(run.state_file, {"epoch": np.float64(epoch), **arrays})


def restore_state(run: Run, model: keras.Model) -> int:
    """Put the last saved state into a compiled model and return the number of finished epochs; 0 without a state."""
    if not run.state_file.is_file():
        return 0
    arrays = read_npz(run.state_file)
    for group, index, variable in _state_variables(model):
        variable.assign(arrays[f"{group}/{index:05d}"])
    return int(arrays["epoch"])


def _state_variables(model: keras.Model):
    """(group, index, variable) of all that changes in training; dropout's seeds are among the model's variables."""
    for group, variables in (("model", model.variables), ("optimizer", model.optimizer.variables)):
        for index, variable in enumerate(variables):
            yield group, index, variable

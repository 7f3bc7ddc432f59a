"""Write a run directory, which `keras_vit.run_directory` reads.

It holds config.json, labels.txt, model.keras, samples.npz, calibration.npz, metrics.jsonl and metrics.csv,
tensorboard/, checkpoints/ and curves.png. Files are written under a temporary name and renamed, so none is ever
incomplete. config.json is written first and marks the directory as a run; model.keras is written last and marks the run
as finished.
"""

import csv
import dataclasses
import io
import json
import pathlib
import platform
import subprocess
import uuid
from typing import Any

import keras
import matplotlib.figure
import numpy as np
import tensorflow as tf

from keras_vit import UserError, run_directory
from keras_vit.errors import reading
from keras_vit.files.atomic import atomic_write, remove_temporary, write_text
from keras_vit.files.labels import labels_text, read_labels
from keras_vit.files.remote import RemoteError
from keras_vit.models.build import numbers_of_classes, set_classes
from keras_vit.models.config import Classes
from training.data.checks import check_classes
from training.workdir import check_settings, check_workdir


@dataclasses.dataclass(frozen=True)
class RunDirectory:
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
        return self.path / run_directory.CHECKPOINTS

    def start(
        self, settings: dict, labels: tuple[str, ...], weights: dict | None = None, *, images: int | None = None
    ) -> None:
        """Create the directory, or check that it holds the same run. Raises UserError if it holds anything else.

        Args:
            settings: everything that changes the result of the run, as JSON values.
            labels: names of the classes.
            weights: name and license of the checkpoint at the start, for config.json; None if there is none.
            images: `DataSet.fingerprint` of the data; None where it has none.
        """
        self.check(settings, labels, images=images)
        for folder in (self.path, self.checkpoints_folder):
            remove_temporary(folder)
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.config_file.is_file():
            config: dict[str, Any] = {"id": uuid.uuid4().hex, "settings": settings, "environment": environment()}
            config |= {} if weights is None else {"weights": weights}
            config |= {} if images is None else {run_directory.IMAGES: images}
            write_text(self.config_file, json.dumps(config, indent=2) + "\n")
        if not self.labels_file.is_file():
            write_text(self.labels_file, labels_text(labels))
        self.checkpoints_folder.mkdir(exist_ok=True)

    def check(self, settings: dict, labels: tuple[str, ...], *, images: int | None = None) -> None:
        """Raise UserError if the directory holds anything but the same run. See `start` for the arguments."""
        if self.config_file.is_file():
            self._check_same(settings, labels, images)
        else:
            check_workdir(self.path)

    def _check_same(self, settings: dict, labels: tuple[str, ...], images: int | None) -> None:
        """Raises UserError if the directory holds a run with other settings, classes or images."""
        advice = "choose another --workdir, or delete it"
        with reading(self.config_file, "the settings of a run", KeyError, TypeError, advice=advice):
            config = json.loads(self.config_file.read_text(encoding="utf-8"))
            saved, saved_images = config["settings"], config.get(run_directory.IMAGES, images)
        if self.labels_file.is_file():
            saved_labels, advice = run_directory.load_labels(self.path), "give another --workdir, or the original data"
            check_classes(saved_labels, labels, f"The run in {self.path}", advice)
        check_settings(self.path, saved, settings)
        if saved_images != images:
            raise UserError(
                f"{self.path} was started with other images than the data hold now: files were changed, renamed or "
                "moved to another class; give the images as they were, or another --workdir."
            )

    def save_model(self, model: keras.Model) -> None:
        """Write model.keras with the names of its classes, not compiled, so that loading it needs only keras_vit."""
        labels = read_labels(self.labels_file) if self.labels_file.is_file() else ()
        if labels and len(labels) in numbers_of_classes(model):
            settings = run_directory.read_config(self.config_file).get("settings", {})
            is_multi_label = settings.get("recipe", {}).get("loss") == "multi-label"
            set_classes(model, Classes(labels, multi_label=is_multi_label))
        try:
            with atomic_write(self.model_file) as temporary:
                model.save(temporary)
        except RemoteError:
            raise
        except OSError as error:
            raise UserError(
                f"The trained model could not be written to {self.path} ({error.strerror or error}); the last "
                "checkpoint is intact: make room, and the same command continues."
            ) from error

    def metrics(self) -> list[dict]:
        """Return the metrics of each finished epoch."""
        if not self.metrics_file.is_file():
            return []
        with reading(self.metrics_file, "lines of JSON", advice=f"remove {self.path} to start again"):
            return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]

    def write_metrics(self, records: list[dict]) -> None:
        """Replace metrics.jsonl, and metrics.csv with the same numbers for spreadsheets."""
        write_text(self.metrics_file, "".join(json.dumps(record) + "\n" for record in records))
        columns = list(dict.fromkeys(name for record in records for name in record))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        write_text(self.metrics_file.with_suffix(".csv"), text.getvalue())


def write_curves(run: RunDirectory) -> None:
    """Plot the loss and the accuracy over the epochs to curves.png."""
    records = run.metrics()
    epochs = [record["epoch"] for record in records]
    names = [name for name in ("loss", "accuracy", "binary_accuracy") if name in records[-1]]
    figure = matplotlib.figure.Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        axes.plot(epochs, [record[name] for record in records], color="tab:blue", label="training")
        axes.plot(epochs, [record[f"val_{name}"] for record in records], color="tab:orange", label="evaluation")
        axes.set(xlabel="epoch", title=name)
        axes.grid(alpha=0.3)
        axes.legend()
    with atomic_write(run.path / "curves.png") as temporary:
        figure.savefig(temporary, dpi=120)


def environment() -> dict:
    """Return the versions that results depend on, and the commit of this code if it is a git checkout."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    versions = {"python": platform.python_version(), "tensorflow": tf.__version__, "keras": keras.__version__}
    return {"git_commit": commit, **versions, "numpy": np.__version__}

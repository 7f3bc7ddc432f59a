"""A run: its directory, written by training and read by every later command. A model without one is opened likewise.

A run directory, its model.keras, any other .keras file and a checkpoint of any published layout are the same to those
who take a `Run`. Nothing is loaded or downloaded before it is asked for, and nothing twice.
"""

import csv
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit.checkpoints.checkpoint import Checkpoint, LoadOptions, open_checkpoint
from keras_vit.checkpoints.find import check_name, find_checkpoint
from keras_vit.errors import UserError, explained, reading, refuse_first
from keras_vit.files.atomic import LOCK, atomic_write, is_temporary, remove_temporary, write_text
from keras_vit.files.documents import read_bytes
from keras_vit.files.keras_model import MODEL, find, is_keras_model
from keras_vit.files.kinds import MODEL_SUFFIXES, kind_of, readable_kind
from keras_vit.files.labels import LABELS, check_classes, check_number, labels_text, read_labels
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.remote import can_be_saved_model, existing_file, is_remote, is_web, to_path
from keras_vit.images.files import SAMPLES
from keras_vit.models.config import Classes
from keras_vit.promise import PROMISE, Promise, read_promise
from keras_vit.scores import UNKNOWN, Scoring, UnknownScorer, read_unknown

if TYPE_CHECKING:
    import keras

    from keras_vit.images.preprocessing import Preprocessing

CONFIG, METRICS = "config.json", "metrics.jsonl"
CALIBRATION = "calibration.npz"  # training images, for calibration without the evaluation images
# Digests of the files of the training images, by which they are found among others.
TRAINING_IMAGES = "training_images.npz"
TEMPERATURE = "temperature.json"  # the temperature that `keras-vit evaluate --calibrate` fitted
MONITOR = "monitor.npz"  # summary of the evaluation images by `keras-vit monitor`, which exports carry
SPLIT = "split.json"  # what the groups of its images change, for its report
CHECKPOINTS = "checkpoints"  # folder with the checkpoints of training
IMAGES = "images_fingerprint"  # field of config.json: `DataSet.fingerprint` of the data
_MOST_DIFFERENCES = 5  # settings of another run that a message names
# Files of a run that could be taken for a model's.
_OTHER_FILES = (SAMPLES, TRAINING_IMAGES, CALIBRATION, UNKNOWN, PROMISE, MONITOR)
_SAVED_MODEL = "saved_model.pb"
# Files with a model, of ours or published. What is said of a pickle is more than that it is no run.
_MODELS = (MODEL, "*.safetensors", "*.bin", "*.pth", "*.h5", "*.msgpack", _SAVED_MODEL, f"*/{_SAVED_MODEL}")
_USUAL_DATA = {"train_split": "train", "on_bad_image": "stop", "group": "auto"}  # options of the data at their defaults


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A run directory, a .keras file, a checkpoint or an export: `open` reads one, `at` is one to write.

    A run directory holds config.json, labels.txt, model.keras, samples.npz, calibration.npz, metrics.jsonl and
    metrics.csv, tensorboard/, checkpoints/ and curves.png. Files are written under a temporary name and renamed, so
    none is ever incomplete. config.json is written first and marks the directory as a run; model.keras is written last
    and marks the run as finished.
    """

    name: str
    """As the user gave it, for messages and reports."""
    image_size: tuple[int, int] | None = None
    """(height, width) in pixels to take the model to; None keeps its own, of a checkpoint that of its preprocessing."""
    num_heads: int | None = None
    """Attention heads, for a checkpoint that does not tell them."""
    num_groups: int | None = None
    """Groups of GroupNorm, likewise."""
    texts: Classes | None = None
    """The classes that a checkpoint with a text tower gets as its head; None keeps its own head."""
    is_directory: bool = False
    """Whether it is a run directory in any case, which may not be written yet."""

    @classmethod
    def open(
        cls,
        name: str | os.PathLike,
        *,
        image_size: tuple[int, int] | None = None,
        num_heads: int | None = None,
        num_groups: int | None = None,
        texts: Classes | None = None,
    ) -> "Run":
        """Open a run directory, a .keras file, a checkpoint file or folder, an address or an official name.

        See the fields for the arguments. Raises UserError for what is no model; a download fails only when the model
        is asked for.
        """
        run = cls(os.fsdecode(name), image_size, num_heads, num_groups, texts)
        if texts is not None:
            run._refuse_settings()
        check_name(run.name)
        if is_remote(run.name):
            return run
        check_model_file(run.name)
        if run.file(MODEL):
            run._refuse_settings()
            _ = run.config  # raises UserError if it is damaged
        if run.path.is_dir() and not any(entry for pattern in _MODELS for entry in run.path.glob(pattern)):
            find(run.path)  # raises UserError
        return run

    @classmethod
    def open_directory(cls, path: str | os.PathLike) -> "Run":
        """Open the directory of a finished run, or the model in it. Raises UserError for anything else."""
        place = to_path(path)
        place = place.parent if place.name == MODEL and place.is_file() else place
        find(place)
        return cls.open(place)

    @classmethod
    def at(cls, directory: str | os.PathLike) -> "Run":
        """Return the run of a directory that may not be written yet."""
        return cls(os.fsdecode(directory), is_directory=True)

    @classmethod
    def of_model(cls, model: "keras.Model", name: str = "a model in memory", labels: tuple[str, ...] = ()) -> "Run":
        """Return a run of a model in memory, without files. labels: of its classes. Default: those that it knows."""
        from keras_vit.models.build import classes_of, model_spec  # lazy: imports Keras

        model_spec(model)  # refuses a model that is not of keras_vit
        run, labels = cls(name), labels or classes_of(model) or ()
        known = {"model": model, "published": None, "labels": labels, "class_names": labels, "unknown": None}
        run.__dict__.update(known, directory=None)  # as `cached_property` stores what it has computed
        return run

    @functools.cached_property
    def path(self) -> pathlib.Path:
        """Where it is; of an address or official name, nothing need be there yet."""
        return to_path(self.name)

    @functools.cached_property
    def directory(self) -> pathlib.Path | None:
        """The run directory, which it is itself or whose model.keras it is; None if there is none.

        The folder of a published checkpoint is none, although it may have a config.json, too.
        """
        if self.is_directory:
            return self.path
        if self.path.name == MODEL:
            return self.path.parent
        return self.path if not is_web(self.name) and self.path.is_dir() and is_keras_model(self.path) else None

    @property
    def is_ours(self) -> bool:
        """Whether it is a run directory or .keras file, and no published checkpoint."""
        return self.path.suffix == ".keras" or self.directory is not None

    def file(self, name: str) -> pathlib.Path | None:
        """Return a file of the run directory; None if there is none."""
        path = self.directory / name if self.directory else None
        return path if path and path.is_file() else None

    # The model

    @functools.cached_property
    def checkpoint(self) -> pathlib.Path:
        """The local file or folder of the weights, downloaded if necessary; of a run in a bucket, its place."""
        is_in_bucket = is_remote(self.name) and not is_web(self.name) and self.is_ours
        return self.path if is_in_bucket else find_checkpoint(self.name)

    @functools.cached_property
    def published(self) -> Checkpoint | None:
        """The opened checkpoint of a published layout; None of a model of ours."""
        return None if is_keras_model(self.checkpoint) else open_checkpoint(self.checkpoint)

    @functools.cached_property
    def model(self) -> "keras.Model":
        """The trained model with its own head, loaded once.

        Raises UserError for a file that cannot be read, and for settings of a checkpoint beside a model that has them.
        """
        # lazy: importing Keras takes seconds
        from keras_vit.checkpoints.from_checkpoint import adapt, build_checkpoint, load_named_model

        if self.texts is not None:
            from keras_vit.text.zero_shot import zero_shot

            classes = dict(zip(self.texts.labels, self.texts.texts, strict=True))
            return zero_shot(self.name, classes, self.texts.templates, self.image_size)
        if self.published is None:
            self._refuse_settings()
            model = load_named_model(self.checkpoint)
            return model if self.image_size is None else adapt(model, image_size=self.image_size)
        size, images = self.image_size, self.published.file_config.images
        if size is None and images is not None:  # DINOv2's positions are for 518 pixels, but its features are of 224
            size = images.size
        options = LoadOptions(image_size=size, num_heads=self.num_heads, num_groups=self.num_groups)
        return build_checkpoint(self.published, os.fspath(self.checkpoint), options)

    def _refuse_settings(self) -> None:
        """Raise UserError for settings of a checkpoint beside a model that has them in its own config."""
        why = "has no effect on a run, a .keras file or two towers, which store it; leave"
        options = (("--num-heads", self.num_heads), ("--num-groups", self.num_groups))
        refuse_first((value is not None, f"{option} {why} {option} out.") for option, value in options)

    @property
    def preprocessing(self) -> "Preprocessing":
        """The preprocessing of the model."""
        from keras_vit.models.build import preprocessing_of

        return preprocessing_of(self.model)

    def check_preprocessing(self) -> None:
        """Raise UserError for a checkpoint whose files do not contain its preprocessing, in which models differ."""
        if self.texts is None and self.published is not None and not self.published.is_preprocessing_known:
            raise UserError(
                f"{self.name} does not contain how images are normalized, and models with the same arrays do it "
                "differently (-1 to 1, or the mean and deviation of ImageNet); put the config.json of the model beside "
                "it, and its preprocessor_config.json if it has one."
            )

    @property
    def classifier(self) -> "keras.Model":
        """The model up to its logits (B, K). Raises UserError without a head, and for another number of labels."""
        from keras_vit.models.build import check_classifies, logits_model

        model = logits_model(self.model)
        if self.labels:
            check_head(model, self.labels)
        check_classifies(model, self.name)
        return model

    @functools.cached_property
    def saved_model(self) -> pathlib.Path | None:
        """The folder of a SavedModel: this one, or its newest version 1, 2, …; None if it is none."""
        if (self.path / _SAVED_MODEL).is_file():
            return self.path
        if not self.path.is_dir():
            return None
        versions = [path for path in self.path.iterdir() if path.name.isdecimal() and (path / _SAVED_MODEL).is_file()]
        return max(versions, key=lambda path: int(path.name), default=None)

    def refuse_export(self) -> None:
        """Raise UserError for a TFLite file, and for a SavedModel, in its directory or in that of its versions."""
        if not is_remote(self.name) and (self.path.suffix == ".tflite" or self.saved_model is not None):
            raise UserError(
                f"{self.name} is an export; give the run that it was exported from, or use keras-vit evaluate."
            )

    @property
    def model_checksum(self) -> int:
        """CRC-32 of model.keras of the run directory. Raises UserError if it has none."""
        return zlib.crc32(find(self.directory or self.path).read_bytes())

    # Its classes

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The class names in the labels.txt of the run directory, beside the file or in the SavedModel; empty without.

        Of texts, their names.
        """
        if self.texts is not None:
            return self.texts.labels
        if is_web(self.name) or not self.path.exists():
            return ()
        folder = self.path if self.path.is_dir() else self.path.parent
        if not (folder / LABELS).is_file() and self.saved_model is not None:
            folder = self.saved_model / "assets"
        return read_labels(folder / LABELS) if (folder / LABELS).is_file() else ()

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """The class names that the model knows, else `labels`; empty if nothing names them. Loads the model."""
        from keras_vit.models.build import saved_classes  # lazy: imports Keras

        return self.labels if (classes := saved_classes(self.model)) is None else classes.labels

    def labels_of(self, num_classes: int) -> tuple[str, ...]:
        """Return the names of so many classes, or their numbers. Raises UserError if labels.txt names others."""
        labels = self.labels or tuple(map(str, range(num_classes)))
        check_number(labels, f"Its {LABELS}", num_classes, self.name)
        return labels

    def check_label_file(self, labels: str | os.PathLike) -> None:
        """Raise UserError if there is no such file, or if it has not a line for each class of a run.

        Of anything but a run, the number of classes is not known yet.
        """
        existing_file(labels, "--labels accepts a text file with one class per line")
        if not is_remote(self.name) and self.file(MODEL) and self.file(LABELS):
            check_number(read_labels(labels), labels, len(self.labels), self.name)

    def warn_of_missing_files(self, *, labels_given: bool = False) -> None:
        """Print what is assumed where a folder has a model without the other files of a run, as if partly copied."""
        if not (self.path / MODEL).is_file():
            return
        if not self.file(LABELS) and not labels_given:
            print(
                f"{self.name} has no {LABELS}, so classes are shown by their numbers; copy it from the run, or give "
                "--labels."
            )
        if not self.file(CONFIG):
            print(
                f"{self.name} has no {CONFIG}, so each image is taken to have one class; copy it from the run, if it "
                "is there."
            )

    @functools.cached_property
    def is_multi_label(self) -> bool:
        """Whether an image may have several classes: as config.json of a run says, else as the model knows."""
        if self.texts is not None or not self.file(CONFIG):
            from keras_vit.models.build import is_multi_label  # lazy: imports Keras

            return is_multi_label(self.model)
        recipe = self.settings.get("recipe")
        return isinstance(recipe, dict) and recipe.get("loss") == "multi-label"

    @functools.cached_property
    def temperature(self) -> float:
        """Divides the logits before the softmax; 1 unless `keras-vit evaluate --calibrate` fitted another."""
        if (file := self.file(TEMPERATURE)) is None:
            return 1.0
        advice = "repeat keras-vit evaluate --calibrate, or remove it"
        with reading(file, "a temperature", KeyError, TypeError, OverflowError, advice=advice):
            temperature = float(json.loads(read_bytes(file))["temperature"])
            if not 0.0 < temperature < math.inf:
                raise ValueError(f"it is {temperature}")
        return temperature

    def scoring(self, threshold: float | None = None) -> Scoring:
        """Return how its logits become probabilities and classes."""
        return Scoring(self.temperature, threshold, self.is_multi_label, self.promise)

    @functools.cached_property
    def promise(self) -> Promise | None:
        """Its promise about its answers; None unless `keras-vit evaluate --max-error` or `--coverage` fitted it."""
        return self._fitted(PROMISE, read_promise, "evaluate")

    @functools.cached_property
    def unknown(self) -> UnknownScorer | None:
        """The score of images of none of its classes; None unless `keras-vit unknown` fitted one at this image size."""
        return self._fitted(UNKNOWN, read_unknown, "unknown")

    def _fitted(self, name: str, read: Callable[[pathlib.Path], Any], command: str) -> Any:
        """Return what a command has fitted to the model at its own image size; None without such a file."""
        if self.image_size is not None or (file := self.file(name)) is None:
            return None
        fitted = read(file)
        # Without need, the temperature is not read: evaluate --calibrate replaces a damaged one.
        is_other = isinstance(fitted, Promise) and fitted.temperature != self.temperature
        if is_other or fitted.model_checksum != self.model_checksum:
            raise UserError(
                f"{file} was fitted to another model or temperature than this run has; repeat keras-vit {command}, or "
                "remove it."
            )
        return fitted

    # Its training

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The content of the run's config.json; empty without one. Raises UserError if it is damaged."""
        if (file := self.file(CONFIG)) is None:
            return {}
        advice = "copy it again, since it says how the model was trained, or choose another directory"
        with reading(file, "the settings of a run", advice=advice):
            config = json.loads(read_bytes(file))
            if not isinstance(config, dict):
                raise ValueError("it is no object of JSON")
        return config

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run: options of its command and recipe; empty if it does not say them."""
        settings = self.config.get("settings")
        return settings if isinstance(settings, dict) else {}

    @functools.cached_property
    def training_images(self) -> np.ndarray | None:
        """Digests (n,) uint64 of the files of its training images; None if it has none."""
        file = self.file(TRAINING_IMAGES)
        return read_npz(file).get("digests") if file else None

    def metrics(self) -> list[dict]:
        """Return the metrics of each evaluation, in order; empty without a file. Raises UserError if it is damaged."""
        if (file := self.file(METRICS)) is None:
            return []
        with reading(file, "lines of JSON", TypeError, advice="copy it again, or remove it"):
            return [dict(json.loads(line)) for line in read_bytes(file).splitlines()]

    @property
    def is_finished(self) -> bool:
        """Whether the directory has the trained model."""
        return self.file(MODEL) is not None

    @property
    def data_options(self) -> list[str]:
        """Its data as options of a command line, such as --data folder:pictures; empty if they are not here."""
        source = self.settings.get("source")
        if not isinstance(source, dict) or not isinstance(source.get("data"), str):
            return []
        kind, _, path = source["data"].partition(":")
        if kind in ("folder", "csv") and not to_path(path).exists():
            return []
        if kind in ("folder", "csv", "tar"):  # runs before there were groups drew each image alone
            source = {**source, "group": source.get("group", "none")}
        changed = {name: value for name, value in source.items() if value not in (None, _USUAL_DATA.get(name))}
        return [text for name, value in changed.items() for text in (f"--{name.replace('_', '-')}", str(value))]

    def next_commands(self, done: str) -> list[tuple[str, ...]]:
        """Return up to three commands to go on with after the command `done`."""
        data, name = self.data_options, self.name.removesuffix(MODEL).rstrip("/") or "."
        model, served = ("--run", name), f"{name}/saved_model"
        recipe = self.settings.get("recipe")
        if isinstance(recipe, dict) and recipe.get("target", "classes") != "classes":  # pretrained without labels
            return [
                ("linear-probe", *model, *data, "--workdir", f"{name}-probe"),
                ("finetune", "--checkpoint", name, *data, "--workdir", f"{name}-finetuned"),
            ]
        if (command := self.settings.get("command")) in ("segment", "detect"):
            evaluate = (command, "evaluate", *model, *data, "--output", f"{name}/evaluation")
            return [*([evaluate] if data else []), ("saved-model", *model, "--output", "served")]
        commands = {
            "evaluate": ("evaluate", *model, *data) if data else None,
            "predict": ("predict", *model, "--serve"),
            "inspect": ("inspect", *model, "--output", f"{name}/inspection") if self.file(SAMPLES) else None,
            "saved-model": ("saved-model", *model, "--output", served if can_be_saved_model(served) else "saved_model"),
        }
        return [command for name, command in commands.items() if command and name != done][:3]

    # Writing the directory

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
        for folder in (self.path, self.path / CHECKPOINTS):
            remove_temporary(folder)
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.file(CONFIG):
            config: dict[str, Any] = {"id": uuid.uuid4().hex, "settings": settings, "environment": _environment()}
            config |= {} if weights is None else {"weights": weights}
            config |= {} if images is None else {IMAGES: images}
            write_text(self.path / CONFIG, json.dumps(config, indent=2) + "\n")
        if not self.file(LABELS):
            write_text(self.path / LABELS, labels_text(labels))
        (self.path / CHECKPOINTS).mkdir(exist_ok=True)

    def check(self, settings: dict, labels: tuple[str, ...], *, images: int | None = None) -> None:
        """Raise UserError if the directory holds anything but the same run. See `start` for the arguments."""
        if not self.file(CONFIG):
            self.check_free()
            return
        if self.file(LABELS):
            advice = "give another --workdir, or the original data"
            check_classes(self.labels, labels, f"The run in {self.path}", advice)
        self.check_settings(settings)
        if self.config.get(IMAGES, images) != images:
            raise UserError(
                f"{self.path} was started with other images than the data hold now: files were changed, renamed or "
                "moved to another class; give the images as they were, or another --workdir."
            )

    def check_free(self) -> None:
        """Raise UserError if something exists at this place that is no run directory, finished or not."""
        places = (self.path,) if is_remote(self.path) else (self.path, *self.path.parents)
        there = next((place for place in places if place.exists()), None)
        if there is None or self.file(CONFIG):
            return
        ours = there != self.path or (
            there.is_dir() and all(is_temporary(entry) or entry.name.endswith(LOCK) for entry in there.iterdir())
        )
        if not (there.is_dir() and ours):
            raise UserError(f"{there} exists and is not a run directory; give a new or empty --workdir.")

    def check_settings(self, settings: dict) -> None:
        """Raise UserError if the settings of the run in the directory are not these."""
        now = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        if self.settings == now:
            return
        there, here = _command_of(self.settings), _command_of(now)
        what = f"a run of {there}, but this one is of {here}"  # then most of the other settings differ too
        if there == here:
            what = f"another run, which differs in {differences(self.settings, now)}"
        raise UserError(f"{self.path} already holds {what}; choose another --workdir, or delete {self.path}.")

    def save_training_images(self, digests: np.ndarray) -> None:
        """Write the digests of the training images (n,)."""
        write_npz(self.path / TRAINING_IMAGES, {"digests": np.unique(digests)})

    def save_model(self, model: "keras.Model") -> None:
        """Write model.keras with the names of its classes, not compiled, so that loading it needs only keras_vit."""
        from keras_vit.models.build import numbers_of_classes, set_classes

        if self.labels and len(self.labels) in numbers_of_classes(model):
            set_classes(model, Classes(self.labels, multi_label=self.is_multi_label))
        what = f"The trained model could not be written to {self.path}"
        advice = "the last checkpoint is intact: make room, and the same command continues"
        with (
            explained(lambda reason: f"{what} ({reason}); {advice}.", OSError),
            atomic_write(self.path / MODEL) as temporary,
        ):
            model.save(temporary)

    def write_metrics(self, records: list[dict]) -> None:
        """Replace metrics.jsonl, and metrics.csv with the same numbers for spreadsheets."""
        write_text(self.path / METRICS, "".join(json.dumps(record) + "\n" for record in records))
        columns = list(dict.fromkeys(name for record in records for name in record))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        write_text((self.path / METRICS).with_suffix(".csv"), text.getvalue())


def load(path: str | os.PathLike) -> tuple["keras.Model", tuple[str, ...]]:
    """Load a model and the names of its classes, which are empty where nothing names them.

    Args:
        path: a run directory, .keras file, checkpoint file or folder, address or official name.

    Raises UserError for a run whose model and labels.txt do not belong together.
    """
    run = Run.open(path)
    if run.file(LABELS):
        check_head(run.model, run.labels)
    return run.model, run.class_names


def check_head(model: "keras.Model", labels: Sequence[str]) -> None:
    """Raise UserError unless the model classifies images into as many classes as there are labels."""
    shape = model.output_shape
    if len(shape) != 2 or shape[1] != len(labels):
        raise UserError(
            f"The model's output has shape {shape}, but there are {len(labels)} labels; {MODEL} and {LABELS} must "
            "belong to the same run. If the model ends with features, add a head with keras-vit finetune or "
            f"keras_vit.adapt(model, num_classes={len(labels)})."
        )


def check_no_run(directory: pathlib.Path) -> None:
    """Raise UserError for the directory of a run or checkpoint, which is kept apart from what is made of it."""
    if (directory / CONFIG).is_file():
        raise UserError(f"{directory} has the config.json of a run or checkpoint; give another --output.")


def check_model_file(path: str | os.PathLike) -> None:
    """Raise UserError for a file of this machine that holds no model: another file of a run, or of another type."""
    file = to_path(path)
    if is_remote(path) or not file.is_file():
        return
    if file.suffix == ".onnx":  # beside labels.txt, as the model of a run is
        raise UserError(f"{path} is an export; give the run that it was exported from.")
    is_model = file.name.endswith((*MODEL_SUFFIXES, ".index.json")) or kind_of(file) != "unknown"
    for run in (file.parent, file.parent.parent):
        is_of_run = any((run / name).is_file() for name in (MODEL, LABELS))
        if is_of_run and (not is_model or file.name in _OTHER_FILES or file.parent.name == CHECKPOINTS):
            raise UserError(f"{path} is a file of a run, but not its model; give the run {run}.")
    # An .h5 file holds weights for --model, and exports work with some commands.
    if not file.name.endswith((".h5", ".index.json", ".tflite", ".pb")):
        readable_kind(file)


def differences(there: dict, here: dict) -> str:
    """Return `field (there 1, here 2)` for nested settings that differ: of the first fields, and how many more do."""

    def flat(settings, prefix: str = "") -> dict:
        if not isinstance(settings, dict):
            return {prefix: settings}
        return {key: leaf for name, part in settings.items() for key, leaf in flat(part, f"{prefix}.{name}").items()}

    there, here = flat(there), flat(here)
    different = [
        f"{key[1:]} (there {there.get(key)!r}, here {here.get(key)!r})"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    more = len(different) - _MOST_DIFFERENCES
    return ", ".join(different[:_MOST_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")


def _command_of(settings: dict) -> str:
    recipe = settings.get("recipe_name")
    return f"training.{settings.get('command')}" + (f" with the recipe {recipe}" if recipe else "")


def _environment() -> dict:
    """Return the versions that results depend on, and the commit of this code if it is a git checkout."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    imported = {name: sys.modules.get(name) for name in ("tensorflow", "keras", "numpy")}
    versions = {name: module.__version__ for name, module in imported.items() if module is not None}
    return {"git_commit": commit, "python": platform.python_version(), **versions}

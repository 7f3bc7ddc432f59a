"""A trained model and what is known of it: opened once, at the door of a command, and handed down.

A run directory, its model.keras, any other .keras file and a checkpoint of any published layout are the same to those
who take a `Run`. Nothing is loaded or downloaded before it is asked for, and nothing twice.
"""

import dataclasses
import functools
import os
import pathlib
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit import run_directory
from keras_vit.checkpoints.describe import describe, license_of
from keras_vit.checkpoints.find import check_name, find_checkpoint
from keras_vit.errors import UserError
from keras_vit.files.labels import LABELS, check_number, read_labels
from keras_vit.files.npz import read_npz
from keras_vit.files.remote import can_be_saved_model, existing_file, is_remote, is_web, local_copy, to_path
from keras_vit.images.formats import image_files
from keras_vit.models.config import Classes
from keras_vit.run_directory import SAMPLES, Samples
from keras_vit.scores import Scoring
from keras_vit.unknown_score import UNKNOWN, UnknownScorer, read_unknown

if TYPE_CHECKING:
    import keras

    from keras_vit.images.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """Images that a model was, or is to be, trained and evaluated on."""

    data: str
    """As --data, or of what a soup is the average of."""
    split_seed: int | None = None
    counts: tuple[int, int] | None = None
    """Training and evaluation images; None where it is not known."""
    fingerprint: int | None = None
    """Of the data set; None where it is not known."""

    @property
    def place(self) -> tuple[str, str]:
        """The kind of the data, and their path however it is written."""
        kind, _, rest = self.data.partition(":")
        is_path = kind in ("folder", "csv") and not is_remote(rest)
        return kind, str(pathlib.Path(rest).resolve()) if is_path else rest

    def is_other_split(self, other: "TrainingData") -> bool:
        """Whether another seed drew the evaluation images of the same data."""
        return self.split_seed != other.split_seed and self.place == other.place

    def has_other_images(self, other: "TrainingData") -> bool:
        """Whether the images differ, as far as both are known."""
        pairs = (self.counts, other.counts), (self.fingerprint, other.fingerprint)
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


_SAVED_MODEL = "saved_model.pb"
# Options of the data at their defaults.
_USUAL_DATA = {"train_split": "train", "on_bad_image": "stop"}


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A run, a .keras file or a checkpoint, opened; `open_run` and `run_of` make one."""

    name: str
    """As the user gave it, for messages and reports."""
    image_size: tuple[int, int] | None = None
    """(height, width) in pixels to take the model to; None keeps its own, of a checkpoint that of its preprocessing."""
    num_heads: int | None = None
    """Of a checkpoint that does not tell them."""
    num_groups: int | None = None
    """Of GroupNorm, likewise."""
    texts: Classes | None = None
    """The classes that a checkpoint with a text tower gets as its head; None keeps its own head."""

    @functools.cached_property
    def place(self) -> pathlib.Path:
        """Where it is; of an address or official name, nothing need be there yet."""
        return to_path(self.name)

    @functools.cached_property
    def directory(self) -> pathlib.Path | None:
        """The run directory, which it is itself or whose model.keras it is; None if there is none.

        The folder of a published checkpoint is none, although it may have a config.json, too.
        """
        if self.place.name == run_directory.MODEL:
            return self.place.parent
        return self.place if not is_web(self.name) and self.place.is_dir() and self.is_ours else None

    @functools.cached_property
    def is_ours(self) -> bool:
        """Whether it is a run directory or .keras file, and no published checkpoint."""
        return self.place.suffix == ".keras" if is_web(self.name) else run_directory.is_ours(self.place)

    def file(self, name: str) -> pathlib.Path | None:
        """A file of the run directory; None if there is none."""
        path = self.directory / name if self.directory else None
        return path if path and path.is_file() else None

    @functools.cached_property
    def checkpoint(self) -> pathlib.Path:
        """The local file or folder of the weights, downloaded if necessary; of a run in a bucket, its place."""
        is_in_bucket = is_remote(self.name) and not is_web(self.name) and self.is_ours
        return self.place if is_in_bucket else find_checkpoint(self.name)

    @functools.cached_property
    def model(self) -> "keras.Model":
        """The trained model with its own head, loaded once.

        Raises UserError for a file that cannot be read, and for settings of a checkpoint beside a model that has them.
        """
        # lazy: importing Keras takes seconds
        from keras_vit.checkpoints.from_checkpoint import adapt, from_checkpoint, load_named_model

        if self.texts is not None:
            from keras_vit.text.zero_shot import zero_shot

            classes = dict(zip(self.texts.labels, self.texts.texts, strict=True))
            return zero_shot(self.name, classes, self.texts.templates, self.image_size)
        if not run_directory.is_ours(self.checkpoint):
            size = self.image_size or self._original_size()
            return from_checkpoint(
                self.checkpoint, image_size=size, num_heads=self.num_heads, num_groups=self.num_groups
            )
        self._refuse_settings()
        model = load_named_model(self.checkpoint)
        return model if self.image_size is None else adapt(model, image_size=self.image_size)

    def _original_size(self) -> tuple[int, int] | None:
        """The image size of the original's preprocessing, if a file beside the weights says another than the weights'.

        DINOv2's position embeddings are for 518 pixels, but its features are computed at 224.
        """
        found = describe(self.checkpoint, num_heads=self.num_heads, num_groups=self.num_groups)
        return None if found.original_size == found.image_size else found.original_size

    @functools.cached_property
    def tflite_file(self) -> pathlib.Path:
        """The local copy of a .tflite file. Raises UserError if there is none."""
        return local_copy(existing_file(self.place, "give the path of a .tflite file"))

    @property
    def preprocessing(self) -> "Preprocessing":
        """The preprocessing of the model."""
        from keras_vit.models.build import preprocessing_of

        return preprocessing_of(self.model)

    @property
    def classifier(self) -> "keras.Model":
        """The model up to its logits (B, K).

        Raises UserError for a model without a head, and where labels.txt names another number of classes.
        """
        from keras_vit.models.build import intermediates, logits_model

        model = logits_model(self.model)
        if self.labels:
            run_directory.check_head(model, self.labels)
        if len(model.output_shape) != 2 or "logits" not in intermediates(model).output:
            raise UserError(
                f"{self.name} has no head: it ends with features of shape {model.output_shape}; probe them by "
                "keras-vit fewshot."
            )
        return model

    @functools.cached_property
    def saved_model(self) -> pathlib.Path | None:
        """The folder of a SavedModel: this one, or its newest version 1, 2, …; None if it is none."""
        if (self.place / _SAVED_MODEL).is_file():
            return self.place
        if not self.place.is_dir():
            return None
        versions = [path for path in self.place.iterdir() if path.name.isdecimal() and (path / _SAVED_MODEL).is_file()]
        return max(versions, key=lambda path: int(path.name), default=None)

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The class names in the labels.txt of the run directory, beside the file or in the SavedModel; empty without.

        Of texts, their names.
        """
        if self.texts is not None:
            return self.texts.labels
        if is_web(self.name) or not self.place.exists():
            return ()
        folder = self.place if self.place.is_dir() else self.place.parent
        if not (folder / LABELS).is_file() and self.saved_model is not None:
            folder = self.saved_model / "assets"
        return read_labels(folder / LABELS) if (folder / LABELS).is_file() else ()

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """The class names that the model knows, else `labels`; empty if nothing names them. Loads the model."""
        return self.labels if (classes := self._classes) is None else classes.labels

    @functools.cached_property
    def samples(self) -> Samples:
        """The sample images of the run directory. Raises UserError if it has none."""
        return Samples.from_file(run_directory.find(self.directory or self.place, run_directory.SAMPLES))

    @functools.cached_property
    def temperature(self) -> float:
        """Divides the logits before the softmax; 1 unless `keras-vit evaluate --calibrate` fitted another."""
        file = self.file(run_directory.TEMPERATURE)
        return run_directory.read_temperature(file) if file else 1.0

    @functools.cached_property
    def unknown(self) -> UnknownScorer | None:
        """The score of images of none of its classes; None unless `keras-vit unknown` fitted one at this image size."""
        file = self.file(UNKNOWN) if self.image_size is None else None
        if file is None:
            return None
        scorer = read_unknown(file)
        if scorer.model_checksum != self.model_checksum:
            raise UserError(f"{file} was fitted to another model than this run has; run keras-vit unknown again.")
        return scorer

    @property
    def model_checksum(self) -> int:
        """CRC-32 of model.keras of the run directory. Raises UserError if it has none."""
        return zlib.crc32(run_directory.find(self.directory or self.place, run_directory.MODEL).read_bytes())

    @functools.cached_property
    def is_multi_label(self) -> bool:
        """Whether an image may have several classes: as config.json of a run says, else as the model knows.

        Raises UserError for a config.json that does not tell it.
        """
        file = self.file(run_directory.CONFIG)
        if file is None or self.texts is not None:
            return self._classes is not None and self._classes.multi_label
        run_directory.check_config(file)
        recipe = self.settings.get("recipe")
        return isinstance(recipe, dict) and recipe.get("loss") == "multi-label"

    @property
    def _classes(self) -> Classes | None:
        from keras_vit.models.build import saved_classes  # lazy: imports Keras

        return saved_classes(self.model)

    def scoring(self, threshold: float | None = None) -> Scoring:
        """How its logits become probabilities and classes."""
        return Scoring(self.temperature, threshold, self.is_multi_label)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The content of the run's config.json; empty if it is damaged or missing."""
        file = self.file(run_directory.CONFIG)
        return run_directory.read_config(file) if file else {}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run: options of its command and recipe; empty if it does not say them."""
        settings = self.config.get("settings")
        return settings if isinstance(settings, dict) else {}

    @functools.cached_property
    def data(self) -> TrainingData | None:
        """The training data of the run; None if it is of no training command."""
        try:
            source, images = self.settings["source"], self.settings.get("images")
            counts = (images["train"], images["evaluation"]) if images else None
            fingerprint = self.config.get(run_directory.IMAGES)
            return TrainingData(source["data"], source.get("split_seed"), counts, fingerprint)
        except (KeyError, TypeError, AttributeError):
            return None

    def labels_of(self, num_classes: int) -> tuple[str, ...]:
        """The names of so many classes, or their numbers. Raises UserError if labels.txt names others."""
        labels = self.labels or tuple(map(str, range(num_classes)))
        check_number(labels, f"Its {LABELS}", num_classes, self.name)
        return labels

    @property
    def data_options(self) -> list[str]:
        """Its data as options of a command line, such as --data folder:pictures; empty if they are not here."""
        source = self.settings.get("source")
        if not isinstance(source, dict) or not isinstance(source.get("data"), str):
            return []
        kind, _, path = source["data"].partition(":")
        if kind in ("folder", "csv") and not to_path(path).exists():
            return []
        changed = {name: value for name, value in source.items() if value not in (None, _USUAL_DATA.get(name))}
        return [text for name, value in changed.items() for text in (f"--{name.replace('_', '-')}", str(value))]

    def next_commands(self, done: str) -> list[tuple[str, ...]]:
        """Return up to three commands to go on with after the command `done`."""
        data, name = self.data_options, self.name.removesuffix(run_directory.MODEL).rstrip("/") or "."
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
        pictures = [text.removeprefix("folder:") for text in data[1:2] if text.startswith("folder:")] or ["--serve"]
        commands = {
            "evaluate": ("evaluate", *model, *data) if data else None,
            "predict": ("predict", *model, *pictures),
            "inspect": ("inspect", *model, "--output", f"{name}/inspection") if self.file(SAMPLES) else None,
            "saved-model": ("saved-model", *model, "--output", served if can_be_saved_model(served) else "saved_model"),
        }
        return [command for name, command in commands.items() if command and name != done][:3]

    @functools.cached_property
    def training_images(self) -> np.ndarray | None:
        """Digests (n,) uint64 of the files of its training images; None if it has none."""
        file = self.file(run_directory.TRAINING_IMAGES)
        return read_npz(file).get("digests") if file else None

    @functools.cached_property
    def metrics(self) -> dict[str, Any]:
        """The last line of the run's metrics.jsonl; empty without one."""
        file = self.file(run_directory.METRICS)
        return run_directory.read_last_metrics(file) if file else {}

    @functools.cached_property
    def license(self) -> str | None:
        """The license of the weights, as their publisher states it; None if nothing states it."""
        return license_of(self.name)

    def _refuse_settings(self) -> None:
        """Raise UserError for settings of a checkpoint beside a model of ours."""
        for option, value in (("num-heads", self.num_heads), ("num-groups", self.num_groups)):
            if value is not None:
                raise UserError(
                    f"--{option} has no effect on a run or .keras file, which stores it; leave --{option} out."
                )

    def check_finished(self) -> None:
        """Raise UserError for what is no model, a run without one, and a damaged config.json; downloads nothing."""
        check_name(self.name)
        if is_remote(self.name):
            return
        run_directory.check_model_file(self.name)
        if self.file(run_directory.MODEL):
            if file := self.file(run_directory.CONFIG):
                run_directory.check_config(file)
            self._refuse_settings()
        if self.place.is_dir() and not run_directory.holds_model(self.place):
            run_directory.find(self.place, run_directory.MODEL)  # raises

    def check_label_file(self, labels: str | os.PathLike) -> None:
        """Raise UserError if there is no such file, or if it has not a line for each class of a run.

        Of anything but a run, the number of classes is not known yet.
        """
        existing_file(labels, "--labels takes a text file with one class per line")
        if is_remote(self.name) or not (self.file(run_directory.MODEL) and self.file(LABELS)):
            return
        check_number(read_labels(labels), labels, len(self.labels), self.name)

    def warn_of_missing_files(self, *, labels_given: bool = False) -> None:
        """Print what is assumed where a folder has a model without the other files of a run, as if partly copied."""
        if not (self.place / run_directory.MODEL).is_file():
            return
        if not self.file(LABELS) and not labels_given:
            print(
                f"{self.name} has no {LABELS}, so classes are shown by their numbers; copy it from the run, or give "
                "--labels."
            )
        if not self.file(run_directory.CONFIG):
            print(
                f"{self.name} has no {run_directory.CONFIG}, so each image is taken to have one class; copy it from "
                "the run, if it is there."
            )


def open_run(
    name: str | os.PathLike,
    *,
    image_size: tuple[int, int] | None = None,
    num_heads: int | None = None,
    num_groups: int | None = None,
    texts: Classes | None = None,
) -> Run:
    """Open a run directory, a .keras file, a checkpoint file or folder, an address or an official name.

    Args:
        name: see `keras_vit.find_checkpoint`.
        image_size: (height, width) in pixels to take the model to. Default: as stored.
        num_heads: of a checkpoint that does not tell them.
        num_groups: of GroupNorm, likewise.
        texts: the classes that a checkpoint with a text tower gets as its head. Default: its own head.

    Raises UserError for what is no model; a download fails only when the model is asked for.
    """
    if texts is not None and num_heads is not None:
        raise UserError("The number of heads of two towers is in their config; leave --num-heads out.")
    run = Run(os.fsdecode(name), image_size, num_heads, num_groups, texts)
    run.check_finished()
    return run


def open_run_directory(path: str | os.PathLike) -> Run:
    """Open the directory of a finished run, or the model in it. Raises UserError for anything else."""
    place = to_path(path)
    if place.name == run_directory.MODEL and place.is_file():
        path = place.parent
    run_directory.find(path, run_directory.MODEL)
    return open_run(path)


def load(path: str | os.PathLike) -> tuple["keras.Model", tuple[str, ...]]:
    """Load a model and the names of its classes, which are empty where nothing names them.

    Args:
        path: a run directory, .keras file, checkpoint file or folder, address or official name.

    Raises UserError for a run whose model and labels.txt do not belong together.
    """
    run = open_run(path)
    if run.file(LABELS):
        run_directory.check_head(run.model, run.labels)
    return run.model, run.class_names


def predict(
    model: "keras.Model",
    images: str | os.PathLike | bytes | Sequence[str | os.PathLike | bytes],
    *,
    batch_size: int = 32,
) -> list[dict[str, float]]:
    """Classify image files, and return the probability of each class by its name, the likeliest class first.

    Args:
        model: built by `keras_vit.build`, with a head.
        images: a file, a folder, or a list of files; the bytes of a file stand for it.
        batch_size: images per forward pass.

    Returns:
        For each image a dict of all classes. Their names are numbers where `keras_vit.classes_of` is None. The
        probabilities sum to 1, unless an image may have several classes.

    Raises UserError for a file that is no image, and for a model without a head.
    """
    from keras_vit.models.build import classifier_head, logits_model, preprocessing_of, saved_classes

    if classifier_head(model) is None or len(model.outputs) != 1:
        raise UserError(f"The model {model.name!r} has no classes to predict; add a head by keras_vit.adapt.")
    files = [images] if isinstance(images, str | os.PathLike | bytes) else list(images)
    if len(files) == 1 and not isinstance(files[0], bytes) and to_path(files[0]).is_dir():
        files = list(image_files(to_path(files[0])))
    classes, preprocessing, logits = saved_classes(model), preprocessing_of(model), logits_model(model)
    scoring = Scoring(is_multi_label=classes is not None and classes.multi_label)
    found = list[dict[str, float]]()
    for begin in range(0, len(files), batch_size):
        batch = np.stack([preprocessing(preprocessing.decode(file)) for file in files[begin : begin + batch_size]])
        rows = scoring.probabilities(np.asarray(logits.predict_on_batch(batch)))
        names = classes.labels if classes else tuple(map(str, range(rows.shape[-1])))
        found += [{names[k]: float(row[k]) for k in np.argsort(-row, kind="stable")} for row in rows]
    return found


def run_of(model: "keras.Model", name: str = "a model in memory", labels: tuple[str, ...] = ()) -> Run:
    """A run of a model in memory, without files. labels: the names of its classes. Default: those that it knows."""
    from keras_vit.models.build import classes_of  # lazy: imports Keras

    run, labels = Run(name), labels or classes_of(model) or ()
    known = {"model": model, "labels": labels, "class_names": labels, "directory": None, "unknown": None}
    run.__dict__.update(known)  # as `cached_property` stores what it has computed
    return run

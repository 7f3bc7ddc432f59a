"""The model to export, from a run or a checkpoint, with its labels, its sample images, and its origin."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from export.options import check_one_model
from keras_vit import Preprocessing, UserError, find_checkpoint, from_checkpoint, preprocessing_of, run_directory
from keras_vit.checkpoints.describe import class_names_of, license_of
from keras_vit.files.labels import read_labels
from keras_vit.files.remote import to_path
from keras_vit.files.tables import short_name
from keras_vit.images.formats import format_list, image_files
from keras_vit.models.build import classes_of, classifier_head
from keras_vit.models.layers import ModelSpec
from keras_vit.run_directory import Samples, is_keras_model

# Number of random images, and their sizes relative to the input of the model.
_NUM_RANDOM, _RANDOM_SCALES = 16, (1.0, 1.5, 0.7)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Origin of a model, for its model card and its reports."""

    name: str = "a model in memory"
    """Run directory or checkpoint."""
    images: str = "sample images"
    """Description of the sample images."""
    config: dict = dataclasses.field(default_factory=dict)
    """Content of config.json of the run."""
    metrics: dict = dataclasses.field(default_factory=dict)
    """Last line of metrics.jsonl of the run."""
    weights: str = "unknown"
    """Where the weights come from: a checkpoint, or training from scratch."""
    license: str | None = None
    """License of the weights; None if nothing states it."""

    temperature: float = 1.0
    """Divides the logits before the softmax, if the run is calibrated."""
    multi_label: bool = False
    """Whether an image may have several classes: the probabilities are the sigmoid of the logits."""

    @property
    def license_text(self) -> str:
        """The license for people."""
        return self.license or "not specified; add the license of the weights and of the data"

    def as_json(self) -> dict[str, str | float | None]:
        """The fields of report.json."""
        return {
            "model": self.name,
            "weights": self.weights,
            "license": self.license,
            "temperature": self.temperature,
            "multi_label": self.multi_label,
        }


@dataclasses.dataclass(frozen=True)
class Source:
    """A model with its labels, sample images and origin."""

    model: keras.Model
    labels: tuple[str, ...]
    samples: Samples
    """Images to verify the export on; the label is -1 if the class is unknown."""
    origin: Provenance


def open_source(
    *,
    run: str | None = None,
    checkpoint: str | None = None,
    labels: str | None = None,
    images: str | None = None,
    image_size: tuple[int, int] | None = None,
    num_heads: int | None = None,
    num_groups: int | None = None,
    license: str | None = None,  # noqa: A002 - the name of the option
) -> Source:
    """Load the model of a run or a checkpoint. The arguments are the fields of `SourceOptions`.

    Raises UserError unless there is exactly one classifier with its labels.
    """
    source = _open(run, checkpoint, labels, images, image_size, num_heads, num_groups)
    if license is None:
        return source
    return dataclasses.replace(source, origin=dataclasses.replace(source.origin, license=license))


def _open(
    run: str | None,
    checkpoint: str | None,
    labels: str | None,
    images: str | None,
    image_size: tuple[int, int] | None,
    num_heads: int | None,
    num_groups: int | None,
) -> Source:
    config = {"image_size": image_size, "num_heads": num_heads, "num_groups": num_groups}
    check_one_model(run, checkpoint, labels=labels, images=images, **config)
    if checkpoint is not None:
        return _from_checkpoint(checkpoint, labels, images, config)
    return _from_run(to_path(run))  # type: ignore[arg-type]  # one of both is given


def _from_run(run: pathlib.Path) -> Source:
    model, labels = run_directory.load(run)
    samples = Samples.load(run_directory.find(run, run_directory.SAMPLES))
    run_directory.warn_without_config(run)
    config = _json(run / run_directory.CONFIG)
    weights, terms = _weights(config)
    origin = Provenance(
        str(run),
        "evaluation images of the run",
        config,
        _last_metrics(run),
        weights,
        terms,
        run_directory.load_temperature(run),
        run_directory.is_multi_label(run),
    )
    return Source(model, labels, samples, origin)


def _weights(config: dict) -> tuple[str, str | None]:
    """Where the weights of a run come from, and their license."""
    weights, settings = config.get("weights"), config.get("settings")
    if isinstance(weights, dict):
        return f"fine-tuned from {short_name(str(weights.get('checkpoint')))}", weights.get("license")
    if isinstance(settings, dict) and settings.get("command") == "pretrain":
        return "trained from scratch", None
    return "unknown", None


def _from_checkpoint(checkpoint: str, labels_file: str | None, images: str | None, config: dict[str, Any]) -> Source:
    path = find_checkpoint(checkpoint)
    model = from_checkpoint(path, **config)
    check_classifier(model)
    texts = None if run_directory.is_run(path) else classes_of(model)
    labels = () if labels_file or is_keras_model(path) else class_names_of(path)
    if texts is not None and not labels_file:
        labels = texts.labels
    if len(labels) != model.output_shape[1]:
        labels = checkpoint_labels(labels_file or _labels_of_run(path), model.output_shape[1])
    if images is None:
        samples = random_images(preprocessing_of(model))
        seen = f"{_NUM_RANDOM} random images"
    else:
        samples = read_folder(images, labels)
        seen = f"images of {images}"
    origin = Provenance(
        checkpoint,
        seen,
        weights=short_name(checkpoint),
        license=license_of(checkpoint),
        temperature=run_directory.load_temperature(path),  # a run directory is a checkpoint too
        multi_label=run_directory.is_multi_label(path) if texts is None else texts.multi_label,
    )
    return Source(model, labels, samples, origin)


def _labels_of_run(path: pathlib.Path) -> str | None:
    """labels.txt, if the checkpoint is a run directory or its model."""
    folder = path if path.is_dir() else path.parent
    is_run = (folder / run_directory.CONFIG).is_file() and (folder / run_directory.LABELS).is_file()
    return str(folder / run_directory.LABELS) if is_run else None


def _json(path: pathlib.Path) -> dict:
    """Content of a JSON file; empty if the file is damaged or missing, since only the model card needs it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _last_metrics(run: pathlib.Path) -> dict:
    try:
        metrics = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return metrics if isinstance(metrics, dict) else {}


def check_classifier(model: keras.Model) -> None:
    """Raise UserError unless the model maps images, as its preprocessing gives them, to one vector of logits each."""
    if len(model.outputs) != 1 or len(model.inputs) != 1:
        raise UserError(
            f"The model has {len(model.inputs)} inputs and {len(model.outputs)} outputs, but an export is of one each; "
            "export keras.Model(model.input, logits) with the output that is to be served."
        )
    try:
        model.get_config()
    except NotImplementedError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"A layer of the model cannot be copied ({reason}); write its get_config.") from error
    preprocessing, spec = preprocessing_of(model), next(each for each in model.layers if isinstance(each, ModelSpec))
    expected = (*preprocessing.image_size, preprocessing.channels)
    if spec.input is not model.input or model.input_shape[1:] != expected:
        raise UserError(
            f"The model changes its images before its layer {spec.name!r}, which says how they are preprocessed; "
            f"export it with {spec.name!r} as the first layer, of images {expected} in the range "
            f"{preprocessing.value_range}."
        )
    if classifier_head(model) is None:
        raise UserError(
            f"The model ends with its features, of shape {model.output_shape}, and has no classes to serve; add a head "
            "by keras_vit.adapt(model, num_classes=…) or a Dense layer, and train it."
        )
    if len(model.output_shape) != 2:
        raise UserError(
            f"The model classifies every token, into shape {model.output_shape}; an export needs one prediction per "
            "image."
        )


def check_model(model: keras.Model, labels: Sequence[str], output: pathlib.Path) -> None:
    """Raise UserError unless the model is a classifier of these labels and the output can be written."""
    check_classifier(model)
    run_directory.check_classes(model, labels)
    run_directory.check_output(output)


def checkpoint_labels(path: str | None, number: int) -> tuple[str, ...]:
    """Class names of a checkpoint. Raises UserError unless the file has one line per class."""
    if path is None:
        raise UserError(f"A checkpoint does not name its {number} classes; pass --labels FILE with one name per line.")
    if not to_path(path).is_file():
        raise UserError(f"There is no file {path!r}; --labels takes a text file with one class per line.")
    labels = read_labels(path)
    if len(labels) != number:
        raise UserError(f"The model has {number} classes, but {path} has {len(labels)} lines; name each class once.")
    return labels


def read_folder(folder: str, labels: Sequence[str], most: int | None = None) -> Samples:
    """Image files of a folder and its subfolders. The class of an image is the name of its subfolder.

    Args:
        folder: path of the folder.
        labels: class names.
        most: largest number of images, evenly spaced in the sorted list. Default: all images.
    """
    if not to_path(folder).is_dir():
        raise UserError(f"There is no folder {folder!r} of images.")
    files = image_files(to_path(folder))
    if not files:
        raise UserError(f"{folder} holds no image files ({format_list()}).")
    if most is not None:
        files = [files[index] for index in np.linspace(0, len(files) - 1, min(most, len(files))).astype(int)]
    indices = {label: index for index, label in enumerate(labels)}
    encoded = tuple(path.read_bytes() for path in files)
    return Samples(encoded, np.array([indices.get(path.parent.name, -1) for path in files]))


def random_images(preprocessing: Preprocessing) -> Samples:
    """Smooth random images in several sizes, without labels. They are the same in every call."""
    rng = np.random.default_rng(0)
    encoded = []
    for index in range(_NUM_RANDOM):
        scale = _RANDOM_SCALES[index % len(_RANDOM_SCALES)]
        sides = [max(1, round(side * scale)) for side in preprocessing.image_size]
        channels = 3 if preprocessing.channels == 3 else 1
        colors = rng.uniform(0, 255, (1, *rng.integers(2, 9, 2), channels))
        image = tf.image.resize(colors, sides, method="bicubic")[0]
        encoded.append(tf.io.encode_png(tf.saturate_cast(tf.round(image), tf.uint8)).numpy())
    return Samples(tuple(encoded), np.full(_NUM_RANDOM, -1))

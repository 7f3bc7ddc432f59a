"""What is exported: the model of a run or a checkpoint, its labels, images to check it on, and where it is from."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from export.options import SourceOptions
from keras_vit import Preprocessing, UserError, find_checkpoint, from_checkpoint, preprocessing_of, run_directory
from keras_vit.files.image_formats import format_list, image_format
from keras_vit.files.labels import read_labels
from keras_vit.run_directory import Samples

# Pictures that are made up where there are none, and their sides in sides of the model's input.
_MADE_UP, _MADE_UP_SIDES = 16, (1.0, 1.5, 0.7)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a model is from, for its card and its reports."""

    name: str = "a model in memory"
    """Run directory or checkpoint."""
    images: str = "sample images"
    """What the export is checked on."""
    config: dict = dataclasses.field(default_factory=dict)
    """config.json of the run."""
    metrics: dict = dataclasses.field(default_factory=dict)
    """The last record of the run's metrics.jsonl."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A model with everything that belongs to it."""

    model: keras.Model
    labels: tuple[str, ...]
    samples: Samples
    """Images to check the export on; label -1 where the class is not known."""
    origin: Provenance


def open_source(arguments: SourceOptions) -> Source:
    """Load what the arguments name. Raises UserError unless it is one classifier with its labels."""
    if (arguments.run is None) == (arguments.checkpoint is None):
        raise UserError("An export takes either --run DIR or --checkpoint FILE; give one of them.")
    return _from_run(arguments) if arguments.run is not None else _from_checkpoint(arguments)


def _from_run(arguments: SourceOptions) -> Source:
    of_checkpoints = ("labels", "images", "image_size", "num_heads", "num_groups")
    given = [f"--{name.replace('_', '-')}" for name in of_checkpoints if getattr(arguments, name) is not None]
    if given:
        raise UserError(f"{', '.join(given)} belong to --checkpoint, but --run is given; leave them out.")
    run = pathlib.Path(arguments.run)
    model, labels = run_directory.load(run)
    samples = Samples.load(run_directory.find(run, run_directory.SAMPLES))
    origin = Provenance(str(run), "evaluation images of the run", _json(run / run_directory.CONFIG), _last_metrics(run))
    return Source(model, labels, samples, origin)


def _json(path: pathlib.Path) -> dict:
    """A file that only the card quotes: a damaged or missing one is an empty one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _last_metrics(run: pathlib.Path) -> dict:
    try:
        record = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return record if isinstance(record, dict) else {}


def _from_checkpoint(arguments: SourceOptions) -> Source:
    path = find_checkpoint(arguments.checkpoint)
    told = {name: getattr(arguments, name) for name in ("image_size", "num_heads", "num_groups")}
    model = from_checkpoint(path, **told)
    check_classifier(model)
    labels = checkpoint_labels(arguments.labels, model.output_shape[1])
    if arguments.images is None:
        samples = random_images(preprocessing_of(model))
        origin = Provenance(arguments.checkpoint, f"{_MADE_UP} made-up pictures")
    else:
        samples = read_folder(arguments.images, labels)
        origin = Provenance(arguments.checkpoint, f"images of {arguments.images}")
    return Source(model, labels, samples, origin)


def check_classifier(model: keras.Model) -> None:
    """Raise UserError for a model without logits for a whole image."""
    if not any(layer.name in ("head", "resnet.head.conv2d") for layer in model.layers):
        raise UserError(
            f"The model ends with its features, of shape {model.output_shape}, and has no classes to serve; export one "
            "with a head."
        )
    if len(model.output_shape) != 2:
        raise UserError(
            f"The model classifies every token, into shape {model.output_shape}; an export needs one prediction for "
            "each image."
        )


def checkpoint_labels(path: str | None, number: int) -> tuple[str, ...]:
    """The names of a checkpoint's classes. Raises UserError unless the file has one line for each."""
    if path is None:
        raise UserError(
            f"A checkpoint does not name its {number} classes; give --labels FILE with one name in each line."
        )
    if not pathlib.Path(path).is_file():
        raise UserError(f"There is no file {path!r}; --labels takes a text file with a class in each line.")
    labels = read_labels(path)
    if len(labels) != number:
        raise UserError(f"The model has {number} classes, but {path} has {len(labels)} lines; name each class once.")
    return labels


def _is_image(path: pathlib.Path) -> bool:
    with path.open("rb") as stream:
        return image_format(stream.read(12)) is not None


def read_folder(folder: str, labels: Sequence[str], most: int | None = None) -> Samples:
    """Image files of a folder and its subfolders, an even choice of `most`; the class is the subfolder's name."""
    if not pathlib.Path(folder).is_dir():
        raise UserError(f"There is no folder {folder!r} of images.")
    files = sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file() and _is_image(path))
    if not files:
        raise UserError(f"{folder} holds no image files ({format_list()}).")
    if most is not None:
        files = [files[index] for index in np.linspace(0, len(files) - 1, min(most, len(files))).astype(int)]
    number = {label: index for index, label in enumerate(labels)}
    encoded = tuple(path.read_bytes() for path in files)
    return Samples(encoded, np.array([number.get(path.parent.name, -1) for path in files]))


def random_images(preprocessing: Preprocessing) -> Samples:
    """Pictures of smooth random colours in several sizes, the same ones each time, of unknown class."""
    rng = np.random.default_rng(0)
    encoded = []
    for index in range(_MADE_UP):
        scale = _MADE_UP_SIDES[index % len(_MADE_UP_SIDES)]
        sides = [max(1, round(side * scale)) for side in preprocessing.image_size]
        channels = 3 if preprocessing.channels == 3 else 1
        colours = rng.uniform(0, 255, (1, *rng.integers(2, 9, 2), channels))
        picture = tf.image.resize(colours, sides, method="bicubic")[0]
        encoded.append(tf.io.encode_png(tf.saturate_cast(tf.round(picture), tf.uint8)).numpy())
    return Samples(tuple(encoded), np.full(_MADE_UP, -1))

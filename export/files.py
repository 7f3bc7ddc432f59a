"""Files of an export: what they are of, SavedModels on disk, errors of a full disk, and sizes."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from export.source import Provenance
from keras_vit import UserError, config_of, preprocessing_of
from keras_vit.checkpoints.load import changed_layer
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.models.config import identifying_fields
from keras_vit.promise import PROMISE
from keras_vit.run import MONITOR

_FINGERPRINT = "export.sha256"  # file with the fingerprint of the exports in its directory
_DECIDE = "decide.py"  # the program beside promise.json
_FILES = ("model-*.tflite", "model.onnx", "model.xml", "model.bin")


@contextlib.contextmanager
def disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Raise the error of TensorFlow for a full disk as OSError."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        full = os.strerror(errno.ENOSPC)
        if full not in error.message:
            raise
        raise OSError(errno.ENOSPC, full, str(path)) from error


def directory_bytes(path: pathlib.Path) -> int:
    """Total size of all files in a directory and its subdirectories."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def fingerprint(model: keras.Model, labels: Sequence[str], origin: Provenance) -> str:
    """SHA-256 of what the model is: weights, layers, preprocessing, labels, and whether images have several classes.

    A new temperature is a calibration of the same model, which every file states for itself.
    """
    layers = model.get_config()["layers"] if changed_layer(model) else []
    config, preprocessing = (dataclasses.asdict(each(model)) for each in (config_of, preprocessing_of))
    parts = [identifying_fields(config), preprocessing, layers, origin.multi_label]
    described = json.dumps(parts, sort_keys=True, default=str)
    digest = hashlib.sha256(f"{labels_text(labels)}{described}".encode())
    for weight in model.weights:
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


def identity_files(
    output: pathlib.Path, model: keras.Model, labels: Sequence[str], origin: Provenance
) -> dict[str, str]:
    """Contents of the fingerprint file and of labels.txt, by file name.

    Raises UserError if the output holds exports of another model.
    """
    texts = {_FINGERPRINT: f"{fingerprint(model, labels, origin)}\n", LABELS: labels_text(labels)}
    files = [] if (output / _FINGERPRINT).is_file() else _exported_files(output)
    existing = [name for name in (*texts, *files) if (output / name).is_file()]
    if foreign := [name for name in existing if (output / name).read_bytes() != texts.get(name, "").encode()]:
        raise UserError(
            f"{output} already holds the export of another model ({', '.join(foreign)}); pass another --output, or "
            "remove it."
        )
    return texts


def _exported_files(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for name in _FILES for path in folder.glob(name))


def write_beside(folder: pathlib.Path, origin: Provenance) -> None:
    """Write what a run has for its exports: promise.json with a program that decides by it, and monitor.npz."""
    folder.mkdir(exist_ok=True)
    if origin.promise is not None:
        origin.promise.save(folder / PROMISE)
        shutil.copyfile(pathlib.Path(__file__).with_name(_DECIDE), folder / _DECIDE)
    if origin.monitor is not None:
        (folder / MONITOR).write_bytes(origin.monitor)


def note_on_earlier(output: pathlib.Path, stage: pathlib.Path) -> list[str]:
    """A sentence on files of earlier exports in `output`, of the same model, that this one in `stage` has not."""
    files = [name for name in _exported_files(output) if not (stage / name).exists()]
    return [f"From an earlier export of the same model, and not measured here: {', '.join(files)}."] if files else []

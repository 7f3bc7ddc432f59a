"""Fingerprint of an exported model. It prevents exports of different models in one directory."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence

import keras

from export.source import Provenance
from keras_vit import UserError, config_of, preprocessing_of
from keras_vit.checkpoints.load import changed_layer
from keras_vit.files.labels import LABELS, labels_text

# File with the fingerprint of the exports in its directory.
_FINGERPRINT = "export.sha256"
# Names of exported files.
_FILES = ("model-*.tflite", "model.onnx", "model.xml", "model.bin")


def fingerprint(model: keras.Model, labels: Sequence[str], origin: Provenance) -> str:
    """SHA-256 of what the model is: weights, layers, preprocessing, labels, and whether images have several classes.

    A new temperature is a calibration of the same model, which every file states for itself.
    """
    layers = model.get_config()["layers"] if changed_layer(model) else []
    parts = [dataclasses.asdict(config_of(model)), dataclasses.asdict(preprocessing_of(model)), layers]
    described = json.dumps([*parts, origin.multi_label], sort_keys=True, default=str)
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
    files = (
        [] if (output / _FINGERPRINT).is_file() else sorted(path.name for name in _FILES for path in output.glob(name))
    )
    existing = [name for name in (*texts, *files) if (output / name).is_file()]
    foreign = [name for name in existing if (output / name).read_bytes() != texts.get(name, "").encode()]
    if foreign:
        raise UserError(
            f"{output} already holds the export of another model ({', '.join(foreign)}); pass another --output, or "
            "remove it."
        )
    return texts


def note_on_earlier(output: pathlib.Path, stage: pathlib.Path) -> list[str]:
    """A sentence for the report on the files of earlier exports, which are of the same model; none without such files.

    Args:
        output: directory of the exports.
        stage: folder with the files of this export.
    """
    files = sorted(path.name for name in _FILES for path in output.glob(name) if not (stage / path.name).exists())
    return [f"From an earlier export of the same model, and not measured here: {', '.join(files)}."] if files else []

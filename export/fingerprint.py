"""Of which model the exported files in a directory are, so that none ever lies beside the labels of another run."""

import hashlib
import pathlib
from collections.abc import Sequence

import keras

from keras_vit import UserError
from keras_vit.files.labels import labels_text
from keras_vit.run_directory import LABELS

# Tells of which model the files beside it are.
_NOTE = "export.sha256"
# What exports call their files.
_FILES = ("model-*.tflite", "model.onnx", "model.xml", "model.bin")


def fingerprint(model: keras.Model, labels: Sequence[str]) -> str:
    """SHA-256 of the weights and the labels: another one for every training."""
    digest = hashlib.sha256(labels_text(labels).encode())
    for weight in model.weights:
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


def claim(output: pathlib.Path, model: keras.Model, labels: Sequence[str]) -> dict[str, str]:
    """The text files, by name, that say whose the export in a directory is.

    Raises UserError for a directory with files of another model, which would lie beside the labels of this one.
    """
    texts = {_NOTE: f"{fingerprint(model, labels)}\n", LABELS: labels_text(labels)}
    files = [] if (output / _NOTE).is_file() else sorted(path.name for name in _FILES for path in output.glob(name))
    there = [name for name in (*texts, *files) if (output / name).is_file()]
    foreign = [name for name in there if (output / name).read_bytes() != texts.get(name, "").encode()]
    if foreign:
        raise UserError(
            f"{output} already holds the export of another model ({', '.join(foreign)}); give another --output, or "
            "remove that one."
        )
    return texts

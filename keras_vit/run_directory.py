"""What every command may read of a finished run: its model, the names of its classes, images to try it on."""

import dataclasses
import os
import pathlib

import keras
import numpy as np

from keras_vit.errors import UserError
from keras_vit.npz import read_npz, write_npz

CONFIG, LABELS, MODEL, SAMPLES = "config.json", "labels.txt", "model.keras", "samples.npz"


def find(run: str | os.PathLike, name: str) -> pathlib.Path:
    """The path of a file that a finished run has. Raises UserError when this one has not."""
    run = pathlib.Path(run)
    if not run.is_dir():
        raise UserError(f"There is no run directory {str(run)!r}; give the --workdir of a training command.")
    if not (run / name).is_file():
        raise UserError(f"{run} is no finished run: it has no {name}.")
    return run / name


def load_model(run: str | os.PathLike) -> keras.Model:
    """The trained model of a run, or of a .keras file."""
    path = pathlib.Path(run)
    path = path if path.suffix == ".keras" and path.is_file() else find(path, MODEL)
    try:
        return keras.models.load_model(path, compile=False)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(f"{path} cannot be read as a Keras model ({' '.join(str(error).split())[:200]}).") from error


def load_labels(run: str | os.PathLike) -> tuple[str, ...]:
    """The names of the classes of a run, in the order of its logits."""
    return tuple(find(run, LABELS).read_text(encoding="utf-8").split("\n")[:-1])


@dataclasses.dataclass(frozen=True)
class Samples:
    """Encoded images with their labels, as they are kept beside a model for later checks of its exports."""

    encoded: tuple[bytes, ...]
    """PNG or any other image file's content."""
    labels: np.ndarray
    """(n,) int64, the class of each."""

    def save(self, path: str | os.PathLike) -> None:
        """Write as an .npz of plain numbers."""
        ends = np.cumsum([len(image) for image in self.encoded], dtype=np.int64)
        data = np.frombuffer(b"".join(self.encoded), np.uint8)
        write_npz(path, {"data": data, "ends": ends, "labels": np.asarray(self.labels, np.int64)})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Samples":
        """Read what `save` wrote."""
        arrays = read_npz(path)
        if arrays.keys() != {"data", "ends", "labels"} or len(arrays["ends"]) != len(arrays["labels"]):
            raise UserError(f"{path} holds no sample images; train again to write them.")
        starts = np.concatenate([[0], arrays["ends"][:-1]])
        data = arrays["data"].tobytes()
        spans = zip(starts, arrays["ends"], strict=True)
        return cls(tuple(data[start:end] for start, end in spans), arrays["labels"])

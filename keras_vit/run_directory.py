"""Read a finished run: its model, class names and sample images."""

import dataclasses
import json
import math
import os
import pathlib
import re
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_vit.errors import Rules, UserError, near_path, reading, refuse_first
from keras_vit.files.keras_weights import check_weights_in
from keras_vit.files.kinds import MODEL_SUFFIXES, kind_of, readable_kind
from keras_vit.files.labels import LABELS, read_labels
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.files.remote import is_remote, is_web, local_copy, to_path

if TYPE_CHECKING:
    import keras

CONFIG, MODEL, SAMPLES, METRICS = "config.json", "model.keras", "samples.npz", "metrics.jsonl"
# Field of config.json: `DataSet.fingerprint` of the data.
IMAGES = "images_fingerprint"
# Digests of the files of the training images, by which they are found among others.
TRAINING_IMAGES = "training_images.npz"
# The temperature that `keras-vit evaluate --calibrate` fitted.
TEMPERATURE = "temperature.json"
# Training images, for calibration without the evaluation images.
CALIBRATION = "calibration.npz"

# Folder with the checkpoints of training.
CHECKPOINTS = "checkpoints"
# Files of a run that could be taken for a model's.
_OTHER_FILES = (SAMPLES, TRAINING_IMAGES, CALIBRATION, "unknown.npz")

# Files with a model, of ours or published. What is said of a pickle is more than that it is no run.
_MODELS = (MODEL, "*.safetensors", "*.bin", "*.pth", "*.h5", "*.msgpack", "saved_model.pb", "*/saved_model.pb")

# What is raised for a .keras file that is cut off or has other bytes.
_OF_DAMAGE = (OSError, EOFError, zipfile.BadZipFile, zlib.error)
# Bytes of a .keras file's members for each of its own; Keras does not compress them.
_LARGEST_RATIO = 20


def find(run: str | os.PathLike, name: str) -> pathlib.Path:
    """The path of a file of a finished run. Raises UserError if it does not exist."""
    run = to_path(run)
    if not (run / name).is_file():
        raise UserError(_what_is_wrong(run, name))
    if name == MODEL and not is_remote(run / name) and not zipfile.is_zipfile(run / name):
        raise UserError(f"{run / name} is not a complete .keras file; copy it again, or train again.")
    return run / name


def _what_is_wrong(run: pathlib.Path, name: str) -> str:
    """A sentence on a path that should be a run with a file of this name."""
    if run.is_file():
        return f"A run is a directory, but {run} is a file; give the directory that it is in."
    if not run.is_dir():
        advice = "" if is_remote(run) else near_path(run, os.path.isdir)
        return f"There is no run directory {str(run)!r}{advice or '; give the --workdir of a training command.'}"
    if inside := sorted(run.glob(f"*/{name}")):
        return f"{run} is not a run, but holds runs; give one of them, such as {inside[0].parent}."
    if phone := sorted(run.glob("*.tflite")):
        return f"{run} is not a run, but holds TFLite files; give one of them, such as {phone[0]}."
    if not is_remote(run) and (run.parent / name).is_file():
        return f"{run} is a folder of a run, but not the run itself; give {run.parent}."
    waits = "; wait for its training, or repeat the command, which continues it"
    return f"{run} is not a finished run: it has no {name}{waits if (run / LABELS).is_file() else ''}."


def check_model_file(path: str | os.PathLike) -> None:
    """Raise UserError for a file of this machine that holds no model: another file of a run, or of another type."""
    file = to_path(path)
    if is_remote(path) or not file.is_file():
        return
    is_model = file.name.endswith((*MODEL_SUFFIXES, ".index.json")) or kind_of(file) != "unknown"
    for run in (file.parent, file.parent.parent):
        is_of_run = any((run / name).is_file() for name in (MODEL, LABELS))
        if is_of_run and (not is_model or file.name in _OTHER_FILES or file.parent.name == CHECKPOINTS):
            raise UserError(f"{path} is a file of a run, but not its model; give the run {run}.")
    # h5 may be weights for a model that is named, and exports are for some commands.
    if not file.name.endswith((".h5", ".index.json", ".tflite", ".pb")):
        readable_kind(file)


def is_run(path: pathlib.Path) -> bool:
    """Whether a path is the directory of a finished run."""
    return all((path / name).is_file() for name in (MODEL, CONFIG))


def is_ours(path: pathlib.Path) -> bool:
    """Whether this is a .keras file or a run directory, finished or not, and no published checkpoint."""
    if path.suffix == ".keras" or not path.is_dir():
        return path.suffix == ".keras"
    published = (entry for pattern in ("*.safetensors", "*.bin") for entry in path.glob(pattern))
    return (path / MODEL).is_file() or not any(published)  # an export beside the model may be such a file


def holds_model(folder: pathlib.Path) -> bool:
    """Whether a model, of ours or published, is in a folder."""
    return any(entry for pattern in _MODELS for entry in folder.glob(pattern))


def is_keras_model(path: str | os.PathLike) -> bool:
    """Whether a path is a .keras file, or a run directory, finished or not."""
    path = to_path(path)
    return (path.is_file() and kind_of(path) == "keras") or any((path / name).is_file() for name in (MODEL, LABELS))


def load_model(run: str | os.PathLike) -> "keras.Model":
    """The trained model of a run, or of a .keras file."""
    import keras  # lazy: importing Keras takes seconds

    path = to_path(run)
    path = path if path.is_file() and kind_of(path) == "keras" else find(path, MODEL)
    shown, path = path, local_copy(path)
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
            is_bomb = size > _LARGEST_RATIO * path.stat().st_size  # Keras reads whole members into memory
            damaged = None if is_bomb else archive.testzip()  # Keras does not verify the checksum of the weights
            if not (is_bomb or damaged):
                check_weights_in(archive)
        if is_bomb or damaged:
            what = f"it would be {size:,} bytes after decompression" if is_bomb else f"bad checksum of {damaged!r}"
            raise zipfile.BadZipFile(what)
        if path.suffix == ".keras":
            return keras.models.load_model(path, compile=False)
        with tempfile.TemporaryDirectory() as folder:  # Keras goes by the name
            named = pathlib.Path(folder) / MODEL
            named.symlink_to(path.resolve())
            return keras.models.load_model(named, compile=False)
    except (*_OF_DAMAGE, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        version = keras.__version__ if isinstance(error, _OF_DAMAGE) else _writer(path)
        advice = "it may be damaged or changed"
        if version != keras.__version__:
            advice = f"Keras {version} saved it, and this is {keras.__version__}; install that version"
        what = f"cannot be read as a Keras model ({_words(error)}); {advice}"
        if code := re.search(r"Could not locate \w+ '([^']+)'|(`Lambda`|__lambda__)", str(error)):
            what = (
                f"has a layer of its author's code, {code[1] or 'Lambda'}, which is not run from a file; replace it by "
                "layers of Keras or functions of keras.ops, and save the model again"
            )
        raise UserError(f"{shown} {what}.") from error


def _words(error: Exception) -> str:
    """Return the message of an error in one line; of nested ones of Keras, the innermost."""
    words = " ".join(str(error).rsplit("Exception encountered: ", 1)[-1].split())
    return words.rstrip(".")[:200] or type(error).__name__


def _writer(path: pathlib.Path) -> str:
    """The version of Keras that saved a .keras file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return str(_object(archive.read("metadata.json").decode())["keras_version"])
    except (KeyError, ValueError):
        return "of an unknown version"


def read_config(file: pathlib.Path) -> dict[str, Any]:
    """The content of a config.json; empty if it is damaged."""
    return _object(file.read_text(encoding="utf-8", errors="replace"))


def check_config(file: pathlib.Path) -> None:
    """Raise UserError for a damaged config.json, which says whether an image may have several classes."""
    advice = "copy it again, since it says whether an image may have several classes"
    with reading(file, "the settings of a run", advice=advice):
        json.loads(file.read_text(encoding="utf-8"))


def read_last_metrics(file: pathlib.Path) -> dict[str, Any]:
    """The last line of a metrics.jsonl; empty if it is damaged."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return _object(lines[-1]) if lines else {}


def _object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def load_labels(run: str | os.PathLike) -> tuple[str, ...]:
    """The class names of a run, in the order of its logits."""
    return read_labels(find(run, LABELS))


def save_training_images(run: pathlib.Path, digests: np.ndarray) -> None:
    """Write the digests of the training images (n,) of a run."""
    write_npz(run / TRAINING_IMAGES, {"digests": np.unique(digests)})


def read_temperature(file: pathlib.Path) -> float:
    """The number in a temperature.json that divides the logits before the softmax."""
    try:
        temperature = json.loads(file.read_text(encoding="utf-8"))["temperature"]
    except (ValueError, KeyError, TypeError):
        temperature = None
    if not isinstance(temperature, float) or not 0.0 < temperature < math.inf:
        raise UserError(f"{file} has no temperature; repeat keras-vit evaluate --calibrate, or remove it.")
    return temperature


def check_head(model: "keras.Model", labels: Sequence[str]) -> None:
    """Raise UserError unless the model classifies images into as many classes as there are labels."""
    shape = model.output_shape
    if len(shape) != 2 or shape[1] != len(labels):
        raise UserError(
            f"The model's output has shape {shape}, but there are {len(labels)} labels; {MODEL} and {LABELS} must "
            "belong to the same run. If the model ends with features, add a head with keras-vit finetune or "
            f"keras_vit.adapt(model, num_classes={len(labels)})."
        )


def output_folder(output: str | os.PathLike) -> pathlib.Path:
    """The path of --output. Raises UserError unless it is a writable directory or can be created; creates nothing.

    Of a directory in a bucket, only whether the bucket answers.
    """
    output = to_path(output)
    refuse_first(_rules_of_output(output))
    return output


def _rules_of_output(output: pathlib.Path) -> Rules:
    yield is_web(output), f"{output} is an address to download from; --output takes a directory."
    remote = is_remote(output)
    nearest = output if remote else next(path for path in (output, *output.parents) if os.path.lexists(path))
    is_folder = remote or nearest.is_dir()
    yield nearest.is_file() or not is_folder, f"{nearest} is a file; --output takes a directory."
    yield (
        not remote and not os.access(nearest, os.W_OK | os.X_OK),
        f"{nearest} is not writable; give another --output.",
    )


@dataclasses.dataclass(frozen=True)
class Samples:
    """Encoded images with their labels, stored beside a model to check its exports."""

    encoded: tuple[bytes, ...]
    """Contents of image files."""
    labels: np.ndarray
    """(N,) int64 class indices."""
    names: tuple[str, ...] = ()
    """What to call each image, such as its class folder and file; empty where it is not known."""

    def some(self, most: int) -> "Samples":
        """At most so many of the images, evenly spaced."""
        if len(self.encoded) <= most:
            return self
        rows = np.linspace(0, len(self.encoded) - 1, most).astype(int)
        return Samples(tuple(self.encoded[row] for row in rows), self.labels[rows])

    def save(self, path: str | os.PathLike) -> None:
        """Write an .npz file of numeric arrays."""
        ends = np.cumsum([len(image) for image in self.encoded], dtype=np.int64)
        data = np.frombuffer(b"".join(self.encoded), np.uint8)
        labels = np.asarray(self.labels, np.int64)
        arrays: dict[str, np.ndarray] = {"data": data, "ends": ends, "labels": labels}
        if self.names:  # as bytes, since all arrays are numeric
            arrays["names"] = np.frombuffer("\n".join(self.names).encode("utf-8", "replace"), np.uint8)
        write_npz(path, arrays)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "Samples":
        """Read a file written by `save`."""
        arrays = read_npz(path)
        if not _are_samples(arrays):
            raise UserError(f"{path} has no sample images; train again to write them.")
        starts = [0, *arrays["ends"][:-1]]
        data = arrays["data"].tobytes()
        spans = zip(starts, arrays["ends"], strict=True)
        names = arrays["names"].tobytes().decode("utf-8", "replace").split("\n") if "names" in arrays else ()
        known = names if len(names) == len(arrays["labels"]) else ()
        return cls(tuple(data[start:end] for start, end in spans), arrays["labels"], tuple(known))


def _are_samples(arrays: dict[str, np.ndarray]) -> bool:
    """Whether the ends split the data into at least one image, each with a label."""
    if arrays.keys() - {"names"} != {"data", "ends", "labels"}:
        return False
    data, ends, labels = arrays["data"], arrays["ends"], arrays["labels"]
    integers = ends.dtype == labels.dtype == np.int64 and data.dtype == np.uint8
    one_each = data.ndim == ends.ndim == 1 and ends.shape == labels.shape and ends.size > 0
    return integers and one_each and bool(np.all(np.diff(ends, prepend=0) > 0)) and ends[-1] == data.size

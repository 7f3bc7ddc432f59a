"""Read .keras files, or run directories by their model.keras. None is trusted."""

import io
import json
import os
import pathlib
import re
import tempfile
import typing
import zipfile
import zlib
from typing import TYPE_CHECKING

from keras_vit.errors import UserError, near_path
from keras_vit.files.kinds import kind_of
from keras_vit.files.labels import LABELS
from keras_vit.files.npz import data_offset
from keras_vit.files.remote import local_copy, to_path

if TYPE_CHECKING:
    import keras

MODEL = "model.keras"  # the trained model of a run directory
KERAS_WEIGHTS = ".weights.h5"  # the end of the name of a file of weights

# What is raised for a .keras file that is cut off or has other bytes.
# NotImplementedError: of zipfile, for versions and compressions that it does not know.
_OF_DAMAGE = (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)
_LARGEST_RATIO = 20  # bytes of a .keras file's members for each of its own; Keras does not compress them


def is_keras_model(path: pathlib.Path) -> bool:
    """Return whether a path is a .keras file, or a run directory, finished or not, and no published checkpoint."""
    if path.is_file():
        return kind_of(path) == "keras"
    if (path / MODEL).is_file():  # beside which an export may have the name of a published file
        return True
    published = (entry for pattern in ("*.safetensors", "*.bin") for entry in path.glob(pattern))
    return (path / LABELS).is_file() and not any(published)


def find(run: str | os.PathLike, name: str = MODEL) -> pathlib.Path:
    """Return the path of a file of a finished run. Raises UserError if it does not exist."""
    run = to_path(run)
    if not (run / name).is_file():
        raise UserError(_what_is_wrong(run, name))
    return run / name


def _what_is_wrong(run: pathlib.Path, name: str) -> str:
    """Return a sentence on a path that should be a run with a file of this name."""
    if run.is_file():
        return f"A run is a directory, but {run} is a file; give the directory that it is in."
    if not run.is_dir():
        advice = near_path(run, os.path.isdir) or "; give the --workdir of a training command."
        return f"There is no run directory {str(run)!r}{advice}"
    if inside := sorted(run.glob(f"*/{name}")):
        return f"{run} is not a run, but holds runs; give one of them, such as {inside[0].parent}."
    if phone := sorted(run.glob("*.tflite")):
        return f"{run} is not a run, but holds TFLite files; give one of them, such as {phone[0]}."
    if (run.parent / name).is_file():
        return f"{run} is a folder of a run, but not the run itself; give {run.parent}."
    waits = "; wait for its training, or repeat the command, which continues it"
    return f"{run} is not a finished run: it has no {name}{waits if (run / LABELS).is_file() else ''}."


def load_model(run: str | os.PathLike) -> "keras.Model":
    """Load the trained model of a run, or of a .keras file. Raises UserError for a file that cannot be read."""
    import keras  # lazy: importing Keras takes seconds

    path = to_path(run)
    shown = path if path.is_file() else find(path)
    path = local_copy(shown)
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
        raise UserError(f"{shown} {_problem(path, error)}.") from error


def _problem(path: pathlib.Path, error: Exception) -> str:
    import keras

    if code := re.search(r"Could not locate \w+ '([^']+)'|(`Lambda`|__lambda__)", str(error)):
        return (
            f"has a layer of its author's code, {code[1] or 'Lambda'}, which is not run from a file; replace it by "
            "layers of Keras or functions of keras.ops, and save the model again"
        )
    version = keras.__version__
    if not isinstance(error, _OF_DAMAGE):
        try:
            with zipfile.ZipFile(path) as archive:
                version = str(json.loads(archive.read("metadata.json"))["keras_version"])
        except (KeyError, TypeError, ValueError, RecursionError):
            version = "of an unknown version"
    advice = "it may be damaged or changed"
    if version != keras.__version__:
        advice = f"Keras {version} saved it, and this is {keras.__version__}; install that version"
    # Of nested errors of Keras, the innermost, in one line.
    words = " ".join(str(error).rsplit("Exception encountered: ", 1)[-1].split()).rstrip(".")[:200]
    return f"cannot be read as a Keras model ({words or type(error).__name__}); {advice}"


def check_weights_in(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if an HDF5 file in a .keras file declares more bytes than it has, or reads other files."""
    import h5py

    for member in archive.infolist():
        if not member.filename.endswith(".h5"):
            continue
        # A part of the file is sought in no time; a stream of the archive begins anew.
        is_part = member.compress_type == zipfile.ZIP_STORED and archive.filename is not None
        stream: typing.Any = _Part(str(archive.filename), member) if is_part else archive.open(member)
        with stream, h5py.File(stream, "r") as file:
            datasets: list[h5py.Dataset] = []
            file.visititems(lambda _, each, add=datasets.append: add(each) if isinstance(each, h5py.Dataset) else None)
            declared = sum(each.nbytes for each in datasets)
            if declared > member.file_size:
                raise ValueError(f"its arrays would be {declared:,} bytes, but it has {member.file_size:,}")
            if any(each.external or each.is_virtual for each in datasets):
                raise ValueError("an array of it is in another file")


class _Part(io.RawIOBase):
    """The bytes of an uncompressed member of an archive."""

    def __init__(self, path: str, member: zipfile.ZipInfo) -> None:
        self._stream = open(path, "rb", buffering=0)  # noqa: SIM115  (close does)
        self._begin, self._size, self._place = data_offset(self._stream, member), member.file_size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        self._stream.seek(self._begin + self._place)
        count = self._stream.readinto(view[: max(self._size - self._place, 0)]) or 0
        self._place += count
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()

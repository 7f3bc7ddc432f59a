"""What a file with a model is, by its first bytes; its name decides only where these cannot be read or say nothing."""

import pathlib
import zipfile
from typing import Literal

from keras_vit.files.remote import is_remote

Kind = Literal["npz", "safetensors", "keras", "h5", "pickle", "lfs pointer", "unknown"]

# By the end of the name.
_BY_NAME: dict[str, Kind] = {".npz": "npz", ".safetensors": "safetensors", ".keras": "keras", ".h5": "h5"}
_BY_NAME |= dict.fromkeys((".pth", ".pt", ".bin", ".pkl", ".ckpt"), "pickle")
# The ends of the names of files with a model, and of others that are refused with a sentence of their own.
MODEL_SUFFIXES = (*_BY_NAME, ".tflite", ".pb")


def kind_of(path: pathlib.Path) -> Kind:
    """What a file is. One in a bucket is not opened for it."""
    named = _BY_NAME.get(path.suffix, "unknown")
    if is_remote(path):
        return named
    try:
        with open(path, "rb") as stream:
            start = stream.read(48)
    except OSError:
        return named
    if start.startswith(b"PK"):
        return _kind_of_zip(path) or named
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return "h5"
    if start.startswith(b"version https://git-lfs"):
        return "lfs pointer"
    if start[8:9] == b"{":
        return "safetensors"
    # Pickles of the protocols 2 to 5; the older have no mark.
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    return named


def _kind_of_zip(path: pathlib.Path) -> Kind | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return None
    if any(name.endswith("data.pkl") for name in names):
        return "pickle"
    if "metadata.json" in names:
        return "keras"
    return "npz" if any(name.endswith(".npy") for name in names) else None

"""The kind of a file with a model, by its first bytes; its name decides only where these say nothing."""

import pathlib
import re
import zipfile
from typing import Literal

from keras_vit.errors import UserError
from keras_vit.files.remote import first_bytes, is_remote

Kind = Literal["npz", "safetensors", "keras", "h5", "pickle", "unknown"]

_FIRST_BYTES = 512

# By the end of the name.
_BY_NAME: dict[str, Kind] = {".npz": "npz", ".safetensors": "safetensors", ".keras": "keras", ".h5": "h5"}
_BY_NAME |= dict.fromkeys((".pth", ".pt", ".bin", ".pkl", ".ckpt"), "pickle")
# The ends of the names of files with a model, and of others that are refused with a sentence of their own.
MODEL_SUFFIXES = (*_BY_NAME, ".tflite", ".pb")

_TAKE_SOURCE = "give the .npz, .safetensors or .keras file, or the folder, that it was made from"
_UNPACK = "unpack it, and give what is inside"
_GIVE_MODEL = "give a model: a .npz, .safetensors or .keras file, or a folder"
# Files without weights that are read here: how they begin -> what they are, and what to do.
_OTHERS = {
    rb"(<\?xml[^>]*>\s*)?<net ": ("an OpenVINO file", _TAKE_SOURCE),
    rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype|html|head|body|\?xml|!--)": (
        "a web page, which was downloaded instead of the file",
        "download the file itself, by the link on its page",
    ),
    b"version https://git-lfs": ("a Git LFS pointer, not the file itself", "run 'git lfs pull' in its folder"),
    b"GGUF|lmgg|tjgg": ("a file of llama.cpp", _TAKE_SOURCE),
    b".{4}TFL3": ("a TFLite file", _TAKE_SOURCE),
    rb"\x08\x01\x12": ("the graph of a SavedModel", _TAKE_SOURCE),
    rb"\x08[\x02-\x20][\x12\x1a\x22\x2a\x32\x3a\x42]": ("an ONNX file", _TAKE_SOURCE),
    rb"\x93NUMPY": ("a single NumPy array", _GIVE_MODEL),
    rb"PK|\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|7z\xbc\xaf|Rar!|.{257}ustar": ("an archive of other files", _UNPACK),
    rb"\x89PNG|\xff\xd8\xff|GIF8|BM|RIFF.{4}WEBP|II\*\0|MM\0\*|.{4}ftyp": ("an image", _GIVE_MODEL),
    b"%PDF": ("a PDF document", _GIVE_MODEL),
    rb"\Z": ("empty", "download it again"),
    rb"[^\x00-\x08\x0e-\x1f]+\Z": ("a text file", _GIVE_MODEL),
}  # fmt: skip


def kind_of(path: pathlib.Path) -> Kind:
    """Return the kind of a file. One in a bucket is not opened for it."""
    named = _BY_NAME.get(path.suffix, "unknown")
    if is_remote(path) or not path.is_file():  # to open a pipe would wait for its writer
        return named
    try:
        start = first_bytes(path, _FIRST_BYTES)
    except OSError:
        return named
    if start.startswith(b"PK"):
        return _kind_of_zip(path) or named
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return "h5"
    if start[8:9] == b"{":
        return "safetensors"
    # Pickles of the protocols 2 to 5; the older have no mark, but begin with a few characters.
    is_old_pickle = named == "pickle" and start[:1] in (b"(", b"c", b"]", b"}")
    if is_old_pickle or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return "pickle"
    return "unknown" if named in ("pickle", "h5") or _other_format(start) else named


def readable_kind(path: pathlib.Path) -> Kind:
    """Return the kind of a file. Raises UserError, with the way out, for one that is not read here."""
    kind = kind_of(path)
    if sentence := _why_unreadable(path, kind):
        raise UserError(sentence)
    return kind


def _why_unreadable(path: pathlib.Path, kind: Kind) -> str:
    """Return a sentence with the way out; empty for what is read here."""
    name = path.name
    if not is_remote(path) and path.exists() and not (path.is_file() or path.is_dir()):
        return f"{name} is a pipe or device; save what it gives to a file, and give that."
    if name in ("tf_model.h5", "flax_model.msgpack"):
        return (
            f"{name} is not read; convert its folder with transformers 4: AutoModelForImageClassification."
            f"from_pretrained(FOLDER, from_{'tf' if kind == 'h5' else 'flax'}=True).save_pretrained(NEW_FOLDER)."
        )
    if kind == "pickle":
        return (
            f"{name} is a pickle, which can run code when it is opened; convert it where you trust it, with torch and "
            f"safetensors: import torch; import safetensors.torch; found = torch.load({name!r}, weights_only=True); "
            "found = next((found[key] for key in ('state_dict', 'model', 'teacher') if key in found), found); "
            "safetensors.torch.save_file({key: value.clone().contiguous() for key, value in found.items() if "
            "torch.is_tensor(value)}, 'model.safetensors')"
        )
    if name.endswith(".weights.h5"):
        return (
            f"{name} holds the weights of a Keras model without its architecture; build the model and load them: "
            f"keras_vit.load_checkpoint(keras_vit.build(NAME, num_classes=...), {name!r})."
        )
    if kind == "h5":
        return (
            f"{name} is an HDF5 file of Keras; load it with keras.models.load_model where you trust it, and save the "
            "model as a .keras file: model.save('model.keras')."
        )
    if kind == "unknown" and not is_remote(path):
        unknown = "of no format that is known here", _GIVE_MODEL
        what, advice = _other_format(first_bytes(path, _FIRST_BYTES)) or unknown
        return f"{name} is {what}; {advice}."
    return ""


def _other_format(start: bytes) -> tuple[str, str] | None:
    """Name the kind of a file that begins so, and what to do; None if that is not known."""
    return next((other for pattern, other in _OTHERS.items() if re.match(pattern, start, re.DOTALL)), None)


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

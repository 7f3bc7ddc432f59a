"""What a file with a model is, by its first bytes; its name decides only where these say nothing."""

import pathlib
import zipfile
from typing import Literal

from keras_vit.errors import UserError
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


def check_readable(path: pathlib.Path) -> Kind:
    """What a file is. Raises UserError, with the way out, for one that holds weights but is not read here."""
    kind = kind_of(path)
    if kind == "lfs pointer":
        raise UserError(f"{path.name} is a Git LFS pointer, not the file itself; run 'git lfs pull' in its folder.")
    if path.name in ("tf_model.h5", "flax_model.msgpack"):
        code = "tf" if kind == "h5" else "flax"
        raise UserError(
            f"{path.name} is not read; convert its folder with transformers 4: AutoModelForImageClassification."
            f"from_pretrained(FOLDER, from_{code}=True).save_pretrained(NEW_FOLDER)."
        )
    if kind == "pickle":
        raise UserError(
            f"{path.name} is a pickle, which can run code when it is opened; convert it where you trust it, with torch "
            f"and safetensors: import torch; import safetensors.torch; safetensors.torch.save_file({{key: "
            f"value.clone().contiguous() for key, value in torch.load({path.name!r}, weights_only=True).items()}}, "
            "'model.safetensors')"
        )
    if path.name.endswith(".weights.h5"):
        raise UserError(
            f"{path.name} holds the weights of a Keras model without its architecture; build the model and load them: "
            f"keras_vit.load_checkpoint(keras_vit.build(NAME, num_classes=...), {path.name!r})."
        )
    if kind == "h5":
        raise UserError(
            f"{path.name} is an HDF5 file of Keras; load it with keras.models.load_model where you trust it, and save "
            "the model as a .keras file: model.save('model.keras')."
        )
    return kind


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

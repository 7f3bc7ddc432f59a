"""Checkpoints of a run: written atomically, verified by a hash; the last two are kept.

A checkpoint is one .npz file, such as `step-00001500-0f3a….npz`. The hash in its name covers the id of the run, the
step and the bytes of the file. A damaged checkpoint, or one of another run, is skipped for the one before it. In a
bucket, the file `latest` names the checkpoint whose upload was complete, and is read first.
"""

import hashlib
import json
import pathlib
import re
from collections.abc import Mapping

import keras
import numpy as np
from numpy.typing import ArrayLike

from keras_vit import UserError
from keras_vit.files.atomic import atomic_write
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.npz import open_npz, write_npz
from keras_vit.files.remote import RemoteError, is_remote, local_copy
from keras_vit.run import CONFIG
from training.loop.devices.jax_devices import assign_whole

_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.npz")
_MAX_TO_KEEP = 2
_LATEST = "latest"
# Of what the steps compute: 3 since --patch-dropout draws its patches with a generator of Keras.
_VERSION = 3


def save(folder: pathlib.Path, step: int, progress: dict, arrays: Mapping[str, ArrayLike]) -> None:
    """Write the checkpoint of a step, with JSON values and variables by name, and remove the oldest ones.

    Arrays that have `__array__` are read when they are written, so that memory never holds all. Raises UserError if the
    file cannot be written; earlier checkpoints remain.
    """

    def named(written: pathlib.Path) -> pathlib.Path:
        return folder / f"step-{step:08d}-{_digest(written, folder, step)}.npz"

    try:
        with atomic_write(folder / "state.npz", named) as temporary:
            text = json.dumps(progress | {"version": _VERSION}).encode()
            write_npz(temporary, {"progress": np.frombuffer(text, np.uint8), **arrays})
        saved = _latest_first(folder)
        if is_remote(folder):
            (folder / _LATEST).write_text(saved[0].name)
    except OSError as error:  # also of a bucket, whose errors are UserErrors
        remedy = "make it writable" if is_remote(folder) else "make room"
        failed = f"The checkpoint of step {step} could not be written to {folder} ({error.strerror})"
        raise UserError(f"{failed}; earlier ones are intact: {remedy}, and the same command continues.") from error
    for old in saved[_MAX_TO_KEEP:]:
        old.unlink(missing_ok=True)


def restore(folder: pathlib.Path, variables: Mapping[str, keras.Variable]) -> tuple[int, dict] | None:
    """Assign the latest intact checkpoint to variables by name, and return (step, progress); None if there is none.

    Raises UserError if it does not fit the variables, or if all checkpoints are damaged.
    """
    if (checkpoint := load_latest(folder)) is None:
        return None
    step, progress, arrays = checkpoint
    shapes = {name: array.shape for name, array in arrays.items()}
    if progress.pop("version", 1) != _VERSION or shapes != {n: tuple(v.shape) for n, v in variables.items()}:
        raise UserError(
            f"The checkpoint of step {step} was saved by another version; remove {folder.parent} to start again."
        )
    for name, variable in variables.items():
        assign_whole(variable, arrays[name].fetch())
    return step, progress


def load_latest(folder: pathlib.Path) -> tuple[int, dict, dict[str, LazyArray]] | None:
    """Return (step, progress, arrays) of the latest intact checkpoint; None if there are no checkpoints.

    Raises UserError if there are checkpoints but all are damaged.
    """
    paths = _latest_first(folder)
    if is_remote(folder) and (folder / _LATEST).is_file():
        latest = (folder / _LATEST).read_text()
        paths.sort(key=lambda path: path.name != latest)
    for path in paths:
        try:
            local = local_copy(path)
            if not path.stem.endswith(f"-{_digest(local, folder, _step(path))}"):
                raise ValueError("its hash does not match this run, step and content")
            arrays = open_npz(local)
            return _step(path), json.loads(arrays.pop("progress").fetch().tobytes()), arrays
        except (ValueError, KeyError, OSError) as error:  # UserError is a ValueError
            if isinstance(error, RemoteError) and not isinstance(error, FileNotFoundError):
                raise  # the checkpoint may be intact
            print(f"Skipped the damaged checkpoint {path.name}: {error}.")
    if paths:
        raise UserError(
            f"All checkpoints are damaged, so the run cannot continue; remove {folder.parent} to start again."
        )
    return None


def _latest_first(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted((path for path in folder.glob("step-*.npz") if _NAME.fullmatch(path.name)), key=_step, reverse=True)


def _step(path: pathlib.Path) -> int:
    return int(path.name.split("-")[1])


def _digest(file: pathlib.Path, folder: pathlib.Path, step: int) -> str:
    """Hash the id of the run, the step and the bytes of a local file."""
    digest = hashlib.sha256(f"{_run_id(folder)} {step} ".encode())  # hashlib.file_digest needs Python 3.11
    with open(file, "rb") as stream:
        while part := stream.read(2**20):
            digest.update(part)
    return digest.hexdigest()[:16]


def _run_id(folder: pathlib.Path) -> str | None:
    """Return the id in the config.json of the run directory; None for a run of a version without ids."""
    try:
        return json.loads((folder.parent / CONFIG).read_text(encoding="utf-8")).get("id")
    except FileNotFoundError:
        return None
    except RemoteError:
        raise
    except (OSError, ValueError, AttributeError):  # `Run.start` reports it
        return None

"""Checkpoints of a run: written atomically, verified by a hash; the last two are kept.

A checkpoint is one .npz file, named after its step and a SHA-256, such as `step-00001500-0f3a….npz`. The hash covers
the id of the run, the step and the bytes of the file: a renamed file, or one from another run, is rejected. A file is
renamed to its final name once it is complete. A damaged checkpoint is skipped, and the one before it is loaded.
"""

import hashlib
import json
import pathlib
import re

import numpy as np

from keras_vit import UserError
from keras_vit.files.atomic import atomic_write
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.run_directory import CONFIG

_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.npz")
_MAX_TO_KEEP = 2


def save(folder: pathlib.Path, step: int, progress: dict, arrays: dict[str, np.ndarray]) -> None:
    """Write a checkpoint and remove the oldest ones.

    Args:
        folder: of the run's checkpoints, in its run directory.
        step: training steps done.
        progress: JSON values.
        arrays: variables by name.

    Raises UserError if the file cannot be written; earlier checkpoints remain.
    """

    def named(written: pathlib.Path) -> pathlib.Path:
        return folder / f"step-{step:08d}-{_digest(written, step)}.npz"

    try:
        with atomic_write(folder / "state.npz", named) as temporary:
            write_npz(temporary, {"progress": np.frombuffer(json.dumps(progress).encode(), np.uint8), **arrays})
    except OSError as error:
        previous = _list(folder)
        raise UserError(
            f"The checkpoint of step {step} could not be written to {folder} ({error.strerror}); "
            + (f"that of step {_step(previous[0])} is intact: make room, " if previous else "make room, ")
            + "and the same command continues."
        ) from error
    for old in _list(folder)[_MAX_TO_KEEP:]:
        old.unlink()


def load_latest(folder: pathlib.Path) -> tuple[int, dict, dict[str, np.ndarray]] | None:
    """Return (step, progress, arrays) of the latest intact checkpoint; None if there are no checkpoints.

    Raises UserError if there are checkpoints but all are damaged.
    """
    paths = _list(folder)
    for path in paths:
        try:
            if not path.stem.endswith(f"-{_digest(path, _step(path))}"):
                raise ValueError("its hash does not match this run, step and content")
            arrays = read_npz(path)
            return _step(path), json.loads(arrays.pop("progress").tobytes()), arrays
        except (ValueError, KeyError, OSError) as error:  # UserError is a ValueError
            print(f"Skipped the damaged checkpoint {path.name}: {error}.")
    if paths:
        raise UserError(
            f"All checkpoints in {folder} are damaged, so the run cannot continue; remove {folder.parent} to start "
            "again."
        )
    return None


def _list(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return all checkpoints, the latest first."""
    return sorted((path for path in folder.glob("step-*.npz") if _NAME.fullmatch(path.name)), key=_step, reverse=True)


def _step(path: pathlib.Path) -> int:
    return int(path.name.split("-")[1])


def _digest(path: pathlib.Path, step: int) -> str:
    """Hash the run id, the step and the bytes of a file in the checkpoints folder."""
    digest = hashlib.sha256(f"{_run_id(path.parent)} {step} ".encode())  # hashlib.file_digest needs Python 3.11
    with open(path, "rb") as stream:
        while part := stream.read(2**20):
            digest.update(part)
    return digest.hexdigest()[:16]


def _run_id(folder: pathlib.Path) -> str | None:
    """Return the id in the config.json of the run directory; None for a run of a version without ids."""
    try:
        return json.loads((folder.parent / CONFIG).read_text(encoding="utf-8")).get("id")
    except (OSError, ValueError, AttributeError):  # `Run.start` reports it
        return None

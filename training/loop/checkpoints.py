"""The states that a run continues from: whole, checked, the last few of them.

A state is one .npz, named after its step and a SHA-256, such as `step-00001500-0f3a….npz`. The hash is of its run, its
step and its bytes, so that neither a renamed file nor one of another run is believed. It appears by a rename when all
of it is on the disk; one that does not fit its name is passed over for the one before.
"""

import hashlib
import json
import os
import pathlib
import re
import uuid

import numpy as np

from keras_vit import UserError
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.run_directory import CONFIG

_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.npz")
_KEPT = 2


def save(folder: pathlib.Path, step: int, progress: dict, arrays: dict[str, np.ndarray]) -> None:
    """Write a state and remove those before the last few.

    Args:
        folder: of all states of a run, in its run directory.
        step: training steps done.
        progress: what is no array, as JSON can hold it.
        arrays: the rest.

    Raises UserError when the disk cannot take it; the states before stay.
    """
    unnamed = folder / f"state.{uuid.uuid4().hex}.tmp.npz"
    try:
        write_npz(unnamed, {"progress": np.frombuffer(json.dumps(progress).encode(), np.uint8), **arrays})
        os.replace(unnamed, folder / f"step-{step:08d}-{_digest(unnamed, step)}.npz")
    except OSError as error:
        before = _states(folder)
        raise UserError(
            f"The state of step {step} could not be written to {folder} ({error.strerror}); "
            + (f"that of step {_step(before[0])} is whole: make room, " if before else "make room, ")
            + "and the same command continues."
        ) from error
    finally:
        unnamed.unlink(missing_ok=True)
    for old in _states(folder)[_KEPT:]:
        old.unlink()


def load_latest(folder: pathlib.Path) -> tuple[int, dict, dict[str, np.ndarray]] | None:
    """(step, progress, arrays) of the newest state that is whole; None when there is none at all.

    Raises UserError when there are states and none is whole.
    """
    states = _states(folder)
    for path in states:
        try:
            if _digest(path, _step(path)) != _NAME.fullmatch(path.name)[2]:
                raise ValueError("its bytes are not those that this run saved at this step")
            arrays = read_npz(path)
            return _step(path), json.loads(arrays.pop("progress").tobytes()), arrays
        except (ValueError, KeyError, OSError) as error:  # UserError is a ValueError
            print(f"Passed over the damaged state {path.name}: {error}.")
    if states:
        raise UserError(
            f"No state in {folder} is whole, so the run cannot go on; remove {folder.parent} to begin anew."
        )
    return None


def _states(folder: pathlib.Path) -> list[pathlib.Path]:
    """All states, the newest first."""
    return sorted((path for path in folder.glob("step-*.npz") if _NAME.fullmatch(path.name)), key=_step, reverse=True)


def _step(path: pathlib.Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def _digest(path: pathlib.Path, step: int) -> str:
    """Of a state's run, step and bytes. `path` lies in the folder of states."""
    digest = hashlib.sha256(f"{_run_id(path.parent)} {step} ".encode())  # hashlib.file_digest needs Python 3.11
    with open(path, "rb") as stream:
        while part := stream.read(2**20):
            digest.update(part)
    return digest.hexdigest()[:16]


def _run_id(folder: pathlib.Path) -> str | None:
    """What the config.json of the run directory calls its run; None for a run of before there were such names."""
    try:
        return json.loads((folder.parent / CONFIG).read_text(encoding="utf-8")).get("id")
    except (OSError, ValueError, AttributeError):  # `Run.start` says what is wrong with it
        return None

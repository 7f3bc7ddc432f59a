"""Trainings that are killed, and what they left."""

import contextlib
from collections.abc import Iterator

import pytest

from training.loop import checkpoints


class Interrupted(Exception):
    """Stands for a kill."""


@contextlib.contextmanager
def killed_after(step: int) -> Iterator[None]:
    """The training inside is killed as soon as its checkpoint of this step is written."""
    save = checkpoints.save

    def save_and_stop(folder, done, progress, arrays):
        save(folder, done, progress, arrays)
        if done == step:
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(checkpoints, "save", save_and_stop)
        yield

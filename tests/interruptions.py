"""Trainings that are killed, and what they left."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from training.loop import checkpoints


class Interrupted(Exception):
    """Stands for a kill."""


@contextlib.contextmanager
def after_checkpoints(act: Callable[[int], None]) -> Iterator[None]:
    """The training inside calls `act` with the step of each checkpoint as soon as it is written."""
    save = checkpoints.save

    def save_and_act(folder, done, progress, arrays):
        save(folder, done, progress, arrays)
        act(done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save", save_and_act)
        yield


@contextlib.contextmanager
def killed_after(step: int) -> Iterator[None]:
    """The training inside is killed as soon as its checkpoint of this step is written."""

    def kill(done: int) -> None:
        if done == step:
            raise Interrupted

    with pytest.raises(Interrupted), after_checkpoints(kill):
        yield

"""Trainings that are killed, and what they left."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from keras_vit.run import CHECKPOINTS, Run
from tests.support import fetched
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


def final_state(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Everything that training changes, at the end; without the clock."""
    return fetched(checkpoints.load_latest(run / CHECKPOINTS)[2])


def assert_ended_alike(run: pathlib.Path, other: pathlib.Path, parts: tuple[str, ...] = ("",)) -> None:
    """Two runs ended in the same bits, and have the same metrics unless only `parts` of the state are compared."""
    here, there = final_state(run), final_state(other)
    assert here.keys() == there.keys()
    for name in here:
        if name.startswith(parts):
            np.testing.assert_array_equal(here[name], there[name], err_msg=name)
    if parts == ("",):
        assert_equal_metrics(Run.at(run), Run.at(other))


def assert_equal_metrics(one: Run, other: Run) -> None:
    timed = {"seconds": 0, "images_per_second": 0}
    assert [record | timed for record in one.metrics()] == [record | timed for record in other.metrics()]

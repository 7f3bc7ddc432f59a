"""The lines of a log file, and the line of a terminal."""

import contextlib
import functools
import types

import pytest
import tqdm

from tests.support import Terminal
from training.loop.callbacks import TrainingProgress


@pytest.fixture(name="clock")
def _clock(monkeypatch) -> types.SimpleNamespace:
    """A clock that passes a number of seconds with every step."""
    clock = types.SimpleNamespace(step=0, seconds=1.0)
    monotonic = types.SimpleNamespace(monotonic=lambda: clock.step * clock.seconds)
    monkeypatch.setattr("training.loop.callbacks.time", monotonic)
    return clock


def logged(clock, epochs: int, steps: int, seconds_per_step: float) -> None:
    """Write the lines of a run."""
    clock.seconds = seconds_per_step
    lines = TrainingProgress(lambda: clock.step, epochs * steps, steps)
    logs = {"loss": 1.23456, "accuracy": 0.98765}
    for epoch in range(epochs):
        for step in range(steps):
            clock.step += 1
            lines.on_train_batch_end(step, logs | {"images_per_second": 1234.5})
        lines.on_test_batch_end(0, {})
        lines.on_epoch_end(epoch, logs | {"val_loss": 0.6})
    lines.close()


def test_an_epoch_has_a_line(clock, capsys):
    logged(clock, 3, 10, 0.1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "Epoch 1/3, step 10 of 30: accuracy 0.9877, loss 1.2346, val_loss 0.6000, 1,234 images/s, 2 s left"
    )
    assert [line.split(",")[0] for line in lines] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]


def test_a_long_epoch_has_a_line_every_half_minute(clock, capsys):
    logged(clock, 1, 1000, 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1000 // 30 + 1
    assert lines[1] == "Step 60 of 1,000: loss 1.2346, 16 min left"


@pytest.mark.parametrize("seconds", [0.1, 3.0, 40.0, 70.0])
def test_an_hour_is_below_ten_kilobytes_however_long_an_epoch_is(seconds, clock, capsys):
    logged(clock, int(3600 / (10 * seconds)), 10, seconds)
    assert len(capsys.readouterr().out) < 10_000


def test_a_long_evaluation_is_not_silent(clock, capsys):
    lines = TrainingProgress(lambda: 10, 20, 10)
    lines.on_train_batch_end(9, {"loss": 0.5, "images_per_second": 3.0})
    for batch in range(40):
        clock.step += 1
        lines.on_test_batch_end(batch, {})
    assert capsys.readouterr().out == "Step 10 of 20: loss 0.5000, evaluating batch 30, ? left\n"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_terminal_has_one_line_that_fits_it(columns, clock, monkeypatch):
    # On a fast machine most steps would not be shown otherwise.
    monkeypatch.setattr("tqdm.tqdm", functools.partial(tqdm.tqdm, mininterval=0))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    with contextlib.redirect_stdout(Terminal()) as terminal:
        logged(clock, 2, 600, 0.5)
    text = terminal.getvalue()
    assert text.count("\n") == 1  # at the end
    shown = [part.rstrip() for part in text.strip().split("\r")]
    assert max(map(len, shown)) < columns
    for words in ("2/2", "1200/1200", "loss 1.2", "acc", "0.98", "1234"):
        assert any(words in part.replace(",", "") for part in shown), (words, shown[-1])
    assert all("left" in part for part in shown[2:])

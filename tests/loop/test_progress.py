"""The lines of a log file, and the line of a terminal."""

import keras
import pytest

from tests.support import on_a_terminal
from training.loop.callbacks import TrainingProgress


class Clock:
    """Passes a number of seconds with every step."""

    def __init__(self, seconds_per_step: float):
        self.step, self._seconds = 0, seconds_per_step

    def __call__(self) -> float:
        return self.step * self._seconds


def logged(
    epochs: int, steps: int, seconds_per_step: float, capsys, *, steps_per_epoch: int | None = None
) -> list[str]:
    clock = Clock(seconds_per_step)
    lines = TrainingProgress(lambda: clock.step, epochs * steps, steps_per_epoch or steps, clock)
    callbacks = keras.callbacks.CallbackList([lines], epochs=epochs, steps=steps, verbose=0)
    logs = {"loss": 0.51234, "accuracy": 0.9, "images_per_second": 1234.5}
    for epoch in range(epochs):
        callbacks.on_epoch_begin(epoch)
        for step in range(steps):
            clock.step += 1
            callbacks.on_train_batch_end(step, logs)
        callbacks.on_epoch_end(epoch, {"loss": 0.51234, "accuracy": 0.9, "val_loss": 0.6})
    return capsys.readouterr().out.splitlines()


def test_an_epoch_has_a_line(capsys):
    lines = logged(3, 10, 0.1, capsys)
    assert lines[0] == (
        "Epoch 1/3, step 10 of 30: accuracy 0.9000, loss 0.5123, val_loss 0.6000, 1,234 images/s, 2 s left"
    )
    assert [line.split(",")[0] for line in lines] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]


def test_a_long_epoch_has_a_line_every_half_minute(capsys):
    lines = logged(1, 1000, 1.0, capsys)
    assert len(lines) == 1000 // 30 + 1
    assert lines[1] == "Step 60 of 1,000: loss 0.5123, 16 min left"


@pytest.mark.parametrize("seconds", [0.1, 3.0, 40.0, 70.0])
def test_an_hour_is_below_ten_kilobytes_however_long_an_epoch_is(seconds, capsys):
    lines = logged(int(3600 / (10 * seconds)), 10, seconds, capsys)
    assert sum(len(line) + 1 for line in lines) < 10_000


def test_a_long_evaluation_is_not_silent(capsys):
    clock = Clock(1.0)
    lines = TrainingProgress(lambda: 10, 20, 10, clock)
    lines.on_train_batch_end(9, {"loss": 0.5, "images_per_second": 3.0})
    for batch in range(40):
        clock.step += 1
        lines.on_test_batch_end(batch, {})
    assert capsys.readouterr().out == "Step 10 of 20: loss 0.5000, evaluating batch 30, ? left\n"


# Two epochs of 600 steps, on a clock of its own.
_ON_A_TERMINAL = """
from training.loop.callbacks import TrainingProgress
step = 0
shown = TrainingProgress(lambda: step, 1200, 600, lambda: step * 0.5)
for epoch in range(2):
    for batch in range(600):
        step += 1
        shown.on_train_batch_end(batch, {"loss": 1.23456, "accuracy": 0.98765, "images_per_second": 1234.5})
    shown.on_test_batch_end(0, {})
    shown.on_epoch_end(epoch, {"loss": 1.2, "accuracy": 0.9, "val_loss": 1.3, "val_accuracy": 0.8})
shown.close()
"""


@pytest.mark.parametrize(
    "columns", [60, pytest.param(80, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow)]
)
def test_a_terminal_has_one_line_that_fits_it(columns):
    # On a fast machine most steps would not be shown otherwise.
    text = on_a_terminal(_ON_A_TERMINAL, columns, TQDM_MININTERVAL="0").replace("\r\n", "\n")
    assert text.count("\n") == 1  # at the end
    shown = [part.rstrip() for part in text.strip().split("\r")]
    assert max(map(len, shown)) < columns
    for words in ("2/2", "1200/1200", "loss 1.2", "acc", "0.98", "1234"):
        assert any(words in part.replace(",", "") for part in shown), (words, shown[-1])
    assert all("left" in part for part in shown[2:])

"""The lines of a log file."""

import keras
import pytest

from training.loop.callbacks import ProgressLines


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
    lines = ProgressLines(lambda: clock.step, epochs * steps, steps_per_epoch or steps, clock)
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


def test_epochs_are_those_of_the_data_where_evaluations_are_rarer(capsys):
    lines = logged(2, 25, 0.1, capsys, steps_per_epoch=10)
    assert [line.partition(":")[0] for line in lines] == ["Epoch 3/5, step 25 of 50", "Epoch 5/5, step 50 of 50"]


def test_a_long_epoch_has_a_line_every_minute(capsys):
    lines = logged(1, 1000, 1.0, capsys)
    assert len(lines) == 1000 // 60 + 1
    assert lines[0].startswith("Epoch 1/1, step 60 of 1,000: accuracy 0.9000, loss 0.5123")
    assert lines[0].endswith("16 min left")


@pytest.mark.parametrize("seconds", [0.1, 3.0, 40.0, 70.0])
def test_an_hour_is_below_ten_kilobytes_however_long_an_epoch_is(seconds, capsys):
    lines = logged(int(3600 / (10 * seconds)), 10, seconds, capsys)
    assert sum(len(line) + 1 for line in lines) < 10_000

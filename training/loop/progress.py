"""Show the progress of a run: on a terminal one line that is rewritten in place, elsewhere lines of a log.

A log has a line for each of the first epochs, and then one every five minutes; a short one if there was none for half a
minute. An hour of any epochs is below 10 kB, without control characters.
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable

import keras
import tqdm

from keras_vit.cli.progress import SILENT_SECONDS, duration

# So many epochs have a line each; later ones only if this many seconds have passed since the one before.
_EPOCHS_WITH_LINES, _EPOCH_SECONDS = 20, 300.0
# Columns that a bar beside the numbers takes at least.
_BAR_COLUMNS = 8


@dataclasses.dataclass
class TrainingProgress:
    """How far a run is, and how long it will still take."""

    step: Callable[[], int]
    """Returns the number of steps done."""
    num_steps: int
    """Of the run."""
    steps_per_epoch: int
    """Of the training data; for Keras, an epoch ends at each evaluation."""
    clock: Callable[[], float] = time.monotonic
    """Returns seconds."""

    def __post_init__(self) -> None:
        self._start, self._first_step = self.clock(), self.step()

    @property
    def epoch(self) -> str:
        """As 2/3."""
        epochs = (-(-steps // self.steps_per_epoch) for steps in (self.step(), self.num_steps))
        return "/".join(map(str, epochs))

    @property
    def left(self) -> str:
        """The time that is left by the speed of this process, as 12 min."""
        done, left = self.step() - self._first_step, self.num_steps - self.step()
        return duration((self.clock() - self._start) / done * left) if done else "?"


def display(progress: TrainingProgress) -> "ProgressBar | ProgressLines":
    """Return the callback for the standard output of this process."""
    return ProgressBar(progress) if sys.stdout.isatty() else ProgressLines(progress)


class ProgressBar(keras.callbacks.Callback):
    """Rewrites one line of a terminal of 60 or more columns."""

    def __init__(self, progress: TrainingProgress):
        super().__init__()
        self._progress, self._logs, self._rate = progress, dict[str, float](), 0.0
        self._bar = tqdm.tqdm(
            total=progress.num_steps, initial=progress.step(), file=sys.stdout, dynamic_ncols=True, bar_format="{desc}"
        )
        self._bar.set_description_str("compiling the first step")

    def on_train_batch_end(self, batch, logs=None):
        # The evaluation stays until the next one.
        self._logs |= {name: value for name, value in logs.items() if name != "images_per_second"}
        self._rate = logs["images_per_second"]
        self._show()

    def on_test_batch_end(self, batch, logs=None):
        self._show(f"evaluating {batch + 1}")

    def on_epoch_end(self, epoch, logs=None):
        self._logs = {name: value for name, value in logs.items() if isinstance(value, float)}
        self._show()

    def close(self) -> None:
        """End the line."""
        self._bar.close()

    def _show(self, doing: str = "") -> None:
        text = self._text(columns := shutil.get_terminal_size().columns - 1, doing)
        self._bar.bar_format = "{desc} |{bar}|" if len(text) + _BAR_COLUMNS <= columns else "{desc}"
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(self._progress.step() - self._bar.n)

    def _text(self, columns: int, doing: str) -> str:
        """Return the longest form of the numbers that fits, at worst without their names."""
        progress, logs = self._progress, self._logs
        names = [name for name in ("loss", "accuracy", "binary_accuracy") if name in logs]
        epoch, step, steps, left = progress.epoch, progress.step(), progress.num_steps, f"{progress.left} left"
        short = ", ".join(f"{'loss' if name == 'loss' else 'acc'} {logs[name]:.3f}" for name in names)
        long = f"epoch {epoch}, step {step:,}/{steps:,}, " + ", ".join(f"{name} {logs[name]:.4f}" for name in names)
        evaluated = [f"val_{name}" for name in names[1:] if f"val_{name}" in logs]
        evaluation, doing = "".join(f", {name} {logs[name]:.4f}" for name in evaluated), f", {doing}" * bool(doing)
        rate, tight = f"{self._rate:,.0f} images/s, {left}{doing}", f"{epoch}, {step}/{steps}, {short}"
        tight = f"{tight}, {self._rate:.0f}/s, {left}"
        middle = f"epoch {epoch}, step {step}/{steps}, {short}, {rate}"
        forms = (f"{long}{evaluation}, {rate}", f"{long}, {rate}", middle, tight + doing, tight)
        return next((form for form in forms if len(form) <= columns), tight[:columns])


class ProgressLines(keras.callbacks.Callback):
    """Prints lines of a log."""

    def __init__(self, progress: TrainingProgress):
        super().__init__()
        self._progress, self._clock = progress, progress.clock
        self._epochs_printed, self._rate, self._loss = 0, 0.0, ""
        self._last = self._last_epoch = self._clock()

    def on_train_batch_end(self, batch, logs=None):
        self._rate, self._loss = logs["images_per_second"], f"loss {logs['loss']:.4f}"
        self._print_if_silent(self._loss)

    def on_test_batch_end(self, batch, logs=None):
        self._print_if_silent(f"{self._loss}, evaluating batch {batch + 1}")

    def on_epoch_end(self, epoch, logs=None):
        is_last = self._progress.step() >= self._progress.num_steps
        late = self._clock() - self._last_epoch >= _EPOCH_SECONDS
        if is_last or late or self._epochs_printed < _EPOCHS_WITH_LINES:
            self._epochs_printed, self._last_epoch = self._epochs_printed + 1, self._clock()
            metrics = {name: value for name, value in sorted(logs.items()) if isinstance(value, float)}
            measured = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self._print(f"Epoch {self._progress.epoch}, step", f"{measured}, {self._rate:,.0f} images/s")
        else:
            self._print_if_silent(self._loss)

    def close(self) -> None:
        """As that of `ProgressBar`; a log needs no end."""

    def _print_if_silent(self, text: str) -> None:
        if self._clock() - self._last >= SILENT_SECONDS:
            self._print("Step", text)

    def _print(self, place: str, text: str) -> None:
        progress, self._last = self._progress, self._clock()
        print(f"{place} {progress.step():,} of {progress.num_steps:,}: {text}, {progress.left} left", flush=True)

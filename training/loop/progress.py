"""Show the progress of a run: on a terminal one line that is rewritten in place, elsewhere lines of a log.

A log has a line for each of the first epochs, and then one every five minutes; a short one if there was none for half a
minute. An hour of any epochs is below 10 kB, without control characters.
"""

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


class TrainingProgress(keras.callbacks.Callback):
    """Shows how far a run is, and how long it will still take, on the standard output.

    Args:
        step: returns the number of steps done.
        num_steps: of the run.
        steps_per_epoch: of the training data; for Keras, an epoch ends at each evaluation.
        clock: returns seconds.
    """

    def __init__(
        self,
        step: Callable[[], int],
        num_steps: int,
        steps_per_epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._step, self._num_steps, self._steps_per_epoch, self._clock = step, num_steps, steps_per_epoch, clock
        self._start, self._first_step = clock(), step()
        self._logs, self._rate = dict[str, float](), 0.0
        self._epochs_printed, self._last, self._last_epoch = 0, self._start, self._start
        self._bar = None
        if sys.stdout.isatty():
            self._bar = tqdm.tqdm(
                total=num_steps, initial=step(), file=sys.stdout, dynamic_ncols=True, bar_format="{desc}"
            )
            self._bar.set_description_str("compiling the first step")

    def on_train_batch_end(self, batch, logs=None):
        # The evaluation stays until the next one.
        self._logs |= {name: value for name, value in logs.items() if name != "images_per_second"}
        self._rate = logs["images_per_second"]
        self._show()

    def on_test_batch_end(self, batch, logs=None):
        self._show(f", evaluating batch {batch + 1}")

    def on_epoch_end(self, epoch, logs=None):
        self._logs = {name: value for name, value in logs.items() if isinstance(value, float)}
        late = self._clock() - self._last_epoch >= _EPOCH_SECONDS or self._step() >= self._num_steps
        if self._bar is None and (late or self._epochs_printed < _EPOCHS_WITH_LINES):
            self._epochs_printed, self._last_epoch = self._epochs_printed + 1, self._clock()
            measured = ", ".join(f"{name} {value:.4f}" for name, value in sorted(self._logs.items()))
            self._print(f"Epoch {self._epoch}, step", f"{measured}, {self._rate:,.0f} images/s")
        else:
            self._show()

    def close(self) -> None:
        """End the line of a terminal."""
        if self._bar is not None:
            self._bar.close()

    @property
    def _epoch(self) -> str:
        return "/".join(str(-(-steps // self._steps_per_epoch)) for steps in (self._step(), self._num_steps))

    @property
    def _left(self) -> str:
        """The time that is left by the speed of this process."""
        done, left = self._step() - self._first_step, self._num_steps - self._step()
        return f"{duration((self._clock() - self._start) / done * left) if done else '?'} left"

    def _print(self, place: str, text: str) -> None:
        self._last = self._clock()
        print(f"{place} {self._step():,} of {self._num_steps:,}: {text}, {self._left}", flush=True)

    def _show(self, doing: str = "") -> None:
        if self._bar is None:
            if self._clock() - self._last >= SILENT_SECONDS:
                self._print("Step", f"loss {self._logs['loss']:.4f}{doing}")
            return
        text = self._line(columns := shutil.get_terminal_size().columns - 1, doing)
        self._bar.bar_format = "{desc} |{bar}|" if len(text) + _BAR_COLUMNS <= columns else "{desc}"
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(self._step() - self._bar.n)

    def _line(self, columns: int, doing: str) -> str:
        """Return the longest form of the numbers that fits a terminal, at worst without their names."""
        logs, step, steps = self._logs, self._step(), self._num_steps
        names = [name for name in ("loss", "accuracy", "binary_accuracy") if name in logs]
        short = ", ".join(f"{'loss' if name == 'loss' else 'acc'} {logs[name]:.3f}" for name in names)
        long = ", ".join([f"epoch {self._epoch}, step {step:,}/{steps:,}", *(f"{n} {logs[n]:.4f}" for n in names)])
        evaluated = [f"val_{name}" for name in names[1:] if f"val_{name}" in logs]
        rate = f"{self._rate:,.0f} images/s, {self._left}{doing}"
        tight = f"{self._epoch}, {step}/{steps}, {short}, {self._rate:.0f}/s, {self._left}"
        forms = (
            ", ".join([long, *(f"{name} {logs[name]:.4f}" for name in evaluated), rate]),
            f"{long}, {rate}",
            f"epoch {self._epoch}, step {step}/{steps}, {short}, {rate}",
            tight + doing,
            tight,
        )
        return next((form for form in forms if len(form) <= columns), tight[:columns])

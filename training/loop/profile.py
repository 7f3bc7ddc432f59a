"""A callback that profiles some steps of a run, for TensorBoard."""

import pathlib
from collections.abc import Callable

import keras
import tensorflow as tf


class ProfileSteps(keras.callbacks.Callback):
    """Writes a trace of the steps from `first` to `last`, counted from 1 over the run, to `profile/` of its directory.

    Step 1 includes the compilation. With several steps per execution, the trace has every execution that contains one
    of these steps. `step` returns the steps done.
    """

    def __init__(self, folder: pathlib.Path, first: int, last: int, step: Callable[[], int], per_execution: int):
        super().__init__()
        self._folder, self._first, self._last = folder, first, last
        self._step, self._per_execution, self._running = step, per_execution, False

    def on_train_batch_begin(self, batch, logs=None):
        done = self._step()
        if not self._running and done < self._last and done + self._per_execution >= self._first:
            tf.profiler.experimental.start(str(self._folder))
            self._running = True

    def on_train_batch_end(self, batch, logs=None):
        if self._step() >= self._last:
            self.stop()

    def stop(self) -> None:
        """Write the trace if the profiler is running, such as at the end of a shorter run."""
        if self._running:
            self._running = False
            tf.profiler.experimental.stop()

"""The callback that saves and restores checkpoints, logs the metrics of each epoch, and handles interruptions.

A checkpoint is saved between two steps or two epochs and contains the metrics of every finished epoch. metrics.jsonl is
rewritten from it, so it has no gaps and no duplicates after a restart.
"""

import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.remote import remove_folder
from training.loop import checkpoints
from training.loop.run import Run
from training.loop.trainer import Trainer

# Seconds between two lines of a log file. So many epochs have a line each; later ones only after this time, so that an
# hour of short epochs is below 10 kB.
_LINE_SECONDS, _EPOCHS_WITH_LINES = 60.0, 20
# What Ctrl-C prints during training, and after it.
_STOPPING = b"\nStopping after this step, with a checkpoint saved; Ctrl-C again stops at once.\n"
_WRITING = b"\nTraining is complete; writing model.keras. Ctrl-C again stops at once.\n"


class TrainingInterrupted(Exception):
    """Training was interrupted by a signal; its checkpoint is saved."""


class ForwardCallbacks(keras.callbacks.Callback):
    """Forwards every event of `fit` to other callbacks, except the begin and end of training.

    A run may take several calls of `fit`, but its callbacks see one training.
    """

    def __init__(self, callbacks: keras.callbacks.CallbackList):
        super().__init__()
        self._callbacks = callbacks

    def on_epoch_begin(self, epoch, logs=None):
        self._callbacks.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._callbacks.on_epoch_end(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self._callbacks.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self._callbacks.on_train_batch_end(batch, logs)

    def on_test_begin(self, logs=None):
        self._callbacks.on_test_begin(logs)

    def on_test_end(self, logs=None):
        self._callbacks.on_test_end(logs)

    def on_test_batch_begin(self, batch, logs=None):
        self._callbacks.on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch, logs=None):
        self._callbacks.on_test_batch_end(batch, logs)


class TrainingCheckpoint(keras.callbacks.Callback):
    """Restores the latest checkpoint when it is created; then saves checkpoints and logs, and stops on a signal."""

    def __init__(
        self, trainer: Trainer, run: Run, batch_size: int, epoch_steps: int, every: int | None, *, writes: bool
    ):
        """Raises UserError if the latest checkpoint does not fit the trainer.

        Args:
            trainer: compiled.
            run: to restore from and, if `writes`, to write to.
            batch_size: images per step on all replicas, for the images per second.
            epoch_steps: steps of an epoch of the training data; for Keras, an epoch ends at each evaluation.
            every: steps between two checkpoints; None saves only at the end of each epoch.
            writes: whether this process writes the files: of several workers, the first.
        """
        super().__init__()
        self._trainer, self._run, self._batch_size, self._every, self._writes = trainer, run, batch_size, every, writes
        self._epoch_steps = epoch_steps
        self.step = 0
        self.records: list[dict] = []
        self._seconds = 0.0  # spent on the current epoch by earlier processes
        self._sums: list = [0.0] * len(trainer.sums)
        self._stop_requested = self._is_complete = False
        self._restore()
        if writes:
            run.write_metrics(self.records)
            self._tensorboard = _TensorBoard(run)
            for number, record in enumerate(self.records, start=1):
                self._tensorboard.write(number, record)

    def _restore(self) -> None:
        checkpoint = checkpoints.load_latest(self._run.checkpoints_folder)
        if checkpoint is None:
            return
        self.step, progress, arrays = checkpoint
        variables = self._trainer.state
        if {name: array.shape for name, array in arrays.items()} != {n: tuple(v.shape) for n, v in variables.items()}:
            raise UserError(
                f"The checkpoint of step {self.step} in {self._run.checkpoints_folder} was saved by another version of "
                f"this code, so the run cannot continue; remove {self._run.path} to start again."
            )
        for name, variable in variables.items():
            variable.assign(arrays[name])
        self._sums = [np.array(total) for total in self._trainer.sums]
        self.records, self._seconds = progress["records"], progress["seconds"]
        for record in self.records:  # earlier versions counted evaluations
            record["epoch"] = self._epoch(record["step"])
        if self._writes:
            print(f"Continuing after step {self.step:,}, in epoch {self.step // self._epoch_steps + 1}.")

    @contextlib.contextmanager
    def handle_stop_signals(self) -> Iterator[None]:
        """On SIGTERM or Ctrl-C finish the step, save and raise TrainingInterrupted; a second Ctrl-C stops at once.

        After `on_complete` there is no step to stop after, and what is left takes seconds, so the first signal changes
        nothing. In another thread than the main one, where Python has no handlers, signals stay the caller's.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number, _) -> None:
            self._stop_requested = True  # only this: the signal may interrupt TensorFlow anywhere
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                # Not by print, which the signal may have interrupted.
                os.write(2, _WRITING if self._is_complete else _STOPPING)

        previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, previous_handler in previous.items():
                signal.signal(number, previous_handler)

    def on_complete(self) -> None:
        """Called when all calls of `fit` are done and the trained model is about to be saved."""
        self._is_complete = True
        if self._stop_requested:  # since the last step
            print("Training was complete when it was asked to stop; writing model.keras.")

    def on_epoch_begin(self, epoch, logs=None):
        self._first_step, self._start = self.step, time.monotonic()
        for total, value in zip(self._trainer.sums, self._sums, strict=True):  # which Keras has just reset
            total.assign(value)

    def on_train_batch_begin(self, batch, logs=None):
        if self._stop_requested:
            self._trainer.request_stop()

    def on_train_batch_end(self, batch, logs=None):
        previous_step = self.step
        self.step = min(self._first_step + batch + 1, self._first_step + self.params["steps"])
        if not np.isfinite(logs["loss"]):
            raise self._diverged()
        done = (self.step - self._first_step) * self._batch_size
        self._rate = logs["images_per_second"] = round(done / (time.monotonic() - self._start), 1)
        if self.step == self._first_step + self.params["steps"]:
            return  # on_epoch_end saves
        stop = self._should_stop()
        if stop or (self._every and previous_step // self._every != self.step // self._every):
            self._save(self._seconds + time.monotonic() - self._start)
        if stop:
            raise TrainingInterrupted

    def on_epoch_end(self, epoch, logs=None):
        seconds = self._seconds + time.monotonic() - self._start
        names = [f"{prefix}{name}" for prefix in ("", "val_") for name in self._trainer.log_names]
        record = {"epoch": self._epoch(self.step), "step": self.step}
        record |= {name: float(logs[name]) for name in names}
        record["learning_rate"] = float(np.array(self._trainer.optimizer.learning_rate))
        record["images_per_second"] = self._rate  # without the evaluation
        record["seconds"] = round(seconds, 3)
        self.records.append(record)
        self._trainer.reset_metrics()
        self._seconds, self._sums = 0.0, [0.0] * len(self._sums)
        self._save(0.0)
        if self._writes:
            self._run.write_metrics(self.records)
            self._tensorboard.write(len(self.records), record)
        if self._should_stop():
            raise TrainingInterrupted

    def _epoch(self, step: int) -> float:
        """Passes over the training data, a fraction where evaluations are more frequent."""
        epochs = step / self._epoch_steps
        return int(epochs) if epochs.is_integer() else round(epochs, 3)

    def _should_stop(self) -> bool:
        """Whether any worker received a signal; the same answer in every worker."""
        requested = self._trainer.any_stop_requested()
        return self._stop_requested if requested is None else requested

    def _save(self, seconds: float) -> None:
        if not self._writes:
            return
        arrays = {name: np.array(variable) for name, variable in self._trainer.state.items()}
        if not all(np.isfinite(array).all() for array in arrays.values() if array.dtype.kind == "f"):
            raise self._diverged()
        checkpoints.save(self._run.checkpoints_folder, self.step, {"records": self.records, "seconds": seconds}, arrays)

    def _diverged(self) -> UserError:
        return UserError(
            f"The loss or a weight is not finite at step {self.step}, so training stopped; the workdir keeps the last "
            "checkpoint: try a lower --learning-rate in a new workdir."
        )


class ProgressLines(keras.callbacks.Callback):
    """Prints a line at the end of an epoch, and within an epoch after each minute, where a terminal has a bar.

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
        self._epochs_printed, self._rate = 0, 0.0
        self._last, self._first_step = clock(), step()
        self._start = self._last

    def on_train_batch_end(self, batch, logs=None):
        self._rate = logs["images_per_second"]
        if self._clock() - self._last >= _LINE_SECONDS:
            self._print(logs)

    def on_epoch_end(self, epoch, logs=None):
        is_last = self._step() >= self._num_steps
        if is_last or self._epochs_printed < _EPOCHS_WITH_LINES or self._clock() - self._last >= _LINE_SECONDS:
            self._epochs_printed += 1
            self._print(logs)

    def _print(self, logs) -> None:
        self._last, step = self._clock(), self._step()
        metrics = {name: value for name, value in logs.items() if name != "images_per_second"}
        measured = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        left = (self._last - self._start) / max(step - self._first_step, 1) * (self._num_steps - step)
        epoch, epochs = (-(-steps // self._steps_per_epoch) for steps in (step, self._num_steps))
        print(
            f"Epoch {epoch}/{epochs}, step {step:,} of {self._num_steps:,}: {measured}, "
            f"{self._rate:,.0f} images/s, {_duration(left)} left",
            flush=True,
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class ProfileSteps(keras.callbacks.Callback):
    """Writes a trace of the steps from `first` to `last`, counted from 1 over the run, to `profile/` of its directory.

    With several steps per execution, the trace has every execution that contains one of these steps. A process that
    resumes the run after them writes none.

    Args:
        folder: of the trace.
        first: step to begin with; step 1 includes the compilation.
        last: step to end with.
        step: returns the steps done.
        per_execution: steps in an execution.
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


class _TensorBoard:
    """Writes the metrics as scalars, training and evaluation in one chart. Each process rewrites the files."""

    def __init__(self, run: Run):
        folder = run.path / "tensorboard"
        remove_folder(folder)
        self._writers = {name: tf.summary.create_file_writer(str(folder / name)) for name in ("train", "validation")}

    def write(self, number: int, record: dict) -> None:
        values = {name: value for name, value in record.items() if name not in ("epoch", "step")}
        for writer, is_validation in (("validation", True), ("train", False)):
            with self._writers[writer].as_default(step=number):
                for name, value in values.items():
                    if name.startswith("val_") == is_validation:
                        tf.summary.scalar(f"epoch_{name.removeprefix('val_')}", value)
            self._writers[writer].flush()

"""The callback that keeps a run: records of epochs, states to continue from, stopping in good order.

A state lies between two steps or between two epochs, with the record of every finished epoch in it, so that
metrics.jsonl is always that of one state: without gaps, and nothing twice.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError
from training.loop import checkpoints
from training.loop.run import Run
from training.loop.trainer import Trainer


class TrainingInterrupted(Exception):
    """The run was asked to end; its state is saved."""


class ForwardCallbacks(keras.callbacks.Callback):
    """Tells callbacks all that happens but the begin and the end of a `fit`, which is one part of a training."""

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
    """Restores the newest state when it is made; then saves, records and stops while Keras fits."""

    def __init__(self, trainer: Trainer, run: Run, batch_size: int, every: int | None, *, writes: bool):
        """Raises UserError when the newest state is not one of this trainer.

        Args:
            trainer: compiled.
            run: to restore from and, where `writes`, to write to.
            batch_size: images of a step on all replicas, for their rate.
            every: steps between two states within an epoch; None keeps to the ends of epochs.
            writes: whether this process is the chief.
        """
        super().__init__()
        self._trainer, self._run, self._batch_size, self._every, self._writes = trainer, run, batch_size, every, writes
        self.step = 0
        self.records: list[dict] = []
        self._seconds = 0.0  # of the epoch, before this process
        self._sums = [0.0] * len(trainer.sums)
        self._stop_requested = False
        self._restore()
        if writes:
            run.write_metrics(self.records)
            self._tensorboard = _TensorBoard(run)
            for record in self.records:
                self._tensorboard.write(record)

    def _restore(self) -> None:
        found = checkpoints.load_latest(self._run.checkpoints_folder)
        if found is None:
            return
        self.step, progress, arrays = found
        variables = self._trainer.state
        if {name: array.shape for name, array in arrays.items()} != {n: tuple(v.shape) for n, v in variables.items()}:
            raise UserError(
                f"The state of step {self.step} in {self._run.checkpoints_folder} is of another version of "
                f"this code, so the run cannot go on; remove {self._run.path} to begin anew."
            )
        for name, variable in variables.items():
            variable.assign(arrays[name])
        self._sums = [np.array(total) for total in self._trainer.sums]
        self.records, self._seconds = progress["records"], progress["seconds"]
        if self._writes:
            print(f"Continuing after step {self.step:,}, in epoch {len(self.records) + 1}.")

    @contextlib.contextmanager
    def handle_stop_signals(self) -> Iterator[None]:
        """Within it SIGTERM or Ctrl-C lets the step end, saves and raises Stopped; a second Ctrl-C interrupts."""

        def note(number, _) -> None:
            self._stop_requested = True  # no more: TensorFlow may be in the middle of anything
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                # Not printed, for Python may be in the middle of that.
                os.write(2, b"\nStopping after this step, with its state saved; Ctrl-C again stops at once.\n")

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def on_epoch_begin(self, epoch, logs=None):
        self._first_step, self._start = self.step, time.monotonic()
        for total, value in zip(self._trainer.sums, self._sums, strict=True):  # Keras has just reset them
            total.assign(value)

    def on_train_batch_begin(self, batch, logs=None):
        if self._stop_requested:
            self._trainer.request_stop()

    def on_train_batch_end(self, batch, logs=None):
        before, self.step = self.step, min(self._first_step + batch + 1, self._first_step + self.params["steps"])
        if not np.isfinite(logs["loss"]):
            raise self._diverged()
        done = (self.step - self._first_step) * self._batch_size
        self._rate = logs["images_per_second"] = round(done / (time.monotonic() - self._start), 1)
        if self.step == self._first_step + self.params["steps"]:
            return  # the epoch's end saves
        stop = self._to_stop()
        if stop or (self._every and before // self._every != self.step // self._every):
            self._save(self._seconds + time.monotonic() - self._start)
        if stop:
            raise TrainingInterrupted

    def on_epoch_end(self, epoch, logs=None):
        seconds = self._seconds + time.monotonic() - self._start
        own = [f"{prefix}{name}" for prefix in ("", "val_") for name in self._trainer.measured]
        record = {"epoch": epoch + 1, "step": self.step, **{name: float(logs[name]) for name in own}}
        record["learning_rate"] = float(np.array(self._trainer.optimizer.learning_rate))
        record["images_per_second"] = self._rate  # of training alone
        record["seconds"] = round(seconds, 3)
        self.records.append(record)
        self._trainer.reset_metrics()
        self._seconds, self._sums = 0.0, [0.0] * len(self._sums)
        self._save(0.0)
        if self._writes:
            self._run.write_metrics(self.records)
            self._tensorboard.write(record)
        if self._to_stop():
            raise TrainingInterrupted

    def _to_stop(self) -> bool:
        """The same in every worker: whether one of them was asked to."""
        seen = self._trainer.any_stop_requested()
        return self._stop_requested if seen is None else seen

    def _save(self, seconds: float) -> None:
        if not self._writes:
            return
        arrays = {name: np.array(variable) for name, variable in self._trainer.state.items()}
        if not all(np.isfinite(array).all() for array in arrays.values() if array.dtype.kind == "f"):
            raise self._diverged()
        checkpoints.save(self._run.checkpoints_folder, self.step, {"records": self.records, "seconds": seconds}, arrays)

    def _diverged(self) -> UserError:
        return UserError(
            f"The loss or a weight was no number any more at step {self.step}, so training stopped; the last good "
            "state and the epochs before are kept in the workdir: try a lower --learning-rate in another one."
        )


class _TensorBoard:
    """The records as scalars, training and evaluation in one chart; written anew by each process."""

    def __init__(self, run: Run):
        folder = run.path / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writers = {name: tf.summary.create_file_writer(str(folder / name)) for name in ("train", "validation")}

    def write(self, record: dict) -> None:
        values = {name: value for name, value in record.items() if name not in ("epoch", "step")}
        for writer, ours in (("validation", True), ("train", False)):
            with self._writers[writer].as_default(step=record["epoch"]):
                for name, value in values.items():
                    if name.startswith("val_") == ours:
                        tf.summary.scalar(f"epoch_{name.removeprefix('val_')}", value)
            self._writers[writer].flush()

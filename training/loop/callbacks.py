"""Write during training: progress, sample images, metrics, curves, figures of `keras-vit inspect`, a trace.

On SIGTERM and Ctrl-C, training finishes its step, saves a checkpoint, and exits with a code that says how to go on.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import keras
import matplotlib.figure
import tensorflow as tf
import tqdm

from keras_vit import Preprocessing, cli
from keras_vit.cli.progress import SILENT_SECONDS, duration
from keras_vit.files.atomic import atomic_write
from keras_vit.files.remote import remove_folder
from keras_vit.images.files import SAMPLES
from keras_vit.inspection import inspect, read_images, write
from keras_vit.run import CALIBRATION, Run
from keras_vit.scores import Scoring
from training.data.sources import DataSet
from training.data.write import save_samples
from training.loop.devices.strategies import CONTINUE_LATER

# Training images saved for the exports, which calibrate quantization ranges on them.
_CALIBRATION_IMAGES = 512

# So many epochs have a line each; later ones only if this many seconds have passed since the one before.
_EPOCHS_WITH_LINES, _EPOCH_SECONDS = 20, 300.0
# Columns that a bar beside the numbers takes at least.
_BAR_COLUMNS = 8


class InspectEpochs(keras.callbacks.Callback):
    """Inspects the model that `make_model` returns after every `every` epochs, on the first sample images of the run.

    Writes `inspection/epoch_0005/` in the run directory, and the same figures to `tensorboard/inspection`, those of
    earlier epochs again when a run is resumed. Training does not change, bit for bit. The attention distance is a mean
    over `count` images at most, of which the maps of `shown` are shown.
    """

    def __init__(self, make_model: Callable[[], keras.Model], run: Run, every: int, count: int = 64, shown: int = 4):
        super().__init__()
        self._make_model, self._run, self._every, self._shown = make_model, run, every, shown
        self._images = read_images(run.path / SAMPLES, count, run.labels)
        self._writer = tf.summary.create_file_writer(str(run.path / "tensorboard" / "inspection"))
        for folder in sorted((run.path / "inspection").glob("epoch_*")):
            self._show(folder)

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self._every:
            return
        result = inspect(
            self._make_model(),
            self._images,
            checkpoint=f"{self._run.path}, epoch {epoch + 1}",
            labels=self._run.labels,
            shown=self._shown,
            scoring=Scoring(is_multi_label=self._run.is_multi_label),
        )
        folder = self._run.path / "inspection" / f"epoch_{epoch + 1:04d}"
        write(result, folder)
        self._show(folder)

    def _show(self, folder: pathlib.Path) -> None:
        with self._writer.as_default(step=int(folder.name.removeprefix("epoch_"))):
            for file in sorted(folder.glob("*.png")):
                tf.summary.image(file.stem, [tf.io.decode_png(tf.io.read_file(str(file)))])
        self._writer.flush()


class ProfileSteps(keras.callbacks.Callback):
    """Writes a trace of the steps from `first` to `last`, counted from 1 over the run, to a folder.

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


class MetricsLog:
    """Writes the metrics of every evaluation. Each process rewrites all files, so they have no gaps or duplicates."""

    def __init__(self, run: Run, records: list[dict]):
        """Write the records of earlier processes."""
        self._run = run
        folder = run.path / "tensorboard"
        remove_folder(folder)
        # Two writers, which put training and evaluation in one chart.
        self._writers = {name: tf.summary.create_file_writer(str(folder / name)) for name in ("train", "validation")}
        self.write(records, first=0)

    def write(self, records: list[dict], first: int = -1) -> None:
        """Write all records; to TensorBoard those from `first` on, behind those that are written."""
        self._run.write_metrics(records)
        for number, record in [*enumerate(records, start=1)][first:]:
            for name, value in record.items():
                part = "validation" if name.startswith("val_") else "train"
                if name not in ("epoch", "step"):
                    with self._writers[part].as_default(step=number):
                        tf.summary.scalar(f"epoch_{name.removeprefix('val_')}", value)
        for writer in self._writers.values():
            writer.flush()


class TrainingProgress(keras.callbacks.Callback):
    """Shows how far a run is, and how long it will still take: on a terminal in one line, elsewhere in lines of a log.

    A log has a line for each of the first epochs, and then one every five minutes; a short one if there was none for
    half a minute. An hour of any epochs is below 10 kB, without control characters.

    Args:
        step: returns the number of steps done.
        num_steps: of the run.
        steps_per_epoch: of the training data; for Keras, an epoch ends at each evaluation.
    """

    def __init__(self, step: Callable[[], int], num_steps: int, steps_per_epoch: int):
        super().__init__()
        self._step, self._num_steps, self._steps_per_epoch = step, num_steps, steps_per_epoch
        self._start, self._first_step = time.monotonic(), step()
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
        late = time.monotonic() - self._last_epoch >= _EPOCH_SECONDS or self._step() >= self._num_steps
        if self._bar is None and (late or self._epochs_printed < _EPOCHS_WITH_LINES):
            self._epochs_printed, self._last_epoch = self._epochs_printed + 1, time.monotonic()
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
        return f"{duration((time.monotonic() - self._start) / done * left) if done else '?'} left"

    def _print(self, place: str, text: str) -> None:
        self._last = time.monotonic()
        print(f"{place} {self._step():,} of {self._num_steps:,}: {text}, {self._left}", flush=True)

    def _show(self, doing: str = "") -> None:
        if self._bar is None:
            if time.monotonic() - self._last >= SILENT_SECONDS:
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


def save_images(run: Run, source: DataSet, preprocessing: Preprocessing) -> None:
    """Save what a run keeps of its images: before the model, which marks the run as finished."""
    if source.train.digests is not None:
        run.save_training_images(source.train.digests)
    save_samples(source.evaluation, preprocessing, run.path / SAMPLES)
    save_samples(source.train, preprocessing, run.path / CALIBRATION, most=_CALIBRATION_IMAGES)


def write_curves(run: Run) -> None:
    """Plot the loss and the accuracy over the epochs to curves.png."""
    records = run.metrics()
    epochs = [record["epoch"] for record in records]
    names = [name for name in ("loss", "accuracy", "binary_accuracy") if name in records[-1]]
    figure = matplotlib.figure.Figure(figsize=(4.5 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        axes.plot(epochs, [record[name] for record in records], color="tab:blue", label="training")
        axes.plot(epochs, [record[f"val_{name}"] for record in records], color="tab:orange", label="evaluation")
        axes.set(xlabel="epoch", title=name)
        axes.grid(alpha=0.3)
        axes.legend()
    with atomic_write(run.path / "curves.png") as temporary:
        figure.savefig(temporary, dpi=120)


# What Ctrl-C prints during training, and after it.
_STOPPING = b"\nStopping after this step, with a checkpoint saved; Ctrl-C again stops at once.\n"
_WRITING = b"\nTraining is complete; writing model.keras. Ctrl-C again stops at once.\n"


class TrainingInterrupted(Exception):
    """Training was interrupted by a signal; its checkpoint is saved."""


class StopSignals:
    """Whether SIGTERM or Ctrl-C asked this process to stop, while its signals are `handled`."""

    received = _training_complete = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Note signals instead of stopping; a second Ctrl-C stops at once.

        In another thread than the main one, where Python has no handlers, signals stay the caller's.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _) -> None:
        self.received = True  # only this: the signal may interrupt TensorFlow anywhere
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(2, _WRITING if self._training_complete else _STOPPING)  # print may be what was interrupted

    def training_complete(self) -> None:
        """Say that no step is left to stop after; what is left takes seconds, and the first signal changes nothing."""
        self._training_complete = True
        if self.received:
            print("Training was complete when it was asked to stop; writing model.keras.")


@contextlib.contextmanager
def report_interruption() -> Iterator[None]:
    """Exit with CONTINUE_LATER and one sentence when training was interrupted."""
    try:
        yield
    except TrainingInterrupted:
        everywhere = " on every worker" if "TF_CONFIG" in os.environ else ""
        command = cli.command_line()
        print(
            f"Training was interrupted and its checkpoint is saved; the same command{everywhere} continues: {command}",
            file=sys.stderr,
        )
        sys.exit(CONTINUE_LATER)

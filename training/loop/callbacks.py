"""Write during training: the metrics, the figures of `keras-vit inspect`, and a trace for TensorBoard's profiler."""

import pathlib
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_vit.files.remote import remove_folder
from keras_vit.inspection import inspect, read_images, write
from keras_vit.run import SAMPLES, Run
from keras_vit.scores import Scoring


class InspectEpochs(keras.callbacks.Callback):
    """Inspects the model that `make_model` returns after every `every` epochs, on the first sample images of the run.

    Writes figures, arrays and an HTML report to `inspection/epoch_0005/` in the run directory, and the same figures to
    `tensorboard/inspection`, those of earlier epochs again when a run is resumed. Training does not change, bit for
    bit. The attention distance is a mean over `count` images at most, of which the maps of `shown` are shown.
    """

    def __init__(self, make_model: Callable[[], keras.Model], run: Run, every: int, count: int = 64, shown: int = 4):
        super().__init__()
        self._make_model, self._run, self._every, self._shown = make_model, run, every, shown
        self._pictures = read_images(run.path / SAMPLES, count, run.labels)
        self._writer = tf.summary.create_file_writer(str(run.path / "tensorboard" / "inspection"))
        for folder in sorted((run.path / "inspection").glob("epoch_*")):
            self._show(folder)

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self._every:
            return
        result = inspect(
            self._make_model(),
            self._pictures,
            checkpoint=f"{self._run.path}, epoch {epoch + 1}",
            labels=self._run.labels,
            shown=self._shown,
            scoring=Scoring(is_multi_label=self._run.is_multi_label),
        )
        folder = self._run.path / "inspection" / f"epoch_{epoch + 1:04d}"
        write(result, folder)
        self._show(folder)

    def _show(self, folder: pathlib.Path) -> None:
        """Write the figures of an epoch's folder as TensorBoard images."""
        with self._writer.as_default(step=int(folder.name.removeprefix("epoch_"))):
            for file in sorted(folder.glob("*.png")):
                tf.summary.image(file.stem, [tf.io.decode_png(tf.io.read_file(str(file)))])
        self._writer.flush()


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


class MetricsLog:
    """Writes the metrics of every evaluation. Each process rewrites all files, so they have no gaps or duplicates."""

    def __init__(self, run: Run, records: list[dict]):
        """Write the records of earlier processes."""
        self._run = run
        folder = run.path / "tensorboard"
        remove_folder(folder)
        # Two writers, which put training and evaluation in one chart.
        self._writers = {name: tf.summary.create_file_writer(str(folder / name)) for name in ("train", "validation")}
        run.write_metrics(records)
        for number, record in enumerate(records, start=1):
            self._write_scalars(number, record)

    def write(self, records: list[dict]) -> None:
        """Write the last of the records, behind those that are written."""
        self._run.write_metrics(records)
        self._write_scalars(len(records), records[-1])

    def _write_scalars(self, number: int, record: dict) -> None:
        values = {name: value for name, value in record.items() if name not in ("epoch", "step")}
        for writer, is_validation in (("validation", True), ("train", False)):
            with self._writers[writer].as_default(step=number):
                for name, value in values.items():
                    if name.startswith("val_") == is_validation:
                        tf.summary.scalar(f"epoch_{name.removeprefix('val_')}", value)
            self._writers[writer].flush()

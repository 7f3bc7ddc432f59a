"""A callback that writes the figures of `keras-vit inspect` during training."""

import pathlib
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_vit import run_directory
from keras_vit.inspection import inspect, read_images, write
from keras_vit.runs import Run
from keras_vit.scores import Scoring


class InspectEpochs(keras.callbacks.Callback):
    """Inspects the model that `make_model` returns after every `every` epochs, on the first sample images of the run.

    Writes figures, arrays and an HTML report to `inspection/epoch_0005/` in the run directory, and the same figures to
    `tensorboard/inspection`, those of earlier epochs again when a run is resumed. Training does not change, bit for
    bit. The attention distance is a mean over `count` images at most, of which the maps of `shown` are shown.
    """

    def __init__(
        self, make_model: Callable[[], keras.Model], run: pathlib.Path, every: int, count: int = 64, shown: int = 4
    ):
        super().__init__()
        self._make_model, self._run, self._every, self._shown = make_model, run, every, shown
        self._labels = run_directory.load_labels(run)
        self._pictures = read_images(run / run_directory.SAMPLES, count, self._labels)
        self._writer = tf.summary.create_file_writer(str(run / "tensorboard" / "inspection"))
        for folder in sorted((run / "inspection").glob("epoch_*")):
            self._show(folder)

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self._every:
            return
        result = inspect(
            self._make_model(),
            self._pictures,
            checkpoint=f"{self._run}, epoch {epoch + 1}",
            labels=self._labels,
            shown=self._shown,
            scoring=Scoring(is_multi_label=Run(str(self._run)).is_multi_label),
        )
        folder = self._run / "inspection" / f"epoch_{epoch + 1:04d}"
        write(result, folder)
        self._show(folder)

    def _show(self, folder: pathlib.Path) -> None:
        """Write the figures of an epoch's folder as TensorBoard images."""
        with self._writer.as_default(step=int(folder.name.removeprefix("epoch_"))):
            for file in sorted(folder.glob("*.png")):
                tf.summary.image(file.stem, [tf.io.decode_png(tf.io.read_file(str(file)))])
        self._writer.flush()

"""The figures of `keras_vit.inspection` while a model learns: in TensorBoard and in the run directory."""

import pathlib
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_vit import UserError, run_directory
from keras_vit.inspection import inspect, read_images, write


class InspectEpochs(keras.callbacks.Callback):
    """Looks inside the model after every `every` epochs, with the first of the run's sample images.

    Writes `inspection/epoch_0005/`, figures, arrays and page, into the run directory, and the same figures as images
    of `tensorboard/inspection`, where a slider goes through the epochs; a process that continues a run writes those of
    the epochs before anew. Training goes on in the same bits.

    Args:
        make_model: gives the model as it is by then, such as the moving average of its weights.
        run: the run directory, with samples.npz and labels.txt in it.
        every: epochs from one look to the next.
        count: images at most that the attention distance is averaged over.
        shown: images whose maps are shown.
    """

    def __init__(
        self, make_model: Callable[[], keras.Model], run: pathlib.Path, every: int, count: int = 64, shown: int = 4
    ):
        super().__init__()
        if every < 1:
            raise UserError(f"The figures can be drawn after every epoch or more, not after every {every}.")
        self._make_model, self._run, self._every, self._shown = make_model, run, every, shown
        self._labels = run_directory.load_labels(run)
        self._pictures = read_images(run / run_directory.SAMPLES, count, self._labels)
        self._writer = tf.summary.create_file_writer(str(run / "tensorboard" / "inspection"))
        for folder in sorted((run / "inspection").glob("epoch_*")):
            self._show(folder)

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self._every:
            return
        findings = inspect(
            self._make_model(),
            self._pictures,
            checkpoint=f"{self._run}, epoch {epoch + 1}",
            labels=self._labels,
            shown=self._shown,
        )
        folder = self._run / "inspection" / f"epoch_{epoch + 1:04d}"
        write(findings, folder)
        self._show(folder)

    def _show(self, folder: pathlib.Path) -> None:
        """The figures in the folder of an epoch, as images for TensorBoard."""
        with self._writer.as_default(step=int(folder.name.removeprefix("epoch_"))):
            for file in sorted(folder.glob("*.png")):
                tf.summary.image(file.stem, [tf.io.decode_png(tf.io.read_file(str(file)))])
        self._writer.flush()

"""The metrics of a run in its directory: metrics.jsonl, metrics.csv, and the charts of TensorBoard."""

import tensorflow as tf

from keras_vit.files.remote import remove_folder
from training.loop.run import RunDirectory


class MetricsLog:
    """Writes the metrics of every evaluation. Each process rewrites all files, so they have no gaps or duplicates."""

    def __init__(self, run: RunDirectory, records: list[dict]):
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

"""Exports a model of another task than classification as a SavedModel, and verifies it.

Its signatures are those of `detection.py`, `segmentation.py` and `embeddings.py`.
"""

import pathlib

import tensorflow as tf

from export.detection import Detection
from export.files import directory_bytes
from export.saved_model import detection, embeddings, segmentation
from export.saved_model.export import put_as_next_version
from export.segmentation import Segmentation
from export.tasks import Measures, Task
from keras_vit.files.atomic import staged


def export_task(task: Task, output: pathlib.Path) -> tuple[pathlib.Path, Measures]:
    """Write the next version to `output`. Returns its path and its differences from the Keras model.

    The SavedModel is loaded again and run on all samples, as tensors and as files. Raises ParityError, and writes
    nothing, if it differs by more than rounding.
    """
    served = (
        detection if isinstance(task, Detection) else segmentation if isinstance(task, Segmentation) else embeddings
    )
    expected = task.reference()
    with staged(output) as stage:
        version = stage / "version"
        served.write(task, version)
        signatures = tf.saved_model.load(version).signatures
        found = expected.outputs_of(lambda images: signatures[served.TENSOR](image=tf.constant(images)))
        measures = task.measure("SavedModel", expected.outputs, found, exact=True)
        measures |= served.measure_files(task, expected, signatures)
        files = {"SavedModel": {**measures, "bytes": directory_bytes(version)}}
        task.report(version, "SavedModel", files, of_pixels=False)
        return put_as_next_version(version, output), measures

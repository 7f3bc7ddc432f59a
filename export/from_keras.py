"""Exports of a model in memory, as `keras-vit saved-model` and `keras-vit tflite` write and verify them."""

import os
import pathlib
from collections.abc import Sequence

import keras

from export.options import Dtype, SavedModelOptions, SourceOptions, Target, TFLiteFormat, TFLiteOptions
from export.run import export_folder
from export.saved_model.export import export_saved_model
from export.source import read_calibration
from export.tasks import Classification, open_task
from export.tflite.export import export_tflite
from keras_vit.errors import UserError
from keras_vit.run import Run


def to_saved_model(
    model: keras.Model,
    directory: str | os.PathLike,
    *,
    images: str | os.PathLike | None = None,
    dtype: Dtype = "float32",
    threshold: float | None = None,
) -> pathlib.Path:
    """Write a model as a SavedModel for TF Serving, load it again, and compare it with the model.

    Args:
        model: built by keras_vit, also with a head of your own. `keras_vit.classes_of` must know its classes;
            `keras_vit.set_classes` names them.
        directory: of the versions; the export adds the next version.
        images: folder of images to verify the export on, best in folders named after the classes. Default: 16 random
            images.
        dtype: of weights and arithmetic.
        threshold: 0 to 1; adds the output "accepted", whether the probability of the most likely class reaches it.

    Returns:
        The directory of the version, with its report in report.md.

    Raises UserError for a model that cannot be exported, and ParityError, writing nothing, for an export that differs.
    """
    run, source = _opened(model, images)
    options = SavedModelOptions(source, os.fspath(directory), dtype=dtype, threshold=threshold)
    export_folder(options.output)
    return export_saved_model(open_task(run, source), options)[0]


def to_tflite(
    model: keras.Model,
    directory: str | os.PathLike,
    formats: Sequence[TFLiteFormat] = ("float32", "int8-dynamic"),
    *,
    images: str | os.PathLike | None = None,
    calibration: str | os.PathLike | None = None,
    target: Target = "cpu",
) -> dict[str, pathlib.Path]:
    """Write a model as TFLite files, run each, and compare it with the model.

    Args:
        model: as for `to_saved_model`.
        directory: new, or with exports of the same model.
        formats: of the files, see `keras-vit tflite --help`.
        images: as for `to_saved_model`.
        calibration: folder of representative images, which int4-weights and int8 need.
        target: processor of the phone, "cpu", "gpu" or "npu".

    Returns:
        The path of each file by its format.

    Raises UserError for a model that cannot be exported, and ParityError, writing nothing, for an export that differs.
    """
    run, source = _opened(model, images)
    folder = None if calibration is None else os.fspath(calibration)
    options = TFLiteOptions(source, os.fspath(directory), tuple(formats), target=target, calibration=folder)
    export_folder(options.output)
    task = open_task(run, source)
    samples = read_calibration(run, options, task.exported.labels) if isinstance(task, Classification) else None
    written = export_tflite(task, options, samples)
    return {name: path for name, (path, _) in written.items()}


def _opened(model: keras.Model, images: str | os.PathLike | None) -> tuple[Run, SourceOptions]:
    backend = keras.backend.backend()
    if backend != "tensorflow":  # whose tracing fails in the middle of the model
        raise UserError(
            f"Exports need the TensorFlow backend of Keras, but it is {backend}; save the model, and export the file "
            "with KERAS_BACKEND=tensorflow."
        )
    run = Run.of_model(model)
    return run, SourceOptions(run.name, images=None if images is None else os.fspath(images))

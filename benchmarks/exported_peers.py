"""The peers that are files of this project: SavedModel, ONNX and TFLite, exported and opened again."""

import contextlib
import functools
import multiprocessing
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.case import NUM_CLASSES, Call, Case, random_images
from export.fastest.runtime_process import RUNTIMES

_LABELS = [str(number) for number in range(NUM_CLASSES)]


@contextlib.contextmanager
def exported(export: Callable, case: Case) -> Iterator[pathlib.Path]:
    """Yield the path that `export(case, folder)` writes in a process of its own.

    The memory of an exporter, gigabytes for ONNX, is thus free while the peers are timed.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        process = multiprocessing.get_context("spawn").Process(target=export, args=(case, folder))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"The export ended with {process.exitcode}.")
        yield next(folder.iterdir())


def export_saved_model(case: Case, folder: pathlib.Path) -> None:
    """Write the SavedModel with random weights."""
    import tensorflow as tf

    from export.saved_model.signatures import signatures, write

    model, names = _inference_model(case, case.precision, for_tensorflow=True), tf.constant(_LABELS)
    write(folder / "model", model, signatures(model, names), _LABELS, names)


def export_onnx(case: Case, folder: pathlib.Path) -> None:
    """Write the ONNX file of a model with random weights."""
    from export.onnx.export import write_file

    write_file(_inference_model(case, for_onnx=True), folder / "model.onnx", _LABELS, about={})


def _export_tflite(case: Case, folder: pathlib.Path) -> None:
    from export.tflite.convert import to_tflite

    (folder / "model.tflite").write_bytes(to_tflite(_inference_model(case)))


def _export_int8(case: Case, folder: pathlib.Path) -> None:
    from export.tflite.quantize import quantize

    _export_tflite(case, folder)
    file = folder / "model.tflite"
    file.write_bytes(quantize(file, "int8-dynamic"))


def _inference_model(case: Case, dtype: str = "float32", **options):
    import keras_vit
    from export.inference_model import inference_model

    model = keras_vit.build(case.model, image_size=case.size, num_classes=NUM_CLASSES)
    rng = np.random.default_rng(0)
    for weight in model.weights:
        if len(weight.shape) == 1 or not np.any(weight):
            # Otherwise graph optimization would remove multiplications by one and additions of zero.
            weight.assign_add(rng.normal(0.0, 0.02, weight.shape))
    return inference_model(model, dtype, **options)


def _opened(runtime: str, export: Callable, case: Case) -> Call:
    images = random_images(case)
    with exported(export, case) as path:
        run = RUNTIMES[runtime](str(path), case.threads, images.shape)
    return lambda: run(images)


# By name, what `keras-vit fastest` runs, and which file.
EXPORTED = {
    f"keras_vit_{name}": functools.partial(_opened, runtime, export)
    for name, runtime, export in (
        ("saved_model", "saved-model", export_saved_model),
        ("onnx", "onnx", export_onnx),
        ("openvino", "openvino", export_onnx),
        ("tflite", "tflite", _export_tflite),
        ("tflite_int8", "tflite", _export_int8),
    )
}

"""The peers that are files of this project: SavedModel, ONNX and TFLite, exported and opened again."""

import contextlib
import multiprocessing
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.case import NUM_CLASSES, Call, Case, random_images, set_tensorflow_threads


def keras_vit_saved_model(case: Case) -> Call:
    """The SavedModel for TF Serving, loaded again."""
    import tensorflow as tf

    set_tensorflow_threads(case)
    with exported(export_saved_model, case) as directory:
        loaded = tf.saved_model.load(str(directory / "model"))
    images, forward = tf.constant(random_images(case)), loaded.signatures["image_tensor"]
    return lambda: (loaded, forward(image=images)["logits"].numpy())


def keras_vit_onnx(case: Case) -> Call:
    """The ONNX file in ONNX Runtime."""
    from export.onnx import export as onnx_export

    with exported(export_file, case) as directory:
        run = onnx_export.open_file(directory / onnx_export.FILE, case.threads)
    images = random_images(case)
    return lambda: run(images)["logits"]


def keras_vit_openvino(case: Case) -> Call:
    """The ONNX file in OpenVINO."""
    from export.fastest.runtime_process import openvino

    images = random_images(case)
    with exported(export_file, case) as directory:
        run = openvino(str(directory / "model.onnx"), case.threads, images.shape)
    return lambda: run(images)


def keras_vit_tflite(case: Case) -> Call:
    """The float32 TFLite file in LiteRT, one image at a time."""
    return _tflite(case, None)


def keras_vit_tflite_int8(case: Case) -> Call:
    """The TFLite file with dynamic range quantization: 8-bit weights, activations quantized at run time."""
    return _tflite(case, "int8-dynamic")


def _tflite(case: Case, kind: str | None) -> Call:
    from ai_edge_litert.interpreter import Interpreter

    with exported(_export_tflite, case, kind) as directory:
        content = (directory / "model.tflite").read_bytes()
    interpreter = Interpreter(model_content=content, num_threads=case.threads)
    interpreter.allocate_tensors()
    index, images = interpreter.get_input_details()[0]["index"], random_images(case)

    def forward() -> None:
        for image in images:
            interpreter.set_tensor(index, image[None])
            interpreter.invoke()

    return forward


@contextlib.contextmanager
def exported(export: Callable, *arguments) -> Iterator[pathlib.Path]:
    """A temporary directory with the output of `export(*arguments, directory)`, which runs in its own process.

    The memory of an exporter, gigabytes for ONNX, is thus free while the peers are timed.
    """
    with tempfile.TemporaryDirectory() as directory:
        process = multiprocessing.get_context("spawn").Process(target=export, args=(*arguments, directory))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"The export ended with {process.exitcode}.")
        yield pathlib.Path(directory)


def export_saved_model(case: Case, directory: str) -> None:
    """Write the SavedModel with random weights to DIRECTORY/model."""
    import tensorflow as tf

    from export.saved_model.signatures import signatures, write

    labels = [str(number) for number in range(NUM_CLASSES)]
    model, names = _inference_model(case, case.precision, for_tensorflow=True), tf.constant(labels)
    write(pathlib.Path(directory) / "model", model, signatures(model, names), labels, names)


def export_file(case: Case, directory: str) -> None:
    """Write the ONNX file of a model with random weights."""
    from export.onnx import export as onnx_export

    labels, file = [str(number) for number in range(NUM_CLASSES)], pathlib.Path(directory) / onnx_export.FILE
    onnx_export.write_file(_inference_model(case, for_onnx=True), file, labels, about={})


def _export_tflite(case: Case, kind: str | None, directory: str) -> None:
    from export.tflite.convert import to_tflite
    from export.tflite.quantize import quantize

    file = pathlib.Path(directory) / "model.tflite"
    file.write_bytes(to_tflite(_inference_model(case)))
    if kind is not None:
        file.write_bytes(quantize(file, kind))


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

"""Exports a model of another task than classification as TFLite files of a fixed size, and verifies each.

Input: image (1, H, W, C) float32 in the value range of the model. Outputs: those of the task, by the names of the
signature; see `export.detection`, `export.segmentation` and `export.embeddings`.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from export.options import TFLiteFormat
from export.tasks import Measures, Outputs, Task
from export.tflite import quantize, tflite_file
from export.tflite.export import to_tflite
from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name


def export_task(
    task: Task, output: pathlib.Path, formats: Sequence[TFLiteFormat]
) -> dict[TFLiteFormat, tuple[pathlib.Path, Measures]]:
    """Write NOUN-FORMAT.tflite for each format, such as detector-float32.tflite.

    Returns its path and its differences from the Keras model. Raises ParityError, and writes nothing, if float32
    differs by more than rounding, or another format by more than its task allows.
    """
    quantize.refuse_calibrated(formats)
    expected, exported, origin = task.reference(), task.exported, task.exported.origin
    written: dict[TFLiteFormat, tuple[pathlib.Path, Measures]] = {}
    files = dict[str, Measures]()
    with staged(output) as stage:
        float_file = stage / "float32.tflite"
        float_file.write_bytes(to_tflite(exported.model, all_tokens=task.all_tokens, finish=task.network))
        for kind in formats:
            content = float_file.read_bytes() if kind == "float32" else quantize.quantize(float_file, kind)
            about = f"{task.noun} {short_name(origin.name)}, {kind}; weights: {origin.weights}"
            file = stage / f"{task.noun}-{kind}.tflite"
            file.write_bytes(
                tflite_file.with_metadata(
                    content,
                    exported.model.name,
                    about,
                    exported.labels,
                    exported.preprocessing,
                    False,
                    origin.license_text,
                )
            )
            runner = tflite_file.interpreter(file, 1).get_signature_runner("serving_default")
            found = expected.outputs_of(functools.partial(_run, runner), batch=False)
            measures = task.measure(f"{kind} TFLite file", expected.outputs, found, exact=kind == "float32")
            files[kind] = {**measures, "bytes": file.stat().st_size}
            written[kind] = (output / file.name, measures)
        float_file.unlink()
        task.report(stage, "TFLite", files, of_pixels=True)
    return written


def _run(runner: Callable[..., Outputs], image: np.ndarray) -> Outputs:
    return runner(image=image)

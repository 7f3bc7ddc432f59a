"""Exports a model of another task than classification as TFLite files of a fixed size, and verifies each.

Input: image (1, H, W, C) float32 in the value range of the model. Outputs: those of the task, by the names of the
signature; see `export.detection`, `export.segmentation` and `export.embeddings`. With --target gpu or npu they are all
float32.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from export.options import TFLiteFormat, TFLiteOptions
from export.tasks import Measures, Outputs, Task
from export.tflite import gpu_check, quantize, tflite_file
from export.tflite.convert import to_tflite
from export.tflite.delegate_rules import require_rules
from export.tflite.gpu_check import GpuCheck
from keras_vit.errors import ParityError
from keras_vit.files.atomic import staged
from keras_vit.files.tables import short_name
from keras_vit.run_directory import output_folder


def export_task(task: Task, options: TFLiteOptions) -> dict[TFLiteFormat, tuple[pathlib.Path, Measures]]:
    """Write NOUN-FORMAT.tflite for each format, such as detector-float32.tflite, or detector-float32-gpu.tflite.

    Returns its path and its differences from the Keras model. Raises ParityError, and writes nothing, if float32
    differs by more than rounding, or another format by more than its task allows; and UserError for options of classes.
    """
    quantize.refuse_calibrated(options.formats)
    options.refuse_those_of_classes(task.noun)
    output, target, expected = output_folder(options.output), options.target, task.reference()
    model = task.exported.model
    form: dict[str, Any] = {"all_tokens": task.all_tokens, "finish": task.network}
    images = np.concatenate([*expected.images(batch=False)][: gpu_check.NUM_IMAGES])
    check = None
    if target == "gpu":
        check = GpuCheck.of(options, model, images, functools.partial(_accepted, task), **form)
    written: dict[TFLiteFormat, tuple[pathlib.Path, Measures]] = {}
    files = dict[str, Measures]()
    with staged(output) as stage:
        float_file = stage / "float32.tflite"
        float_file.write_bytes(to_tflite(model, for_delegates=None if target == "cpu" else images, **form))
        for kind in options.formats:
            content = float_file.read_bytes() if kind == "float32" else quantize.quantize(float_file, kind)
            if target != "cpu":
                require_rules(f"{kind} TFLite file", content, target)
            checked = {} if check is None else check.facts(kind, content)
            file = stage / f"{task.noun}-{kind}{'' if target == 'cpu' else f'-{target}'}.tflite"
            described = _with_metadata(task, kind, content)
            if target == "cpu":
                file.write_bytes(described)
            else:
                gpu_check.write_with_golden_numbers(file, described, images)
            runner = tflite_file.interpreter(file, 1).get_signature_runner("serving_default")
            found = expected.outputs_of(functools.partial(_run, runner), batch=False)
            measures = task.measure(f"{kind} TFLite file", expected.outputs, found, exact=kind == "float32")
            files[kind] = {**measures, **checked, "bytes": file.stat().st_size}
            written[kind] = (output / file.name, measures)
        float_file.unlink()
        if check is not None:
            gpu_check.write_page(stage, [file.name for file, _ in written.values()])
        task.report(stage, "TFLite", files, of_pixels=True, notes=gpu_check.sentences(files))
    return written


def _with_metadata(task: Task, kind: TFLiteFormat, content: bytes) -> bytes:
    exported, origin = task.exported, task.exported.origin
    about = f"{task.noun} {short_name(origin.name)}, {kind}; weights: {origin.weights}"
    return tflite_file.with_metadata(
        content,
        exported.model.name,
        about,
        exported.labels,
        exported.preprocessing,
        False,
        origin.license_text,
    )


def _accepted(task: Task, found: Outputs, expected: Outputs) -> bool:
    """Whether outputs (n, ...) of the accelerator are those of the interpreter, as the task compares them."""
    try:
        task.measure("file in the accelerator", _rows(expected), _rows(found), exact=True)
    except ParityError:
        return False
    return True


def _rows(outputs: Outputs) -> list[Outputs]:
    """Outputs (n, ...) by name -> those of each image."""
    return [dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)]


def _run(runner: Callable[..., Outputs], image: np.ndarray) -> Outputs:
    return runner(image=image)

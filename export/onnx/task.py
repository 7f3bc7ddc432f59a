"""Exports a model of another task than classification as ONNX and OpenVINO files, and verifies them.

Input: image (B, H, W, C) float32 in the value range of the model. Outputs: those of the task, by name; see
`export.detection`, `export.segmentation` and `export.embeddings`.
"""

import pathlib

import numpy as np

from export.inference_model import inference_model
from export.onnx import runtimes, write
from export.onnx.runtimes import FILES
from export.options import OnnxOptions
from export.tasks import Measures, Task
from keras_vit import UserError, run_directory
from keras_vit.files.atomic import staged


def export_task(task: Task, options: OnnxOptions) -> list[tuple[pathlib.Path, Measures]]:
    """Write the files of each format. Returns the path of the file to load and its differences from the Keras model.

    Raises ParityError, and writes nothing, if the outputs differ by more than rounding.
    """
    if options.web:
        raise UserError("The page of --web classifies pictures, but the model does not; leave --web out.")
    expected, exported, output = task.reference(), task.exported, run_directory.output_folder(options.output)
    about = {"weights": exported.origin.weights, "license": exported.origin.license_text}
    network = task.network(inference_model(exported.model, for_onnx=True, all_tokens=task.all_tokens))
    files, written = dict[str, Measures](), []
    with staged(output) as stage:
        for kind in options.formats:
            write.check_size(kind, network)
            write.write_onnx(network, kind, stage, exported.labels, about)
            file = stage / FILES[kind][0]
            runners = {name: runtimes.open_file(file, kind, output=name) for name in network.output}

            def run(images: np.ndarray, runners=runners) -> dict[str, np.ndarray]:
                return {name: runner(images) for name, runner in runners.items()}

            measures = task.measure(f"{kind} file", expected.outputs, expected.outputs_of(run), exact=True)
            files[kind] = {**measures, "bytes": sum((stage / name).stat().st_size for name in FILES[kind])}
            written.append((output / file.name, measures))
        task.report(stage, "ONNX", files, of_pixels=True)
    return written

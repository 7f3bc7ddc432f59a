"""Exports a model as TFLite files for mobile devices, and verifies each file against the Keras model.

    keras-vit tflite --run runs/demo --output phone --formats float32 int8-dynamic

Input: image (1, H, W, C) float32 in the value range of the model, or uint8 pixels with --uint8-input. Output: logits
(1, K). The batch is fixed to 1, so that the device computes no shapes. `quantize.py` describes the formats. Each file
stores its labels and its normalization as TFLite Metadata.
"""

import pathlib
from collections.abc import Sequence

from export.options import PROCESSORS, TFLiteOptions
from keras_vit import cli
from keras_vit.cli import parser


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    options = parser.parse(TFLiteOptions, arguments, prog="keras-vit tflite", about=__doc__)

    from export.run import check_calibration, export_folder, open_run

    run = open_run(options.source)
    check_calibration(options, run)
    output = export_folder(options.output)
    cli.require_tensorflow()

    from export.source import open_model
    from export.task_of_run import task_of_run
    from export.tflite.calibration import read_calibration
    from export.tflite.export import export_tflite, summary
    from export.tflite.task import export_task

    source = options.source
    if (task := task_of_run(run, source, options.embeddings)) is not None:
        for path, measures in export_task(task, options).values():
            print(f"{path}: {task.sentence(measures)}; {PROCESSORS[options.target]}.")
        _print_gpu_check(output)
        kind = [] if options.embeddings is None else ["--embeddings", options.embeddings]
        cli.print_next([("saved-model", *source.arguments(), *kind, "--output", "served")])
        return
    exported = open_model(run, options.source)
    written = export_tflite(exported, options, read_calibration(run, options, exported.labels))
    print(summary(written, options.target))
    _print_gpu_check(output)
    artifacts = [str(path) for path, _ in written.values()] if run.data_options else []
    evaluations = [
        ("evaluate", "--run", file, *run.data_options, "--output", f"{file.removesuffix('.tflite')}-report")
        for file in artifacts[:2]
    ]
    cli.print_next([*evaluations, ("saved-model", *options.source.arguments(), "--output", "served")])


def _print_gpu_check(output: pathlib.Path) -> None:
    """Print what the report of an export says of LiteRT's accelerator; nothing for other targets."""
    from keras_vit.files.documents import read_json

    for note in read_json(output / "report.json")["notes"]:
        if "GPU accelerator" in note:
            print(note)


if __name__ == "__main__":
    cli.run(main)

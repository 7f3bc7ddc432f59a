"""Exports a model as ONNX and OpenVINO files, and verifies them against the Keras model.

    keras-vit onnx --run runs/demo --output portable --formats onnx openvino

Writes model.onnx, or model.xml with model.bin, with the exporters of Keras. Input: image (B, H, W, C) float32 in the
value range of the model, with any batch size. Output: logits (B, K). All arithmetic is float32. Needs the packages of
requirements-onnx.txt. With --web also a page that classifies pictures in the browser.
"""

from collections.abc import Sequence

from export.options import OnnxOptions
from keras_vit import cli
from keras_vit.cli import parser


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    options = parser.parse(OnnxOptions, arguments, prog="keras-vit onnx", about=__doc__)

    from export.run import export_folder, open_run

    run = open_run(options.source)
    export_folder(options.output)
    cli.require_tensorflow()

    from export.onnx import runtimes
    from export.onnx.export import export_onnx, summary
    from export.onnx.task import export_task
    from export.source import open_model
    from export.task_of_run import task_of_run

    runtimes.require_packages(options.formats)  # before a large model is loaded
    if (task := task_of_run(run, options.source, options.embeddings)) is not None:
        for path, measures in export_task(task, options):
            print(f"{path}: {task.sentence(measures)}.")
        kind = [] if options.embeddings is None else ["--embeddings", options.embeddings]
        cli.print_next([("tflite", *options.source.arguments(), *kind, "--output", "phone")])
        return
    written = export_onnx(open_model(run, options.source), options)
    print(summary(written))
    cli.print_next([("tflite", *options.source.arguments(), "--output", "phone")])


if __name__ == "__main__":
    cli.run(main)

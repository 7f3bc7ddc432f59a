"""Exports a model as an ONNX file, and verifies it against the Keras model.

    keras-vit onnx --run runs/demo --output portable

Writes model.onnx with the exporter of Keras; ONNX Runtime and OpenVINO read it. Input: image (B, H, W, C) float32 in
the value range of the model, with any batch size. Output: logits (B, K). All arithmetic is float32. Needs the packages
of requirements-onnx.txt. With --web also a page that classifies images in the browser.
"""

from collections.abc import Sequence

from export.options import OnnxOptions
from keras_vit import cli
from keras_vit.cli import parser


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    options = parser.parse(OnnxOptions, arguments, prog="keras-vit onnx", about=__doc__)

    from export.run import open_for_export

    run = open_for_export(options)

    from export.onnx.export import export_onnx, require_packages, summary
    from export.tasks import open_task

    require_packages()  # before a large model is loaded
    task = open_task(run, options.source, options.embeddings)
    print(summary(task, *export_onnx(task, options)))
    embeddings = [] if options.embeddings is None else ["--embeddings", options.embeddings]
    cli.print_next([("tflite", *options.source.arguments(), *embeddings, "--output", "phone")])


if __name__ == "__main__":
    cli.run(main)

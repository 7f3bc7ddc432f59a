"""Exports a model as ONNX and OpenVINO files, and verifies them against the Keras model.

    python -m export.onnx --run runs/demo --output portable --formats onnx openvino

Writes model.onnx, or model.xml with model.bin, with the exporters of Keras. Input: image (B, H, W, C) float32 in the
value range of the model, with any batch size. Output: logits (B, K). All arithmetic is float32. Needs the packages of
requirements-onnx.txt. With --web also a page that classifies pictures in the browser.
"""

from collections.abc import Sequence

from export.options import OnnxOptions, check_source
from keras_vit import cli, parser
from keras_vit.files.remote import to_path


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    options = parser.parse(OnnxOptions, arguments, prog="python -m export.onnx")
    check_source(options.source, options.output)
    cli.require_tensorflow()

    from export.onnx import runtimes
    from export.onnx.export import export_onnx, summary
    from export.source import open_source

    runtimes.require_packages(options.formats)  # before a large model is loaded
    source = open_source(**vars(options.source))
    written = export_onnx(
        source.model,
        source.labels,
        source.samples,
        to_path(options.output),
        options.formats,
        web=options.web,
        origin=source.origin,
    )
    print(summary(written))


if __name__ == "__main__":
    cli.run(main)

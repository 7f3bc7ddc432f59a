"""Exports a model as ONNX and OpenVINO files, and verifies them against the Keras model.

    keras-vit onnx --run runs/demo --output portable --formats onnx openvino

Writes model.onnx, or model.xml with model.bin, with the exporters of Keras. Input: image (B, H, W, C) float32 in the
value range of the model, with any batch size. Output: logits (B, K). All arithmetic is float32. Needs the packages of
requirements-onnx.txt. With --web also a page that classifies pictures in the browser.
"""

from collections.abc import Sequence

from export.options import OnnxOptions, check_output
from keras_vit import cli, parser


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    options = parser.parse(OnnxOptions, arguments, prog="keras-vit onnx")
    run = options.source.open_run()
    check_output(options.output)
    cli.require_tensorflow()

    from export.detection import is_detector, open_detector
    from export.onnx import runtimes
    from export.onnx.detection import export_detector
    from export.onnx.export import export_onnx, summary
    from export.onnx.segmentation import export_segmenter
    from export.segmentation import is_segmenter, open_segmenter
    from export.source import open_model

    runtimes.require_packages(options.formats)  # before a large model is loaded
    if is_detector(run):
        for path, difference in export_detector(open_detector(run, options.source), options):
            print(f"{path}: boxes and logits within {difference:.2g} of the Keras model.")
        return
    if is_segmenter(run):
        for path, share in export_segmenter(open_segmenter(run, options.source), options):
            print(f"{path}: {share:.2%} of the pixels are those of the Keras model.")
        return
    written = export_onnx(open_model(run, options.source), options)
    print(summary(written))
    cli.print_next([("tflite", *options.source.arguments(), "--output", "phone")])


if __name__ == "__main__":
    cli.run(main)

"""A model as an ONNX file and as OpenVINO IR, each checked against the Keras model before it is there.

    python -m export.onnx --run runs/demo --output portable --formats onnx openvino

Writes model.onnx, or model.xml with model.bin, through Keras' own exporters. Input: image (B, H, W, C) float32 in the
model's range, any number of them. Output: logits (B, K). All arithmetic is float32. Needs the packages of
requirements-onnx.txt.
"""

from collections.abc import Sequence

from export.options import OnnxOptions
from keras_vit import cli


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    parsed = cli.parse(OnnxOptions, arguments, prog="python -m export.onnx")
    cli.require_tensorflow()

    from export.onnx.export import export_command

    export_command(parsed)


if __name__ == "__main__":
    cli.run(main)

"""A model as TFLite files for phones and small boards, each checked against the Keras model before it is there.

    python -m export.tflite --run runs/demo --output phone --formats float32 int8-dynamic

Input: image (1, H, W, C) float32 in the model's range, or uint8 pixels with --uint8-input. Output: logits (1, K). Batch
is fixed to 1, so that no shape is computed on the device. The formats are described in `quantize.py`. Every file holds
its labels and its normalisation as TFLite Metadata.
"""

from collections.abc import Sequence

from export.options import TFLiteOptions
from keras_vit import cli


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    parsed = cli.parse(TFLiteOptions, arguments, prog="python -m export.tflite")
    cli.require_tensorflow()

    from export.tflite.export import export_command

    export_command(parsed)


if __name__ == "__main__":
    cli.run(main)

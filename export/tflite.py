"""A model as TFLite files for phones and small boards, each checked against the Keras model before it is there.

    python -m export.tflite --run runs/demo --output phone --formats float32 int8-dynamic

Input: image (1, H, W, C) float32 in the model's range, or uint8 pixels with --uint8-input. Output: logits (1, K). Batch
is fixed to 1, so that no shape is computed on the device. The formats are described in `quantize.py`. Every file holds
its labels and its normalisation as TFLite Metadata.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from export.arguments import LARGEST_DISAGREEMENT, SourceArguments
from keras_vit import cli

Format = Literal["float32", "float16", "int8-dynamic", "int8-weights", "int8", "int16x8"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Export a model as TFLite files, and check them."""

    source: Annotated[SourceArguments, tyro.conf.arg(name="")]
    output: str
    """Directory of the files model-FORMAT.tflite and labels.txt, new or with those of the same model."""
    formats: tuple[Format, ...] = ("float32", "int8-dynamic")
    """What to write."""
    uint8_input: bool = False
    """Take pixels, 0..255, and normalise inside; the files are called model-FORMAT-uint8-input.tflite."""
    dynamic_batch: bool = False
    """Take any number of images; the files are called …-dynamic-batch.tflite. Not for int8 and int16x8."""
    calibration: str | None = None
    """Folder of representative images for int8 and int16x8. Default: training images that the run keeps."""
    calibration_images: int = 256
    """How many of them to use."""
    max_disagreement: float = LARGEST_DISAGREEMENT
    """Share of images that a rounded format may put into another class than the model does; float32 may none."""


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m export.tflite")
    cli.require_tensorflow()

    from export.as_tflite import export_as_told

    export_as_told(parsed)


if __name__ == "__main__":
    cli.run(main)

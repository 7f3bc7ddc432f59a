"""A model as an ONNX file and as OpenVINO IR, each checked against the Keras model before it is there.

    python -m export.onnx --run runs/demo --output portable --formats onnx openvino

Writes model.onnx, or model.xml with model.bin, through Keras' own exporters. Input: image (B, H, W, C) float32 in the
model's range, any number of them. Output: logits (B, K). All arithmetic is float32. Needs the packages of
requirements-onnx.txt.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from export.arguments import SourceArguments
from keras_vit import cli

Format = Literal["onnx", "openvino"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Export a model as ONNX and OpenVINO files, and check them."""

    source: Annotated[SourceArguments, tyro.conf.arg(name="")]
    output: str
    """Directory of model.onnx, model.xml with model.bin, and labels.txt, new or with those of the same model."""
    formats: tuple[Format, ...] = ("onnx",)
    """What to write."""


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR --formats …`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m export.onnx")
    cli.require_tensorflow()

    from export.as_onnx import export_as_told

    export_as_told(parsed)


if __name__ == "__main__":
    cli.run(main)

"""A model as a SavedModel for TF Serving: OUTPUT/<version>/, checked against the Keras model before it is there.

    python -m export.saved_model --run runs/demo --output served

The signatures are those of `signatures.py`. Beside them: assets/labels.txt, the requests that warm a server up, a model
card (README.md) and the verification report (report.md, report.json, report.png).
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from export.arguments import LARGEST_DISAGREEMENT, SourceArguments
from keras_vit import cli

Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Export a model as a SavedModel for TF Serving, and check it."""

    source: Annotated[SourceArguments, tyro.conf.arg(name="")]
    output: str
    """Directory of the model's versions; the next number is added."""
    dtype: Dtype = "float32"
    """Type of weights and arithmetic. bfloat16 halves the file, and is faster on processors that have it."""
    attention: bool = False
    """Add the signature "attention" with the probabilities of every block."""
    xla: bool = False
    """Compile the network with XLA when it is first called, for each batch size anew."""
    max_disagreement: float = LARGEST_DISAGREEMENT
    """Share of images that bfloat16 may put into another class than the model does; float32 may none."""


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m export.saved_model")
    cli.require_tensorflow()

    from export.as_saved_model import export_as_told

    export_as_told(parsed)


if __name__ == "__main__":
    cli.run(main)

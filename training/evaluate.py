"""Measure a model on the evaluation images of a data set, every one of them once.

    python -m training.evaluate --run runs/mnist-notes --data tfds:mnist

writes evaluation.json, evaluation.md, confusion.png, reliability.png and mistakes.png into the run directory, or into
--output. Instead of a run it takes a .keras file, any checkpoint with a head, a SavedModel or a TFLite file.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from keras_vit import cli
from training.arguments import DataArguments, InputArguments, StrategyArguments


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure a model on the evaluation images of a data set."""

    run: Annotated[str, tyro.conf.arg(aliases=("--checkpoint",))]
    """Run directory, .keras file, checkpoint file or folder, address, official name, SavedModel directory or .tflite
    file."""
    source: Annotated[DataArguments, tyro.conf.arg(name="")]
    batch_size: int = 256
    """Images per forward pass; does not change the numbers."""
    output: str | None = None
    """Directory of the report; default the run directory."""
    real_labels: str | None = None
    """JSON file with a list of the accepted class numbers of each image, as ImageNet's real.json; images of an empty
    list are left out of this accuracy."""
    save_predictions: bool = False
    """Also write predictions.npz: logits (n, K) and labels (n,)."""
    input: Annotated[InputArguments, tyro.conf.arg(name="")] = dataclasses.field(default_factory=InputArguments)
    place: Annotated[StrategyArguments, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=lambda: StrategyArguments("single")
    )


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m training.evaluate")
    cli.require_tensorflow()

    from training.evaluation import evaluate

    evaluate(parsed)


if __name__ == "__main__":
    cli.run(main)

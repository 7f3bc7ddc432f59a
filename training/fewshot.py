"""Few-shot linear accuracy: regularised least squares in closed form on frozen features of a few images of each class.

    python -m training.fewshot --run runs/mnist-small --data tfds:mnist

Paper: "An Image is Worth 16x16 Words" (arXiv 2010.11929) section 4.1. Code: big_vision `evaluators/fewshot_lsr.py`,
whose choice of images for a seed this repeats; here all of it is in float64.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli
from training.arguments import FeatureArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(FeatureArguments):
    """Few-shot linear accuracy of frozen features."""

    shots: tuple[int, ...] = (1, 5, 10, 25)
    """Images of each class to learn from."""
    seeds: int = 3
    """How many random choices of them."""
    l2: float = 1024.0
    """Strength of the penalty on the squared weights."""
    sweep: bool = False
    """Instead of --l2 try 2^-10 to 2^19, and take the best on training images that are not among the shots."""


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m training.fewshot")
    cli.require_tensorflow()

    from training.least_squares import fewshot

    fewshot(parsed)


if __name__ == "__main__":
    cli.run(main)

"""Linear probe: scikit-learn's logistic regression on frozen features of all training images.

    python -m training.linear_probe --run runs/mnist-small --data tfds:mnist

The strength of the penalty is chosen on a tenth of the training images; then all of them are learnt from.
"""

import dataclasses
from collections.abc import Sequence

from keras_vit import cli
from training.arguments import FeatureArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(FeatureArguments):
    """Accuracy of logistic regression on frozen features."""

    c: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0, 10.0)
    """Inverse strengths of the penalty to choose from, scikit-learn's C; of a single one nothing is chosen."""
    max_iterations: int = 1000
    """Of the solver (L-BFGS), for each strength."""


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --data …`"""
    parsed = cli.parse(Arguments, arguments, prog="python -m training.linear_probe")
    cli.require_tensorflow()

    from training.logistic_regression import probe

    probe(parsed)


if __name__ == "__main__":
    cli.run(main)

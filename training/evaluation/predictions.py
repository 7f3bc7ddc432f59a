"""The prediction for each evaluation image: predictions.csv, the mistakes, and whether two models differ by more than
chance.
"""

import csv
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats

from keras_vit import UserError
from keras_vit.errors import reading
from keras_vit.files.remote import existing_file
from keras_vit.files.tables import cell_of_csv, write_csv
from keras_vit.scores import sigmoid, softmax

PREDICTIONS = "predictions.csv"
_HEADER = ("file", "label", "predicted", "probability", "correct")
_BETWEEN = "|"  # between several classes of an image, as in the column labels of --data csv:FILE
_LEVEL = 0.05  # probability of a difference as large by chance, below which it is no noise


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The classes of an image, and the predicted ones."""

    index: int
    """Its number in the split."""
    file: str
    """Its name."""
    label: tuple[str, ...]
    predicted: tuple[str, ...]
    probabilities: tuple[float, ...]
    """The probability of each predicted class, 0 to 1."""
    correct: bool
    worst: str = ""
    """The class of the surest wrong decision."""
    worst_probability: float = 0.0
    label_probability: float | None = None
    """The probability of the label, where an image has one class."""


def one_class(
    files: Sequence[str], logits: np.ndarray, labels: np.ndarray, names: Sequence[str]
) -> tuple[list[Prediction], list[Prediction]]:
    """Return the predictions for images of one class each, from logits (n, K) and labels (n,), and the mistakes.

    Of the mistakes, the one whose label is least probable comes first.
    """
    probabilities = softmax(logits)
    predictions = []
    for index, (file, row, label) in enumerate(zip(files, probabilities, labels.tolist(), strict=True)):
        best = int(np.argmax(row))
        name, highest, own = names[best], float(row[best]), float(row[label])
        predictions.append(
            Prediction(index, file, (names[label],), (name,), (highest,), best == label, name, highest, own)
        )
    mistakes = [each for each in predictions if not each.correct]
    return predictions, sorted(mistakes, key=lambda each: each.label_probability or 0.0)


def several_classes(
    files: Sequence[str], logits: np.ndarray, truth: np.ndarray, names: Sequence[str]
) -> tuple[list[Prediction], list[Prediction]]:
    """Return the predictions for images of several classes, from logits (n, K) and truth (n, K) bool, and the mistakes.

    A class is predicted from the probability 0.5 on. Of the mistakes, the one with the surest wrong decision comes
    first.
    """
    every, probabilities, chosen = np.asarray(names), sigmoid(logits), logits >= 0.0
    sureness = np.where(truth != chosen, np.abs(probabilities - 0.5), -1.0)
    predictions = []
    for index, file in enumerate(files):
        label, predicted = (tuple(every[row[index]].tolist()) for row in (truth, chosen))
        shares = tuple(probabilities[index, chosen[index]].tolist())
        worst = int(sureness[index].argmax())
        correct = bool(sureness[index].max() < 0.0)
        predictions.append(
            Prediction(index, file, label, predicted, shares, correct, names[worst], float(probabilities[index, worst]))
        )
    order = np.argsort(-sureness.max(axis=1), kind="stable")
    return predictions, [predictions[index] for index in order if not predictions[index].correct]


def write_predictions(path: pathlib.Path, predictions: Sequence[Prediction], *, raw: bool) -> None:
    """Write predictions.csv, one row for each image."""
    rows = (
        (
            each.file,
            _BETWEEN.join(each.label),
            _BETWEEN.join(each.predicted),
            _BETWEEN.join(f"{share:.6f}" for share in each.probabilities),
            each.correct,
        )
        for each in predictions
    )
    write_csv(path, [_HEADER, *rows], raw=raw)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An earlier evaluation, of another model on the same images."""

    name: str
    """The directory of its report."""
    correct: dict[str, bool]

    def check_images(self, files: Sequence[str]) -> None:
        """Raise UserError unless these are its images."""
        if self.correct.keys() != set(files):
            common = len(self.correct.keys() & set(files))
            raise UserError(
                f"{self.name} was evaluated on other images: {common:,} of its {len(self.correct):,} are among the "
                f"{len(files):,} of now; evaluate both models with the same --data."
            )

    def measure(self, predictions: Sequence[Prediction]) -> dict[str, Any]:
        """Return how the model of now differs, and whether that may be chance.

        By McNemar's exact test: of the images that only one of two equally good models gets right, each is as likely to
        be right by the one as by the other.
        """
        before = np.array([self.correct[each.file] for each in predictions])
        now = np.array([each.correct for each in predictions])
        gained, lost = int(np.sum(now & ~before)), int(np.sum(~now & before))
        p = float(scipy.stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
        return {
            "with": self.name,
            "accuracy": float(before.mean()),
            "difference": float(now.mean() - before.mean()),
            "only_now_right": gained,
            "only_then_right": lost,
            "p_value": p,
            "within_noise": p >= _LEVEL,
        }


def open_comparison(directory: str) -> Comparison:
    """Read predictions.csv of an earlier report. Raises UserError if the directory has none that is ours."""
    advice = "--compare accepts the directory of an earlier report; evaluate that model first"
    path = existing_file(f"{directory}/{PREDICTIONS}", advice)
    with reading(path, "predictions", KeyError, advice=advice), path.open(newline="", encoding="utf-8") as stream:
        correct = {cell_of_csv(row["file"]): row["correct"] == "True" for row in csv.DictReader(stream)}
    return Comparison(directory, correct)


def comparison_sentence(compared: dict[str, Any]) -> str:
    """Return the numbers of `Comparison.measure` in words."""
    verdict = (
        "The difference is within the noise"
        if compared["within_noise"]
        else f"The difference is more than noise (p = {compared['p_value']:.2g})"
    )
    return (
        f"Compared with {compared['with']}: {100 * compared['difference']:+.1f} points of accuracy. Images right with "
        f"this model only: {compared['only_now_right']:,}; with the other only: {compared['only_then_right']:,}. "
        f"{verdict} (McNemar's exact test)."
    )

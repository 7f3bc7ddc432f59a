"""Predictions of each evaluation image, predictions.csv, and whether two models differ by more than chance."""

import csv
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import scipy.stats

from keras_vit import UserError
from keras_vit.files.remote import existing_file
from keras_vit.files.tables import CsvWriter, cell_of_csv
from keras_vit.scores import sigmoid

PREDICTIONS = "predictions.csv"
_HEADER = ("file", "label", "predicted", "probability", "correct")
# Between several classes of an image, as in the column labels of --data csv:FILE.
_BETWEEN = "|"
# Probability of a difference as large by chance, below which it is no noise.
_LEVEL = 0.05


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The classes of each image, and the predicted ones."""

    files: tuple[str, ...]
    """The name of each image."""
    labels: tuple[str, ...]
    """The class of each image; of several, cat|dog."""
    predicted: tuple[str, ...]
    """As `labels`."""
    probabilities: tuple[str, ...]
    """Of the predicted class; of several, as 0.9|0.6."""
    correct: np.ndarray
    """(n,) bool: whether all classes of an image are right."""

    def write(self, path: pathlib.Path) -> None:
        """Write predictions.csv, one row for each image."""
        columns = self.files, self.labels, self.predicted, self.probabilities, self.correct.tolist()
        with path.open("w", newline="", encoding="utf-8", errors="replace") as stream:
            writer = CsvWriter(stream)
            writer.writerow(_HEADER)
            for row in zip(*columns, strict=True):
                writer.writerow(row)


def one_class(files: Sequence[str], probabilities: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> Predictions:
    """The predictions for images of one class each, from probabilities (n, K) and labels (n,)."""
    predicted = np.argmax(probabilities, axis=-1)
    return Predictions(
        tuple(files),
        tuple(names[k] for k in labels),
        tuple(names[k] for k in predicted),
        tuple(f"{row[k]:.6f}" for row, k in zip(probabilities, predicted, strict=True)),
        predicted == labels,
    )


def several_classes(files: Sequence[str], logits: np.ndarray, truth: np.ndarray, names: Sequence[str]) -> Predictions:
    """The predictions for images of several classes each, from logits (n, K) and truth (n, K) bool.

    A class is predicted from the probability 0.5 on.
    """
    chosen = logits >= 0.0
    return Predictions(
        tuple(files),
        tuple(_joined(np.asarray(names)[row]) for row in truth),
        tuple(_joined(np.asarray(names)[row]) for row in chosen),
        tuple(_joined(f"{share:.6f}" for share in sigmoid(row[of])) for row, of in zip(logits, chosen, strict=True)),
        np.all(truth == chosen, axis=1),
    )


def _joined(texts: Sequence[str] | Iterator[str]) -> str:
    return _BETWEEN.join(texts)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An earlier evaluation, of another model on the same images."""

    name: str
    """The directory of its report."""
    correct: dict[str, bool]
    """Whether each image was right."""

    def check_images(self, files: Sequence[str]) -> None:
        """Raise UserError unless these are its images."""
        if self.correct.keys() != set(files):
            common = len(self.correct.keys() & set(files))
            raise UserError(
                f"{self.name} was evaluated on other images: {common:,} of its {len(self.correct):,} are among the "
                f"{len(files):,} of now; evaluate both models with the same --data."
            )

    def measure(self, now: Predictions) -> dict[str, Any]:
        """How the model of now differs, and whether that may be chance.

        By McNemar's exact test: of the images that only one of two equally good models gets right, each is as likely to
        be right by the one as by the other.
        """
        before = np.array([self.correct[file] for file in now.files])
        gained, lost = int(np.sum(now.correct & ~before)), int(np.sum(~now.correct & before))
        p = float(scipy.stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
        return {
            "with": self.name,
            "accuracy": float(before.mean()),
            "difference": float(now.correct.mean() - before.mean()),
            "only_now_right": gained,
            "only_then_right": lost,
            "p_value": p,
            "within_noise": p >= _LEVEL,
        }


def open_comparison(directory: str) -> Comparison:
    """Read predictions.csv of an earlier report. Raises UserError if the directory has none that is ours."""
    advice = "--compare takes the directory of an earlier report; evaluate that model first"
    path = existing_file(os.path.join(directory, PREDICTIONS), advice)
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    if not rows or not {"file", "correct"} <= rows[0].keys():
        raise UserError(f"{path} has no columns file and correct; evaluate that model again.")
    return Comparison(directory, {cell_of_csv(row["file"]): row["correct"] == "True" for row in rows})


def comparison_sentence(compared: dict[str, Any]) -> str:
    """Return the numbers of `Comparison.measure` in words."""
    verdict = (
        "the difference is within the noise"
        if compared["within_noise"]
        else f"the difference is more than noise (p = {compared['p_value']:.2g})"
    )
    return (
        f"Compared with {compared['with']}: {100 * compared['difference']:+.1f} points of accuracy. Only this model "
        f"is right on {compared['only_now_right']:,} images, only the other one on {compared['only_then_right']:,}: "
        f"{verdict} (McNemar's exact test)."
    )

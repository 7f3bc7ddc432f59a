"""report.html: what a model gets wrong, as one page that needs no network and is readable on a phone.

It begins with the mistakes as pictures; then come the classes as bars, and which classes are taken for which.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit.cli.pages import render, thumbnail_address
from keras_vit.files.tables import rounded_to
from training.data.dataset import Split
from training.evaluation.plots import LEGIBLE_CLASSES, most_confused

# Mistakes with a picture; each is about 5 kB of the page.
_PICTURES = 200
# Longest side of a picture in pixels.
_SIDE = 160
# Pairs of classes, where there are too many for a matrix.
_PAIRS = 30
# Measures that few people know, in words.
_MEANINGS = {
    "log loss": "The log loss is 0 if every answer is right and certain; sure mistakes raise it most.",
    "expected calibration error": "The expected calibration error is how far certainty and accuracy are apart: at 0, "
    "four of five pictures with a probability of 80 % are right.",
    "mean average precision": "The average precision of a class is 1 if all its pictures come before all others in "
    "the order of its probability.",
}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A picture that is not classified as it is labelled."""

    index: int
    """Its number in the split."""
    label: tuple[str, ...]
    predicted: tuple[str, ...]
    worst: str
    """The class of the surest wrong decision."""
    probability: float
    """The probability of that class, 0 to 1."""
    label_probability: float | None = None
    """The probability of the label, where an image has one class."""


def mistakes_of(probabilities: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> list[Mistake]:
    """Return the mistakes for images of one class each, from (n, K) and (n,); the least probable label comes first."""
    own, predicted = probabilities[np.arange(len(labels)), labels], np.argmax(probabilities, axis=-1)
    wrong = np.flatnonzero(predicted != labels)
    found = []
    for n in wrong[np.argsort(own[wrong], kind="stable")]:
        name = names[predicted[n]]
        highest = float(probabilities[n].max())
        found.append(Mistake(int(n), (names[labels[n]],), (name,), name, highest, float(own[n])))
    return found


def mistakes_of_several(probabilities: np.ndarray, truth: np.ndarray, names: Sequence[str]) -> list[Mistake]:
    """Return mistakes for images of several classes, from (n, K) and (n, K) bool; the surest wrong decision first."""
    chosen = probabilities >= 0.5
    surest = np.where(truth != chosen, np.abs(probabilities - 0.5), -1.0)
    found = []
    for n in np.argsort(-surest.max(axis=1), kind="stable"):
        if surest[n].max() >= 0.0:
            k = int(surest[n].argmax())
            label, predicted = (tuple(np.asarray(names)[row].tolist()) for row in (truth[n], chosen[n]))
            found.append(Mistake(int(n), label, predicted, names[k], float(probabilities[n, k])))
    return found


@dataclasses.dataclass(frozen=True)
class Report:
    """The content of the page beside the images."""

    title: str
    headline: str
    """The result in a sentence."""
    metrics: dict[str, Any]
    """Those of evaluation.json."""
    measures: Mapping[str, str]
    """The names of the metrics of all images, and what to call them."""
    notes: Sequence[str] = ()
    """Sentences below the headline."""

    @property
    def facts(self) -> list[tuple[str, str, str]]:
        """Measures in words, with their values and intervals, of those that the metrics have."""
        intervals = self.metrics["intervals"]
        known = [(name, words) for name, words in self.measures.items() if self.metrics.get(name) is not None]
        return [(words, *rounded_to(self.metrics[name], intervals[name])) for name, words in known]


def html_report(report: Report, split: Split, mistakes: Sequence[Mistake], root: str) -> str:
    """Return the page as text.

    Args:
        report: the rest of the page.
        split: the images.
        mistakes: the worst first; so many are shown as a page can hold.
        root: folder of the images, which is left out of their names.
    """
    classes, facts = report.metrics["classes"], report.facts
    names, shown = list(classes), mistakes[:_PICTURES]
    legible = len(names) <= LEGIBLE_CLASSES
    matrix = np.array(report.metrics["confusion"]) if "confusion" in report.metrics else None
    bars = [
        {
            "name": name,
            "num_images": row["num_examples"],
            "scores": (row["recall"] if row["num_examples"] else None, row["precision"]),
        }
        for name, row in classes.items()
    ]
    return render(
        "evaluation",
        title=report.title,
        headline=report.headline,
        notes=report.notes,
        num_mistakes=len(mistakes),
        cards=[_card(split, mistake, root) for mistake in shown],
        classes=sorted({name for mistake in shown for name in (*mistake.label, *mistake.predicted)}),
        bars=sorted(bars, key=lambda bar: 2.0 if bar["scores"][0] is None else bar["scores"][0]),
        bar_titles=["found (recall)", "right if said (precision)"],
        matrix=_matrix(matrix, names) if matrix is not None and legible else None,
        pairs=_pairs(matrix, names) if matrix is not None and not legible else None,
        facts=facts,
        meanings=" ".join(text for name, text in _MEANINGS.items() if any(name in words for words, *_ in facts)),
    )


def _card(split: Split, mistake: Mistake, root: str) -> dict[str, Any]:
    card = {
        "name": split.name(mistake.index).removeprefix(root).lstrip("/"),
        "label": ", ".join(mistake.label) or "none",
        "predicted": ", ".join(mistake.predicted) or "none",
        "classes": (*mistake.label, *mistake.predicted),
        "worst": mistake.worst,
        "probability": mistake.probability,
        "label_probability": mistake.label_probability,
        "address": "",
        "problem": "",
    }
    try:  # one image that cannot be read must not cost the others
        pixels = split.example(tf.constant(mistake.index, tf.int64))[0].numpy()
        return {**card, "address": thumbnail_address(pixels, _SIDE)}
    except Exception as error:
        return {**card, "problem": str(error)[:120]}


def _matrix(matrix: np.ndarray, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows: the name of the class, and a count and share of the row for each predicted class."""
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    return [
        {"name": name, "number": row, "cells": list(zip(matrix[row].tolist(), share[row].tolist(), strict=True))}
        for row, name in enumerate(names)
    ]


def _pairs(matrix: np.ndarray, names: Sequence[str]) -> list[tuple[str, str, int, float]]:
    """Return label, predicted class, count and share of the label of the most confused pairs."""
    return [
        (names[row], names[column], count, count / matrix[row].sum())
        for row, column, count in most_confused(matrix, _PAIRS)
    ]

"""Compares how wrong labels are found: `python -m benchmarks.label_errors --index features --seeds 0 1`.

A share of the labels of an index is replaced by other classes at random. Then `keras-vit review` and cleanlab (pip
install cleanlab) look for them: cleanlab on the same probabilities, and on those of scikit-learn's logistic regression
with its defaults on the same features. first: the share of wrong labels among as many pictures as there are wrong
labels, the most suspicious first; of cleanlab by self-confidence.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_vit import UserError, cli
from keras_vit.cli import parser
from keras_vit.cli.options import Seed, Share
from keras_vit.files.tables import markdown_table


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure precision and recall of the search for wrong labels."""

    index: str
    """Folder of keras-vit embed, of pictures with labels."""
    seeds: tuple[Seed, ...] = (0,)
    """Seeds of the wrong labels."""
    wrong: Share = 0.05
    """Share of the labels that are replaced."""


def _row(name: str, found: np.ndarray, wrong: np.ndarray) -> list[str]:
    """found: rows, the most suspicious first. wrong: (n,) bool."""
    shares = wrong[found].mean(), wrong[found].sum() / wrong.sum(), wrong[found[: wrong.sum()]].mean()
    return [name, f"{len(found):,}", *(f"{share:.1%}" for share in shares)]


def _measure(values: np.ndarray, labels: np.ndarray, num_classes: int, seed: int, share: float) -> list[list[str]]:
    """A row of each method. values: (n, D); labels: (n,), taken as right."""
    import sklearn.linear_model
    import sklearn.model_selection

    from training.features.findings import HEAD_C
    from training.features.label_errors import suspicious_labels
    from training.features.linear_head import out_of_fold_probabilities

    rng = np.random.default_rng(seed)
    wrong = np.zeros(len(labels), bool)
    wrong[rng.choice(len(labels), int(len(labels) * share), replace=False)] = True
    given = labels.copy()
    given[wrong] = (labels[wrong] + rng.integers(1, num_classes, wrong.sum())) % num_classes
    probabilities = out_of_fold_probabilities(values, given, np.arange(len(given)), num_classes, HEAD_C)
    rows = [_row(f"review, seed {seed}", suspicious_labels(given, probabilities), wrong)]
    try:
        from cleanlab.filter import find_label_issues
    except ModuleNotFoundError:
        print("cleanlab is not installed, so it is not compared.")
        return rows
    head = sklearn.linear_model.LogisticRegression(max_iter=200)
    default = sklearn.model_selection.cross_val_predict(head, values, given, cv=5, method="predict_proba")
    for name, of_method in (("cleanlab, same probabilities", probabilities), ("cleanlab, default head", default)):
        found = find_label_issues(given, of_method.astype(np.float64), return_indices_ranked_by="self_confidence")
        rows.append(_row(f"{name}, seed {seed}", found, wrong))
    return rows


def main(arguments: Sequence[str]) -> None:
    """`--index DIR`"""
    options = parser.parse(Arguments, arguments, prog="python -m benchmarks.label_errors", about=__doc__)

    from training.features.store import open_index

    index = open_index(options.index)
    names = index.description.labels
    if len(names) < 2:
        raise UserError(f"{options.index} has no classes; make it by keras-vit embed --data.")
    number_of = {name: number for number, name in enumerate(names)}
    labels = np.array([number_of[label] for label in index.pictures.labels])
    values = index.embeddings()
    rows = [row for seed in options.seeds for row in _measure(values, labels, len(names), seed, options.wrong)]
    print(markdown_table(("method", "listed", "precision", "recall", "first"), rows, num_text_columns=1))


if __name__ == "__main__":
    cli.run(main)

"""Choose the images to label next by their frozen features, and say what more labels are worth.

Few labels: the typical images of clusters without a label, "Active Learning on a Budget" (TypiClust, arXiv 2202.02794).
More labels: of the images with the smallest margin between the two likeliest classes the centers of clusters, weighted
by the margin, "Diverse mini-batch Active Learning" (1901.05954). Never two near copies.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import sklearn.cluster
import sklearn.model_selection

from keras_vit.files.atomic import atomic_write
from keras_vit.files.remote import to_path
from keras_vit.files.tables import write_csv
from keras_vit.run import Run
from training.data.dataset import DataSet
from training.features.extraction import embed_all, listing_of_files, open_extractor
from training.features.linear_models import new_probe, quiet_fits
from training.features.lookup import nearest_rows, unit_length, write_cards
from training.features.probe import Features, cached_features
from training.features.store import NO_SPLIT
from training.options.features import LabelNextOptions

FEW = 2  # labels of each class up to which typical images are chosen
# Neighbors among which an image is typical, most clusters, and images of small margin for each one that is chosen.
_NEIGHBORS, _MOST_CLUSTERS, _CANDIDATES = 20, 400, 5
_C = 0.1  # inverse strength of the penalty of the head
_SHARES, _DRAWS = (0.25, 0.35, 0.5, 0.7), 8  # shares of the labels of the curve, and how often each is drawn
_HARDLY = 0.5  # a gain of accuracy, in points, that is hardly worth labelling for


@dataclasses.dataclass(frozen=True)
class Choice:
    """The images to label next."""

    rows: np.ndarray
    """Rows of the unlabeled images, the most useful first."""
    suggested: np.ndarray
    """(n,) the likeliest class of each; -1 without a head."""
    margins: np.ndarray
    """(n,) between its two likeliest classes, 0 to 1; nan without a head."""
    typical: bool
    """Whether they are typical images of clusters, since there are few labels."""


def choose(labelled: Features, unlabelled: np.ndarray, count: int, least_copy: float = 0.95, seed: int = 0) -> Choice:
    """Return which of the images with features (n, D) to label next; fewer where the others are near copies.

    Images, some of which may be labeled, are near copies from the cosine least_copy on, after the mean is subtracted.
    """
    labels, every = labelled.labels, np.concatenate([labelled.values, unlabelled])
    units = unit_length(every - every.mean(axis=0))
    known, new = np.split(units, [len(labels)])
    free = np.ones(len(new), bool) if not len(known) else nearest_rows([known], new, 1)[0][:, 0] < least_copy
    suggested, margins = np.full(len(new), -1), np.full(len(new), np.nan)
    if len(np.unique(labels)) > 1:
        classes, probabilities = head_probabilities(labelled, unlabelled)
        highest = np.sort(probabilities, axis=1)
        suggested, margins = classes[probabilities.argmax(axis=1)], highest[:, -1] - highest[:, -2]
    typical = len(labels) < FEW * max(len(np.unique(labels)), 2) or np.isnan(margins).all()
    order = _typical(units, len(known), free, count, seed) if typical else _unsure(new, margins, free, count, seed)
    rows = np.array(_without_copies(new, order, least_copy)[:count], np.int64)
    return Choice(rows, suggested[rows], margins[rows], bool(typical))


def head_probabilities(labelled: Features, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes (K,) that there are, and the probabilities (n, K) of a linear head."""
    with quiet_fits():
        head = new_probe(_C, max_iterations=200).fit(labelled.values, labelled.labels)
    return head.classes_, head.predict_proba(asked)


def _typical(units: np.ndarray, num_known: int, free: np.ndarray, count: int, seed: int) -> list[int]:
    """Return unlabelled rows: of the clusters with the fewest labels, the largest first, the most typical image."""
    clusters = min(num_known + count, _MOST_CLUSTERS, len(units))
    means = sklearn.cluster.MiniBatchKMeans if clusters > 50 else sklearn.cluster.KMeans
    with quiet_fits():
        of_row = means(clusters, n_init=1, random_state=seed).fit_predict(units)
    labels = np.bincount(of_row[:num_known], minlength=clusters)
    members = [np.flatnonzero(of_row == cluster) for cluster in range(clusters)]
    queues = []
    for rows in members:
        asked = rows[rows >= num_known]
        asked = asked[free[asked - num_known]]
        near = nearest_rows([units[rows]], units[asked], min(_NEIGHBORS, len(rows)))[0] if len(asked) else np.zeros(0)
        queues.append(list(asked[np.argsort(-near.mean(axis=1))] - num_known) if len(asked) else [])
    chosen: list[int] = []
    while len(chosen) < 2 * count and any(queues):  # some of them may be copies
        cluster = min((k for k in range(clusters) if queues[k]), key=lambda k: (labels[k], -len(members[k])))
        chosen.append(int(queues[cluster].pop(0)))
        labels[cluster] += 1
    return chosen


def _unsure(new: np.ndarray, margins: np.ndarray, free: np.ndarray, count: int, seed: int) -> list[int]:
    """Return unlabelled rows: nearest to the centers of clusters of those with a small margin, then the others."""
    candidates = np.flatnonzero(free)
    candidates = candidates[np.argsort(margins[candidates], kind="stable")][: _CANDIDATES * count]
    if len(candidates) <= count:
        return candidates.tolist()
    with quiet_fits():
        clusters = sklearn.cluster.KMeans(count, n_init=1, random_state=seed)
        distances = clusters.fit(new[candidates], sample_weight=1.0 - margins[candidates]).transform(new[candidates])
    centers = list(dict.fromkeys(candidates[distances.argmin(axis=0)].tolist()))
    return [*centers, *(row for row in candidates.tolist() if row not in {*centers})]


def _without_copies(units: np.ndarray, order: Sequence[int], least_copy: float) -> list[int]:
    kept: list[int] = []
    for row in order:
        if not kept or (units[kept] @ units[row]).max() < least_copy:
            kept.append(row)
    return kept


def worth(labelled: Features, more: int) -> str:
    """Return a sentence on what more labels are worth.

    A head is fitted to shares of the labels and measured on the others; its error falls with a power of their number.
    """
    values, labels = labelled.values, labelled.labels
    if len(np.unique(labels)) < 2 or np.bincount(labels)[np.unique(labels)].min() < 4:
        return "To estimate what more labels are worth, label four images of each class."
    errors = np.zeros((len(_SHARES), _DRAWS))
    for row, share in enumerate(_SHARES):
        splits = sklearn.model_selection.StratifiedShuffleSplit(_DRAWS, train_size=share, random_state=0)
        for draw, (rows, others) in enumerate(splits.split(values, labels)):
            classes, probabilities = head_probabilities(labelled.take(rows), values[others])
            errors[row, draw] = np.mean(classes[probabilities.argmax(axis=1)] != labels[others])
    gains, rng = [], np.random.default_rng(0)
    for _ in range(200):
        drawn = errors[:, rng.integers(0, _DRAWS, _DRAWS)].mean(axis=1)
        slope, start = np.polyfit(np.log(np.array(_SHARES) * len(labels)), np.log(np.maximum(drawn, 1e-4)), 1)
        now, then = (np.exp(start + min(slope, 0.0) * np.log(len(labels) + added)) for added in (0, more))
        gains.append(100.0 * (now - then))
    low, middle, high = np.quantile(gains, [0.05, 0.5, 0.95])
    sentence = (
        f"{more:,} more labels, drawn at random, raise the accuracy of a linear head by {middle:.1f} points (90% "
        f"interval {low:.1f} to {high:.1f}); these images are chosen to do more."
    )
    return sentence if high >= _HARDLY else f"{sentence} More labels will hardly help."


# The command


def label_next(run: Run, source: DataSet, files: Sequence[str], options: LabelNextOptions) -> Choice:
    """Choose the images to label next, write label_next.csv and label_next.html, and print what labels are worth."""
    extractor = open_extractor(run.model, run.preprocessing, batch_size=options.batch_size)
    known = Features.of_all(
        [cached_features(extractor, split, options.cache) for split in (source.train, source.evaluation)]
    )
    part = embed_all(listing_of_files(files), NO_SPLIT, extractor)
    choice = choose(known, part.embeddings, options.count, options.duplicate_similarity, options.seed)
    chosen = [
        (part.paths[row], source.labels[label] if label >= 0 else "", margin)
        for row, label, margin in zip(choice.rows, choice.suggested, choice.margins.tolist(), strict=True)
    ]
    sentence, folder = worth(known, len(chosen)), to_path(options.output)
    why = "typical of clusters without a label" if choice.typical else "about which a linear head is least sure"
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "label_next.csv") as temporary:
        rows = ((path, "", *suggestion) for path, *suggestion in chosen)
        write_csv(temporary, [("path", "label", "suggested", "margin"), *rows], raw=options.raw)
    note = f"{sentence} The number is the margin between the two most likely classes."
    write_cards(folder / "label_next.html", "What to label next", f"Images {why}", chosen, note)
    print(f"{len(chosen):,} of {len(part.paths):,} images, {why}, are in {folder / 'label_next.csv'}.\n{sentence}")
    return choice

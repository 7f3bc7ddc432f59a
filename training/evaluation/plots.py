"""The plots of a report: confusion matrix, reliability diagram, precision and recall, the worst mistakes."""

import pathlib
import textwrap
import warnings
from collections.abc import Sequence

import matplotlib.figure
import matplotlib.ticker
import numpy as np
import sklearn.metrics
import tensorflow as tf

from keras_vit.files.tables import short_name
from training.data.dataset import Split
from training.evaluation.metrics import BINS
from training.evaluation.predictions import Prediction

LEGIBLE_CLASSES = 30  # more classes than these are not legible as numbers in a confusion matrix
_PAIRS = 25  # of classes, instead of an illegible matrix
_GALLERY = (4, 6)  # rows and columns
_LONGEST_NAME = 22  # characters
_MOST_CURVES = 10  # of the most frequent classes


def save_figure(figure: matplotlib.figure.Figure, path: pathlib.Path, dpi: int = 120) -> None:
    """Write a PNG, without a warning for class names with characters that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a box stands in its place
        figure.savefig(path, dpi=dpi)


def draw_confusion(matrix: np.ndarray, names: Sequence[str], path: pathlib.Path) -> None:
    """Plot labels as rows and predicted classes as columns. Of more classes than are legible, the confused pairs."""
    if len(names) > LEGIBLE_CLASSES:
        _draw_pairs(matrix, names, path)
        return
    labels = [_short(name) for name in names]
    side = 1.2 + 0.45 * max(len(names), 4)
    # Room for the names beside the matrix, and for the scale.
    room = 0.08 * max(map(len, labels))
    figure = matplotlib.figure.Figure(figsize=(side + room + 1.2, side + room), layout="constrained")
    axes = figure.subplots()
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    shown = axes.imshow(share, cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set(xlabel="predicted", ylabel="label")
    figure.suptitle("Confusion matrix, number of images", fontsize=11)
    figure.colorbar(shown, ax=axes, label="share of the row", shrink=0.7)
    axes.set_xticks(range(len(names)), labels, rotation=90, parse_math=False)
    axes.set_yticks(range(len(names)), labels, parse_math=False)
    for (row, column), count in np.ndenumerate(matrix):
        color = "white" if share[row, column] > 0.5 else "black"
        if count:
            size = 8 if count < 1000 else 6
            axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=size)
    save_figure(figure, path)


def most_confused(matrix: np.ndarray, count: int) -> list[tuple[int, int, int]]:
    """Return label, predicted class and number of images of the most frequent confusions in a matrix (K, K)."""
    wrong = matrix - np.diag(np.diag(matrix))
    places = np.argsort(-wrong, axis=None, kind="stable")[: min(count, np.count_nonzero(wrong))]
    return [(*divmod(int(place), len(matrix)), int(wrong.flat[place])) for place in places]


def _draw_pairs(matrix: np.ndarray, names: Sequence[str], path: pathlib.Path) -> None:
    pairs = most_confused(matrix, _PAIRS)
    figure = matplotlib.figure.Figure(figsize=(8.0, 1.2 + 0.24 * max(len(pairs), 1)), layout="constrained")
    axes = figure.subplots()
    texts = [f"{_short(names[row])} taken for {_short(names[column])}" for row, column, _ in pairs]
    bars = axes.barh(range(len(pairs)), [count for *_, count in pairs], color="tab:blue")
    axes.bar_label(bars, padding=2, fontsize=8)
    axes.set_yticks(range(len(pairs)), texts, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.set(xlabel="images")
    figure.suptitle(f"The most frequent confusions of {len(names):,} classes", fontsize=11)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.margins(x=0.1)
    save_figure(figure, path)


def draw_reliability(bins: Sequence[dict], ece: float, path: pathlib.Path) -> None:
    """Plot the accuracy of each bin of confidence beside that of perfect calibration, and below its images."""
    figure = matplotlib.figure.Figure(figsize=(5.0, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    middles = [(row["low"] + row["high"]) / 2.0 for row in bins]
    above.bar(middles, [row["accuracy"] for row in bins], 0.9 / BINS, color="tab:blue", label="accuracy")
    above.plot([row["confidence"] for row in bins], [row["accuracy"] for row in bins], "k.", label="mean confidence")
    above.plot([0, 1], [0, 1], color="gray", linestyle="--", label="perfect calibration")
    above.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy", title=f"Reliability: ECE {ece:.4f}")
    counts = [row["num_examples"] for row in bins]
    below.bar(middles, counts, 0.9 / BINS, color="tab:gray")
    below.set(xlabel="confidence", ylabel="images")
    if max(counts) > 100 * min(counts):
        below.set(yscale="log", ylim=(0.5, None))  # no fractions of an image
    else:
        below.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator("auto", integer=True))
    below.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    below.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    save_figure(figure, path)


def draw_mistakes(split: Split, mistakes: Sequence[Prediction], path: pathlib.Path) -> None:
    """Plot the first mistakes: images as they are stored, their classes with probabilities, and the names of the files.

    Transparent images are shown on white. An image that cannot be shown is replaced by the reason.
    """
    mistakes = mistakes[: _GALLERY[0] * _GALLERY[1]]
    columns = min(len(mistakes), _GALLERY[1])
    rows = -(-len(mistakes) // columns)
    figure = matplotlib.figure.Figure(figsize=(max(2.2 * columns, 3.6), 2.9 * rows + 0.4), layout="constrained")
    figure.set_layout_engine("constrained", h_pad=0.12)  # inches, so that no row is cut off at the edge
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid:
        axes.set_axis_off()
    for axes, each in zip(grid, mistakes, strict=False):
        try:
            image = split.example(tf.constant(each.index, tf.int64))[0].numpy()
            axes.imshow(_as_colors(image), vmin=0, vmax=255)
        except Exception as error:  # of any kind: one image must not cost the others
            reason = textwrap.fill(f"cannot be shown: {error}"[:120], _LONGEST_NAME)
            axes.text(0.5, 0.5, reason, ha="center", va="center", fontsize=6, parse_math=False)
        label = f"label {_short(each.label[0])} {each.label_probability:.2g}"
        said = f"said {_short(each.predicted[0])} {each.probabilities[0]:.2g}"
        axes.set_title(f"{_short(short_name(each.file), 30)}\n{label}\n{said}", fontsize=7, parse_math=False)
    figure.suptitle("The worst mistakes, with probabilities")
    save_figure(figure, path, dpi=110)


def draw_precision_recall(logits: np.ndarray, truth: np.ndarray, names: Sequence[str], path: pathlib.Path) -> None:
    """Plot precision over recall of the most frequent classes, from logits (n, K) and truth (n, K) bool."""
    figure = matplotlib.figure.Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    frequent = np.argsort(-truth.sum(axis=0), kind="stable")[:_MOST_CURVES]
    for k in (k for k in frequent if truth[:, k].any()):
        precision, recall, _ = sklearn.metrics.precision_recall_curve(truth[:, k], logits[:, k])
        # Labels of Matplotlib that begin with an underscore are not shown, and a $ would begin a formula.
        axes.plot(recall, precision, label=f"\u200b{names[k]}".replace("$", r"\$"))
    axes.set(xlim=(0, 1.01), ylim=(0, 1.01), xlabel="recall", ylabel="precision", title="Precision and recall")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def _as_colors(image: np.ndarray) -> np.ndarray:
    """Return an image (h, w, C) of 1 to 4 channels as RGB or RGBA; the second and the fourth channel are alpha."""
    if image.shape[-1] > 2:
        return image
    return np.concatenate([image[..., :1].repeat(3, axis=-1), image[..., 1:]], axis=-1)


def _short(name: str, longest: int = _LONGEST_NAME) -> str:
    return name if len(name) <= longest else name[: longest - 1] + "…"

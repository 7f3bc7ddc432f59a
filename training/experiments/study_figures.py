"""The figures of the studies, in the form of the paper's, with the paper's own numbers beside where there are any.

"An Image is Worth 16x16 Words" (arXiv 2010.11929): Table 6 for scaling, Table 8 for position embeddings; its Figures 3,
4, 8 and 9 are plots without tables.
"""

import pathlib
from collections.abc import Callable, Sequence

import matplotlib.figure

# Colors and marks that can be distinguished without seeing red or green (Okabe and Ito).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKS = "osD^vPX"

# Table 6: exaFLOPs of pre-training on JFT-300M, and top-1 of ImageNet after fine-tuning in %.
_TABLE_6 = {
    "ViT": ((55, 80.73), (224, 84.15), (196, 84.37), (783, 86.30), (1567, 87.12), (4262, 88.08)),
    "hybrid": ((106, 84.90), (274, 85.58), (246, 85.68), (859, 86.60), (1668, 87.12)),
    "BiT": ((50, 77.54), (199, 82.12), (96, 80.67), (141, 81.88), (563, 84.97), (1126, 85.56), (3306, 87.22)),
}
# Table 8: 5-shot accuracy of ImageNet in %, of ViT-B/16.
_TABLE_8 = {
    ("none", "-"): 61.382,
    ("1-D", "stem"): 64.206,
    ("1-D", "every layer"): 63.964,
    ("1-D", "every layer, shared"): 64.292,
    ("2-D", "stem"): 64.001,
    ("2-D", "every layer"): 64.046,
    ("2-D", "every layer, shared"): 64.022,
    ("relative", "-"): 64.032,
}


def draw(study: str, title: str, data: str, shots: int, rows: Sequence[dict], path: pathlib.Path) -> None:
    """Draw the rows of a study's results.json; data and shots are for the labels."""
    figure = matplotlib.figure.Figure(figsize=(10, 4.6), layout="constrained")
    figure.suptitle(f"{title}: {data}")
    _FORMS[study](*figure.subplots(1, 2), rows, shots)
    figure.savefig(path, dpi=120)


def _data_size(left, right, rows, shots: int) -> None:
    for axes, measure in ((left, "accuracy"), (right, "few_shot")):
        _lines(axes, rows, "train_images", measure)
        axes.set(xlabel="training images", ylabel=_label(measure, shots))


def _scaling(left, right, rows, shots: int) -> None:
    _lines(left, rows, "training_flops", "accuracy")
    left.set(xlabel="floating-point operations of training", ylabel="accuracy, %", title="here")
    for (line, points), color, mark in zip(_TABLE_6.items(), _COLORS, _MARKS, strict=False):
        right.plot(*zip(*sorted(points), strict=True), color=color, marker=mark, label=line)
    right.set(xscale="log", xlabel="exaFLOPs of pre-training", ylabel="ImageNet top-1, %")
    right.set_title("the paper's Table 6, JFT-300M")
    right.grid(alpha=0.3)
    right.legend()


def _positions(left, right, rows, shots: int) -> None:
    names = [f"{row['line']}, {row['setting']}".removesuffix(", -") for row in rows]
    heights = range(len(rows), 0, -1)
    for height, row in zip(heights, rows, strict=True):
        for measure, color, mark in (("few_shot", _COLORS[0], "o"), ("accuracy", _COLORS[1], "s")):
            name = _label(measure, shots).removesuffix(", %") if height == len(rows) else None
            _point(left, row[measure], height, color=color, marker=mark, linestyle="", label=name)
    left.set_yticks(list(heights), names)
    left.set(xlabel="%", title="here, with 95% intervals")
    left.legend(loc="center left")
    known = [(height, _TABLE_8[key]) for height, row in zip(heights, rows, strict=True)
             if (key := (row["line"], row["setting"])) in _TABLE_8]  # fmt: skip
    right.plot([value for _, value in known], [height for height, _ in known], "o", color=_COLORS[0])
    right.set_yticks(list(heights), [])
    right.set(ylim=left.get_ylim(), xlabel="ImageNet 5-shot accuracy, %", title="the paper's Table 8, ViT-B/16")
    for axes in (left, right):
        axes.grid(alpha=0.3)


def _head(left, right, rows, shots: int) -> None:
    for row, color, mark in zip(rows, _COLORS, _MARKS, strict=False):
        steps, values = zip(*row["curve"], strict=True)
        name = f"{row['line']},\n{row['setting']}"
        left.plot(steps, [100 * value for value in values], color=color, marker=mark, markersize=4, label=name)
        _point(right, row["few_shot"], name, color=color, marker=mark)
    left.set(xlabel="step", ylabel="accuracy, %")
    left.grid(alpha=0.3)
    left.legend(loc="lower right")
    right.set(xlabel=_label("few_shot", shots), title="at the end, with 95% intervals")
    right.invert_yaxis()
    right.grid(alpha=0.3)


def _shape(left, right, rows, shots: int) -> None:
    base = next(row for row in rows if row["line"] == "base")
    others = [row for row in rows if row is not base]
    lines = dict.fromkeys(row["line"] for row in others)
    through = [{**base, "line": line} for line in lines] + others
    relative = [{**row, "relative": row["forward_flops"] / base["forward_flops"]} for row in through]
    for axes, measure in ((left, "accuracy"), (right, "few_shot")):
        _lines(axes, relative, "relative", measure)
        axes.set(xlabel="floating-point operations, of the base model's", ylabel=_label(measure, shots))
        axes.set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
        axes.minorticks_off()


def _lines(axes, rows, x: str, measure: str) -> None:
    """Plot a line for each `line` of the rows, over a logarithmic axis, with intervals."""
    lines = list(dict.fromkeys(row["line"] for row in rows))
    for line, color, mark in zip(lines, _COLORS, _MARKS, strict=False):
        own = sorted((row for row in rows if row["line"] == line), key=lambda row: row[x])
        points = [_percent(row[measure]) for row in own]
        errors = None if points[0][1] is None else [error for _, error in points]
        means = [mean for mean, _ in points]
        axes.errorbar([row[x] for row in own], means, errors, color=color, marker=mark, capsize=3, label=line)
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend()


def _point(axes, summary: dict, place: float | str, **style) -> None:
    """Plot a mean with its interval beside a place of the vertical axis."""
    mean, error = _percent(summary)
    axes.errorbar([mean], [place], xerr=None if error is None else [[error], [error]], capsize=3, **style)


def _percent(summary: dict) -> tuple[float, float | None]:
    """Return the mean and half the interval."""
    half = None if summary["interval"] is None else 100 * (summary["interval"][1] - summary["mean"])
    return 100 * summary["mean"], half


def _label(measure: str, shots: int) -> str:
    return "accuracy, %" if measure == "accuracy" else f"{shots}-shot accuracy, %"


_FORMS: dict[str, Callable] = {
    "data-size": _data_size,
    "small-data": _data_size,
    "scaling": _scaling,
    "position-embedding": _positions,
    "head": _head,
    "shape": _shape,
}

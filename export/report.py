"""Reports of the verification of an export: report.json, report.md and report.png, and measurements for them."""

import collections
import dataclasses
import json
import pathlib
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import matplotlib.figure
import numpy as np
import tensorflow as tf

from export import parity
from export.texts import render
from keras_vit.files.tables import markdown_table, markdown_text

Table = tuple[str, Sequence[str], Sequence[Sequence[object]]]  # heading, column names, and rows
_MOST_BARS = 15  # largest number of bars in a panel of report.png
_REPEATS, _LONGEST = 50, 5.0  # timed calls of an artifact, and the seconds that all its calls may take
# Names of facts that are no words.
_WORDS = {
    "dtype": "type of the weights",
    "xla": "compiled by XLA",
    "merge_tokens": "tokens merged in each block",
    "images_from": "images for the comparison",
    "num_images": "number of these images",
    "max_abs_diff": "largest difference of a logit from the Keras model",
    "mean_abs_diff": "mean difference of a logit",
    "tolerance": "largest difference that counts as rounding",
    "agreement": "share of images with the same predicted classes",
    "keras_accuracy": "accuracy of the Keras model",
    "lost": "images that only the Keras model classifies correctly",
    "gained": "images that only the export classifies correctly",
    "mcnemar_p": "p-value of McNemar's test of these two numbers",
    "encoded_images_max_abs_diff": "largest difference of a probability, from image files",
    "warm_up_requests": "warm-up requests",
    "threshold": "threshold to accept an image",
    "multi_label": "an image may have several classes",
    "latency_ms": "latency of one image, ms",
    "1_threads": "one thread",
    "2_threads": "two threads",
    "all_threads": "all threads",
    "export_seconds": "seconds of the export",
}


def operator_table(names: Iterable[str]) -> dict[str, int]:
    """Number of operators by name, the most frequent first."""
    return dict(sorted(collections.Counter(names).items(), key=lambda item: (-item[1], item[0])))


def latency(call: Callable[[], object]) -> float:
    """Milliseconds of a call, see `typical_ms`, after as many warm-up calls."""
    seconds, end = [], time.perf_counter() + _LONGEST
    for repeat in range(2 * _REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
        if time.perf_counter() > end and repeat >= 2:
            break
    return typical_ms(seconds[len(seconds) // 2 :])


def typical_ms(seconds: Sequence[float]) -> float:
    """Lower quartile in milliseconds: other load on the machine makes calls slower, never faster."""
    return float(f"{1e3 * np.quantile(seconds, 0.25):.4g}")


def versions() -> dict[str, str]:
    """Versions of the libraries, and the processor."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = info.get("model name", platform.machine())
    relevant = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd")
    features = info.get("flags", info.get("Features", "")).split()
    return ", ".join([name, *(feature for feature in relevant if feature in features)])


def write(
    directory: pathlib.Path,
    title: str,
    facts: Mapping[str, Any],
    tables: Sequence[Table] = (),
    panels: Mapping[str, Mapping[str, float]] | None = None,
    section: Sequence[str] = (),
) -> None:
    """Write report.json, report.md and report.png.

    Args:
        directory: for the three files.
        title: of report.md and report.png.
        facts: content of report.json. Its "notes" become sentences of report.md, its "operators" folded tables.
        tables: of report.md: heading, column names, and rows. Default: one table of the facts.
        panels: of report.png: bars by name. Default: the latency and the most frequent operators.
        section: lines of report.md after its notes.
    """
    facts = {**facts, "versions": versions()}
    (directory / "report.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if not tables:
        shown = [
            (_words(name), _text(value))
            for name, value in facts.items()
            if name not in ("operators", "notes") and (name, value) not in (("threshold", None), ("multi_label", False))
        ]
        tables = [("", ("measure", "value"), shown)]
    else:
        tables = [("", ("", ""), [("weights", facts["weights"]), ("license", _text(facts["license"]))]), *tables]
    page = render(
        "report.md",
        title=markdown_text(title),
        tables=[(heading, _table(columns, rows)) for heading, columns, rows in tables],
        notes=facts.get("notes", ()),
        section=section,
        operators=[
            (f"{caption}: {sum(counts.values()):,}", _table(("operator", "number"), list(counts.items())))
            for caption, counts in _operators(facts).items()
            if counts
        ],
    )
    (directory / "report.md").write_text(page, encoding="utf-8")
    if panels is None:
        panels = {"latency of one image, ms": facts.get("latency_ms", {}), "operators": facts["operators"]}
    _draw(title, panels, directory / "report.png")


@dataclasses.dataclass(frozen=True)
class Extra:
    """Parts of the report of one export beside those of any."""

    notes: Sequence[str] = ()
    """Sentences of report.md, also in report.json."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further content of report.json."""
    columns: Mapping[str, Callable[[Mapping[str, Any]], object]] = dataclasses.field(default_factory=dict)
    """Further columns of the table of formats, each with a function from measurements to a cell."""
    tables: Sequence[Table] = ()
    panels: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    raw_pixels: bool = False
    """Whether the files take pixels 0..255, uint8."""
    takes_files: bool = False
    """Whether it takes image files, which the caller does not prepare."""


def measurements(
    size: int,
    found: Mapping[str, Any],
    latency_of: Callable[[int], float],
    operators: Mapping[str, int],
    started: float,
) -> dict[str, Any]:
    """Return the measurements that the report of any format has, beside those `found` of its outputs.

    `latency_of` gives milliseconds of one image on a number of threads; `started` is time.perf_counter() then.
    """
    return {
        "bytes": size,
        **found,
        "latency_ms": {f"{threads}_threads": latency_of(threads) for threads in (1, 2)},
        "operators": operators,
        "export_seconds": round(time.perf_counter() - started, 1),
    }


def format_table(files: Mapping[Any, tuple[pathlib.Path, Mapping[str, Any]]], processor: str = "") -> str:
    """Return sizes and differences of all formats as a table; `processor` says what the files are for."""
    rows = [
        (name, f"{path.stat().st_size / 1e6:,.2f}", f"{found['max_abs_diff']:.2g}", f"{found['agreement']:.1%}",
         "" if found["accuracy"] is None else f"{found['accuracy']:.1%}")
        for name, (path, found) in files.items()
    ]  # fmt: skip
    table = parity.as_table(rows, ("format", "MB", "max |logit diff|", "agreement", "accuracy"))
    paths = [path for path, _ in files.values()]
    names = ", ".join(path.name for path in paths)
    return f"{table}\nWritten to {paths[0].parent}{f' ({processor})' if processor else ''}: {names}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return markdown_table(columns, [[str(cell) for cell in row] for row in rows], num_text_columns=len(columns))


def _operators(facts: Mapping[str, Any]) -> dict[str, Mapping[str, int]]:
    if "operators" in facts:
        return {"Operators": facts["operators"]}
    return {f"Operators of {kind}": row["operators"] for kind, row in facts.get("formats", {}).items()}


def _words(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))


def accuracy_text(accuracy: float | None) -> str:
    return "unknown" if accuracy is None else f"{accuracy:.1%}"


def loss_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Cells with the images lost and gained, and whether chance explains it."""
    if row["mcnemar_p"] is None:
        return ("unknown",) * 3
    return f"{row['lost']:,}", f"{row['gained']:,}", f"{row['mcnemar_p']:.2g}"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(name)} {_text(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(part) for part in value)
    return "unknown" if value is None else str(value)


def _draw(title: str, panels: Mapping[str, Mapping[str, float]], path: pathlib.Path) -> None:
    shown = {name: dict(list(bars.items())[:_MOST_BARS]) for name, bars in panels.items() if bars}
    heights = [1.0 + 0.28 * len(bars) for bars in shown.values()]
    figure = matplotlib.figure.Figure(figsize=(9, 0.5 + sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    all_axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, bars) in zip(all_axes, shown.items(), strict=True):
        drawn = axes.barh([_words(bar) for bar in bars], list(bars.values()), color="tab:blue")
        axes.bar_label(drawn, labels=[f"{value:.3g}" for value in bars.values()], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(name, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=100)

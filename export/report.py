"""The verification report of an export: report.json for programs, report.md and report.png for people."""

import collections
import json
import pathlib
import platform
from collections.abc import Iterable, Mapping, Sequence

import keras
import matplotlib.figure
import numpy as np
import tensorflow as tf

# Bars in one panel of the picture.
_MOST_BARS = 15


def operator_table(names: Iterable[str]) -> dict[str, int]:
    """How often each name is there, the most frequent first."""
    return dict(sorted(collections.Counter(names).items(), key=lambda item: (-item[1], item[0])))


def typical(seconds: Sequence[float]) -> float:
    """Milliseconds of a call: the lower quartile, for what else the machine does makes calls slower, never faster."""
    return float(f"{1e3 * np.quantile(seconds, 0.25):.4g}")


def versions() -> dict[str, str]:
    """What the numbers of a report depend on."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "processor": _processor(),
    }


def _processor() -> str:
    """In words, with the features that decide the speed of small numbers."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = info.get("model name", platform.machine())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd")
    features = info.get("flags", info.get("Features", "")).split()
    return ", ".join([name, *(feature for feature in wanted if feature in features)])


def write(
    directory: pathlib.Path,
    title: str,
    facts: Mapping,
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = (),
    panels: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Write the three files.

    Args:
        directory: where.
        title: of the page.
        facts: everything, as JSON can hold it.
        tables: of the page, each with a heading, the names of its columns, and its rows. Without, the facts are one.
        panels: of the picture, bars by name; without, the latency and the most frequent operators among the facts.
    """
    facts = {**facts, "versions": versions()}
    (directory / "report.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if not tables:
        tables = [("", ("measure", "value"), [(name, _shown(value)) for name, value in facts.items()])]
    lines = [f"# {title}", ""]
    for heading, columns, rows in tables:
        lines += [f"## {heading}", ""] if heading else []
        lines += [_row(columns), _row("---" for _ in columns), *(_row(row) for row in rows), ""]
    for sentence in facts.get("notes", ()):
        lines += [sentence, ""]
    lines += ["![report](report.png)", ""]
    (directory / "report.md").write_text("\n".join(lines), encoding="utf-8")
    if panels is None:
        panels = {"latency of one image, ms": facts.get("latency_ms", {}), "operators": facts["operators"]}
    _draw(title, panels, directory / "report.png")


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _shown(value) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_shown(part) for part in value)
    return "not known" if value is None else str(value)


def _draw(title: str, panels: Mapping[str, Mapping[str, float]], path: pathlib.Path) -> None:
    """One row of horizontal bars below each other for each panel that has any."""
    shown = {name: dict(list(bars.items())[:_MOST_BARS]) for name, bars in panels.items() if bars}
    heights = [1.0 + 0.28 * len(bars) for bars in shown.values()]
    figure = matplotlib.figure.Figure(figsize=(9, 0.5 + sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    all_axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, bars) in zip(all_axes, shown.items(), strict=True):
        drawn = axes.barh(list(bars), list(bars.values()), color="tab:blue")
        axes.bar_label(drawn, labels=[f"{value:.4g}" for value in bars.values()], padding=3, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(name, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=100)

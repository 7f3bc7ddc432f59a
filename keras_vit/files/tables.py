"""Tables for the terminal and Markdown, and the numbers and names in them."""

import math
from collections.abc import Sequence

# Characters of a column; a longer text is not aligned.
_WIDEST = 60


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int = 0) -> str:
    """A Markdown table with aligned columns, right-justified except for the first `num_text_columns`."""
    header, *rows = ([_cell(text) for text in row] for row in (header, *rows))
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        justified = (
            cell.ljust(width) if column < num_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(justified)} |"

    rules = (
        "-" * (width + 2) if column < num_text_columns else "-" * (width + 1) + ":"
        for column, width in enumerate(widths)
    )
    return "\n".join([line(header), f"|{'|'.join(rules)}|", *map(line, rows)])


def _cell(text: str) -> str:
    """The text in one line, with escaped bars."""
    return " ".join(text.split()).replace("|", "\\|")


def rounded_to(value: float, interval: Sequence[float]) -> tuple[str, str]:
    """A value and its interval as texts, rounded so that the width of the interval has two digits.

    An example is 0.983, 0.969 to 0.994.
    """
    width = interval[1] - interval[0]
    digits = min(max(2 - math.ceil(math.log10(width)), 0), 6) if width > 0.0 else 3
    return f"{value:.{digits}f}", f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def with_interval(value: float | None, interval: Sequence[float] | None = None) -> str:
    """A share or a count with the ends of its interval, for a cell of a table; a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if interval is None or interval[0] == interval[1]:
        return f"{value:.3f}"
    number, ends = rounded_to(value, interval)
    return f"{number} ({ends})"


def short_name(path: str) -> str:
    """The last part of a path or address, for a title: no folders of this machine. A prefix such as folder: stays.

    Of a file in a run directory, the directory: "runs/demo/model.keras" is "demo".
    """
    prefix, colon, rest = path.partition(":")
    if not colon or len(prefix) < 2 or rest.startswith("//"):  # C:\... and gs://... are paths
        prefix, colon, rest = "", "", path
    parts = rest.replace("\\", "/").rstrip("/").split("/")
    if parts[-1] == "model.keras" and len(parts) > 1:
        parts.pop()
    return f"{prefix}{colon}{parts[-1] or rest}"

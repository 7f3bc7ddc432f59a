"""Tables for the terminal, Markdown and CSV, and the numbers and names in them. No name is trusted."""

import csv
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from keras_vit.errors import printable

_WIDEST = 60  # characters of a column; a longer text is not aligned
# How a formula begins, also in full width; numbers begin so too. A quote before it is doubled, so that it stays.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uFF1D\uFF0B\uFF0D\uFF20]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text_columns: int = 0) -> str:
    """Return a Markdown table with aligned columns, right-justified except for the first `num_text_columns`."""
    header, *rows = ([markdown_text(" ".join(text.split())) for text in row] for row in (header, *rows))
    widths = [min(max(map(_width, column)), _WIDEST) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        justified = (
            f"{cell}{blanks}" if column < num_text_columns else f"{blanks}{cell}"
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
            for blanks in [" " * (width - _width(cell))]
        )
        return f"| {' | '.join(justified)} |"

    rules = (
        "-" * (width + 2) if column < num_text_columns else "-" * (width + 1) + ":"
        for column, width in enumerate(widths)
    )
    return "\n".join([line(header), f"|{'|'.join(rules)}|", *map(line, rows)])


def _width(text: str) -> int:
    """Return the columns of a terminal: Chinese, Japanese and Korean characters take two, marks on a letter none."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def markdown_text(text: str) -> str:
    """Return a name as Markdown shows it: without links, code, HTML and control characters, and with escaped bars."""
    return printable(re.sub(r"[\\`\[|]|<(?=\S)", r"\\\g<0>", text))  # "< 0.1%" is no HTML


class CsvWriter:
    """A csv.writer whose cells are no formulas in a spreadsheet: it puts ' before those that begin like one (OWASP).

    raw: write cells as they are, for programs.
    """

    def __init__(self, stream: TextIO, *, raw: bool = False) -> None:
        self._writer, self._raw = csv.writer(stream), raw

    def writerow(self, row: Sequence[object]) -> None:
        """Write a row."""
        self._writer.writerow(row if self._raw else [_harmless(cell) for cell in row])


def write_csv(path: Path, rows: Iterable[Sequence[object]], *, raw: bool = False, encoding: str = "utf-8") -> None:
    """Write a CSV file, the header first, by `CsvWriter`."""
    with path.open("w", newline="", encoding=encoding, errors="replace") as stream:
        writer = CsvWriter(stream, raw=raw)
        for row in rows:
            writer.writerow(row)


def _harmless(cell: object) -> object:
    is_formula = isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if is_formula else cell


def cell_of_csv(text: str) -> str:
    """Return the text that `CsvWriter` was given for a cell."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text, 1) else text


def rounded_to(value: float, interval: Sequence[float]) -> tuple[str, str]:
    """Return a value and its interval, such as 0.983, 0.969 to 0.994: the width of the interval has two digits."""
    width = interval[1] - interval[0]
    digits = min(max(2 - math.ceil(math.log10(width)), 0), 6) if width > 0.0 else 3
    return f"{value:.{digits}f}", f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def with_interval(value: float | None, interval: Sequence[float] | None = None) -> str:
    """Return a share or a count with the ends of its interval, for a cell of a table; a dash for None."""
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

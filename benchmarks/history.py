"""The history of the measurements: what a change cost in speed, on the same processor."""

import csv
import dataclasses
import io
import math
import pathlib
import platform
from collections.abc import Sequence

from benchmarks.case import Case
from benchmarks.comparison import LIMIT, Result, rate
from keras_vit import UserError
from keras_vit.files.atomic import write_text

_LARGEST_LOSS = 0.03  # of the share of the limit; less is noise


@dataclasses.dataclass(frozen=True)
class Row:
    """One peer in one case on one day."""

    date: str
    processor: str
    case: str
    peer: str
    milliseconds: float
    """Median time of a call."""
    of_limit: float
    """Operations per second as a share of those of the matrix product in the same run."""


def processor() -> str:
    """Name of the processor."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())


def rows_of(date: str, processor: str, case: Case, results: Sequence[Result]) -> list[Row]:
    """The rows of a case, for every peer that ran; none if the matrix product did not run."""
    done = {result.peer: result for result in results if result.failure is None}
    if LIMIT not in done:
        return []
    title = f"{case.title}, {case.threads} threads"
    limit = rate(done.pop(LIMIT), case)
    return [
        Row(date, processor, title, peer, round(1e3 * result.median, 3), round(rate(result, case) / limit, 4))
        for peer, result in done.items()
    ]


def record(path: pathlib.Path, new: Sequence[Row]) -> list[str]:
    """Append rows to a CSV file, and return a sentence for each peer that lost speed, or could not be compared.

    A row is compared with the latest one of the same case, peer and processor, by its share of the limit. Runs of
    different processors are not compared. Raises UserError if the file is no such history.
    """
    known, sentences = _read(path), []
    for row in new:
        before = [old for old in known if (old.case, old.peer) == (row.case, row.peer)]
        same = [old for old in before if old.processor == row.processor]
        if same and row.of_limit < same[-1].of_limit - _LARGEST_LOSS:
            sentences.append(
                f"{row.peer} is slower than on {same[-1].date}: {row.of_limit:.0%} of the limit instead of "
                f"{same[-1].of_limit:.0%} ({row.case})."
            )
        if before and not same:
            sentences.append(f"{row.peer} was measured on {before[-1].processor} only; not compared ({row.case}).")
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Row))
    writer.writerows(dataclasses.astuple(row) for row in (*known, *new))
    write_text(path, lines.getvalue())
    return sentences


def _read(path: pathlib.Path) -> list[Row]:
    if not path.exists():
        return []
    try:
        table = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        rows = [
            Row(**{**row, "milliseconds": float(row["milliseconds"]), "of_limit": float(row["of_limit"])})
            for row in table
        ]
        if not all(math.isfinite(row.of_limit) for row in rows):
            raise ValueError("a share is not finite")
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise UserError(f"{path} is no history of measurements ({error}); move it away, or give --output.") from error
    return rows

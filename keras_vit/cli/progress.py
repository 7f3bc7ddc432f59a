"""How far a long job is: on a terminal one line that is rewritten in place, elsewhere a line every half minute.

The line of a terminal is gone when the job is done. A log has no control characters, and nothing of a job that takes
less than half a minute.
"""

import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import tqdm

# Seconds after which a log has another line, and between two looks at the clock.
SILENT_SECONDS, _LOOK_SECONDS = 30.0, 1.0

Item = TypeVar("Item")
_OPEN: "list[Progress]" = []  # those that are shown now, the innermost one last


class Progress:
    """A job, as a context manager: `with Progress("Features", 796, "images") as progress: progress.update(32)`.

    One within another takes its place and names both: "int8 (3 of 7): verifying".

    Attributes:
        doing: what is done, which may change.
    """

    def __init__(self, doing: str, total: int | None = None, unit: str = "images", *, done: int = 0):
        """Args:
        doing: what is done.
        total: number of parts; None if it is not known, then the time is shown.
        unit: what the parts are, in the plural.
        done: parts that were done before.
        """
        self.doing, self._total, self._unit = doing, total, unit
        self._done = self._first = done
        self._ended = threading.Event()
        self._bar: tqdm.tqdm

    def __enter__(self) -> "Progress":
        self._begin = self._last = time.monotonic()
        self._log = sys.stdout
        if _OPEN:
            outer = _OPEN[-1]
            # A library inside may be silenced by another stdout.
            self._last, self._log = outer._last, outer._log
            if not outer._bar.disable:
                outer._bar.clear()
        _OPEN.append(self)
        self._bar = tqdm.tqdm(
            total=self._total,
            initial=self._done,
            desc=f"{self._names()}: ",
            unit=f" {self._unit}",
            file=self._log,
            dynamic_ncols=True,
            position=0,
            leave=False,
            disable=not self._log.isatty(),
            bar_format="{desc}{n_fmt}/{total_fmt}{unit}, {remaining} left |{bar}|"
            if self._total
            else "{desc}{elapsed}",
        )
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()
        self._bar.close()
        _OPEN.remove(self)
        if _OPEN:
            _OPEN[-1]._last = self._last

    def update(self, count: int = 1) -> None:
        """Note that as many parts more are done."""
        self._done += count
        self._bar.update(count)

    @property
    def text(self) -> str:
        """Return a line of a log."""
        seconds, done = time.monotonic() - self._begin, self._done - self._first
        if self._total is None:
            return f"{self._names()}: {duration(seconds)} so far"
        left = f", {duration(seconds / done * (self._total - self._done))} left" if done else ""
        return f"{self._names()}: {self._done:,} of {self._total:,} {self._unit}{left}"

    def _names(self) -> str:
        return ": ".join(each.doing for each in _OPEN if each.doing)

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            if _OPEN[-1] is not self:
                continue
            if not self._bar.disable:
                self._bar.set_description_str(f"{self._names()}: ")
            elif time.monotonic() - self._last >= SILENT_SECONDS:
                self._last = time.monotonic()
                print(self.text, file=self._log, flush=True)


def tracked(items: Iterable[Item], doing: str, total: int | None = None, unit: str = "images") -> Iterator[Item]:
    """Yield the items, with a `Progress` of their number; `total` is for those without a length."""
    count = len(items) if isinstance(items, Collection) else total
    with Progress(doing, count, unit) as progress:
        for item in items:
            yield item
            progress.update()


def duration(seconds: float) -> str:
    """Return a time for people, such as 12 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""Native libraries that print to stderr for nothing: held back, but not lost when the process dies of what they say."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

# Keeps the last 64 KiB of its input, and prints them when that ends.
_HOLDER = """
import sys
kept = b""
while piece := sys.stdin.buffer.raw.read(65536):
    kept = (kept + piece)[-65536:]
sys.stderr.buffer.write(kept)
"""


@contextlib.contextmanager
def native_stderr_silenced() -> Iterator[None]:
    """Holds back what is written to file descriptor 2; Python's own errors are raised as ever.

    A process of its own holds the text and dies with it at the end of the block. If this process ends within the block,
    as by an abort of a library, the other one prints the text. Blocks may overlap in threads: the descriptor is given
    back at the end of the last one.
    """
    _silence.begin()
    try:
        yield
    finally:
        _silence.end()


class _Silence:
    """How many blocks hold stderr back, and what gives it back."""

    def __init__(self) -> None:
        self._lock, self._blocks = threading.Lock(), 0
        self._saved: int | None = None
        self._holder: subprocess.Popen | None = None

    def begin(self) -> None:
        with self._lock:
            if not self._blocks:
                self._redirect()
            self._blocks += 1

    def end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks and self._holder is not None:
                self._holder.kill()  # first: at the end of its input it would print
                self._holder.wait()
                assert self._saved is not None
                os.dup2(self._saved, 2)
                os.close(self._saved)
                self._holder = None

    def _redirect(self) -> None:
        try:
            saved = os.dup(2)
        except OSError:  # a process without stderr has nothing to hold back
            return
        reading, writing = os.pipe()
        try:
            # In a session of its own, so that Ctrl-C does not end it before this process.
            self._holder = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _HOLDER],
                stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            os.dup2(writing, 2)
            self._saved = saved
        except OSError:  # no process can be started: better loud than without stderr
            os.close(saved)
        finally:
            os.close(reading)
            os.close(writing)


_silence = _Silence()

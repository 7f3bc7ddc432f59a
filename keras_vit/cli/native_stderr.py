"""Suppress the stderr output of native libraries, but print it if the process dies."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

# Keeps the last 64 KiB of its input and prints them at the end of the input.
_HOLDER = """
import sys
kept = b""
while piece := sys.stdin.buffer.raw.read(65536):
    kept = (kept + piece)[-65536:]
sys.stderr.buffer.write(kept)
"""


@contextlib.contextmanager
def native_stderr_silenced() -> Iterator[None]:
    """Suppress writes to file descriptor 2 inside the block. Python exceptions are raised as usual.

    A separate process buffers the text and is killed at the end of the block. If this process dies within the block,
    for example by an abort in a library, the other process prints the text. Blocks may overlap in threads: the
    descriptor is restored at the end of the last one.
    """
    _silence.begin()
    try:
        yield
    finally:
        _silence.end()


class _Silence:
    """The number of active blocks, and the state to restore stderr."""

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
                self._holder.kill()  # before restoring stderr: at the end of its input it would print
                self._holder.wait()
                assert self._saved is not None
                os.dup2(self._saved, 2)
                os.close(self._saved)
                self._holder = None

    def _redirect(self) -> None:
        try:
            saved = os.dup(2)
        except OSError:  # the process has no stderr
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
        except OSError:  # no process can be started: leave stderr as it is
            os.close(saved)
        finally:
            os.close(reading)
            os.close(writing)


_silence = _Silence()

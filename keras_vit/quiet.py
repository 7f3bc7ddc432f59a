"""Importing Keras without the build remarks of its backend."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def native_stderr_silenced() -> Iterator[None]:
    """Sends file descriptor 2 nowhere for a moment; Python's own errors are raised as ever.

    TensorFlow's libraries print remarks on oneDNN while they are loaded, before any log level is read, and a command
    whose error is one sentence should not bury it under them. What they log later obeys TF_CPP_MIN_LOG_LEVEL.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        saved = os.dup(2)
    except OSError:  # a process without stderr has nothing to silence
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)

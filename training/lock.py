"""The lock of a run directory: one process writes into it. Imports neither TensorFlow nor Keras."""

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Iterator

from keras_vit import UserError
from keras_vit.files.remote import is_remote

# Name of the file that a process locks while it writes into a run directory, or its ending.
LOCK = ".lock"
# Seconds that a process waits for the lock of another: one that was just killed holds it a moment longer.
_LOCK_WAIT = 5.0
# Errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextlib.contextmanager
def locked(folder: pathlib.Path, name: str = LOCK) -> Iterator[None]:
    """Hold an exclusive lock on a directory, which is created if needed.

    The operating system releases the lock when the process ends, so a lock file that a killed process left behind does
    no harm. It works across machines on file systems with locks, such as NFS, but not on a mounted bucket.

    Args:
        folder: the directory.
        name: of the lock file in it; different names are independent locks.

    Raises UserError if another process still holds the lock after some seconds.
    """
    if is_remote(folder):
        print(f"{folder} has no locks; make sure that no other process trains there.")
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _lock_taken(folder / name):
            yield
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


@contextlib.contextmanager
def _lock_taken(file: pathlib.Path) -> Iterator[None]:
    end = time.monotonic() + _LOCK_WAIT
    while True:
        with open(file, "a+", encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _lock_held(file) from None
                time.sleep(0.1)
                continue
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                print(f"The file system of {file.parent} has no locks; make sure that no other process trains there.")
            if not _is_same_file(file, stream.fileno()):
                continue  # its last holder removed it between open and flock
            _warn_of_other_machine(file)
            stream.truncate(0)
            stream.write(f"{os.getpid()} on {socket.gethostname()}")
            stream.flush()
            try:
                yield
            finally:
                file.unlink(missing_ok=True)
            return


def check_unlocked(folder: pathlib.Path) -> None:
    """Raise UserError if another process holds the lock of a directory for some seconds; takes and creates nothing."""
    file = folder / LOCK
    end = time.monotonic() + _LOCK_WAIT
    with contextlib.suppress(OSError), open(file, "rb") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise _lock_held(file) from None
                time.sleep(0.1)


def _lock_held(file: pathlib.Path) -> UserError:
    return UserError(
        f"Another process, {_lock_holder(file)}, writes into {file.parent}; wait until it ends, or give another "
        "--workdir."
    )


def _is_same_file(file: pathlib.Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock_holder(file: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")[:200].strip() or "which has just started"
    return "which is just ending"


def _warn_of_other_machine(file: pathlib.Path) -> None:
    """Warn of a lock file left by another machine: its process was killed, or the file system hides its lock."""
    holder = _lock_holder(file)
    if " on " in holder and not holder.endswith(f" on {socket.gethostname()}"):
        print(
            f"Process {holder} did not remove its lock of {file.parent}. If it still runs, end one of the two: some "
            "file systems, such as a mounted bucket, do not share locks between machines."
        )

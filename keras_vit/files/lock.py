"""The lock of a folder: one process at a time writes into it."""

import contextlib
import errno
import os
import pathlib
import socket
from collections.abc import Iterator

import filelock

from keras_vit.errors import UserError
from keras_vit.files.remote import is_remote

# Name of the file that a process locks while it writes into a folder, or its ending.
LOCK = ".lock"
# Seconds that a process waits for the lock of another: one that was just killed holds it a moment longer.
_LOCK_WAIT = 5.0
# Errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextlib.contextmanager
def locked(folder: pathlib.Path, name: str = LOCK) -> Iterator[None]:
    """Hold an exclusive lock on a folder, which is created if needed, and removed again if nothing was written.

    The operating system releases the lock when the process ends, so a lock file that a killed process left behind does
    no harm. It works across machines on file systems with locks, such as NFS, but not on a mounted bucket.

    Args:
        folder: the folder.
        name: of the lock file in it; different names are independent locks.

    Raises UserError if another process still holds the lock after some seconds.
    """
    if is_remote(folder):
        print(f"{folder} has no locks; make sure that no other process trains there.")
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    lock = filelock.FileLock(file, timeout=_LOCK_WAIT, fallback_to_soft=False)
    try:
        try:
            lock.acquire()
        except filelock.Timeout:
            raise _held(file) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"The file system of {folder} has no locks; make sure that no other process trains there.")
        else:
            _warn_of_other_machine(file)
            file.write_text(f"{os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        try:
            yield
        finally:
            file.unlink(missing_ok=True)  # before the release: a waiter looks for it again
            lock.release()
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


def check_unlocked(folder: pathlib.Path) -> None:
    """Raise UserError if another process holds the lock of a folder for some seconds. Creates nothing."""
    file = folder / LOCK
    try:
        if file.exists():
            filelock.FileLock(file, timeout=_LOCK_WAIT, fallback_to_soft=False).acquire().lock.release()
    except filelock.Timeout:
        raise _held(file) from None
    except OSError:  # a folder that this user may not write
        return


def _held(file: pathlib.Path) -> UserError:
    return UserError(
        f"Another process, {_holder(file)}, writes into {file.parent}; wait until it ends, or give another --workdir."
    )


def _holder(file: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")[:200].strip() or "which has just started"
    return "which is just ending"


def _warn_of_other_machine(file: pathlib.Path) -> None:
    """Warn of a lock file left by another machine: its process was killed, or the file system hides its lock."""
    holder = _holder(file)
    if " on " in holder and not holder.endswith(f" on {socket.gethostname()}"):
        print(
            f"Process {holder} did not remove its lock of {file.parent}. If it still runs, end one of the two: some "
            "file systems, such as a mounted bucket, do not share locks between machines."
        )

"""Atomic writes, where a file or folder appears under its name only when it is complete; and the lock of a folder.

What is not complete lies in a folder `.building` beside it, with a lock that its process holds. The next write there
removes what killed processes left. In a bucket, a file is written locally, uploaded under a temporary name, compared by
size, and renamed.
"""

import contextlib
import errno
import hashlib
import os
import pathlib
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator

import filelock

from keras_vit.errors import UserError, explained
from keras_vit.files.remote import RemotePath, is_remote

# Name of the file that a process locks while it writes into a folder, or its ending.
LOCK = ".lock"
_BUILDING = ".building"
_TEMPORARY = re.compile(r".+\.\d+\.tmp(\.\w+)?")  # of uploads, and of earlier versions
_WAIT = 5.0  # seconds to wait for the lock of another process: one that was just killed holds it a moment longer
_ATTEMPTS = 100  # times that a folder may be removed between its creation and that of the lock in it
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)  # errors of a file system without locks


def is_temporary(path: pathlib.Path) -> bool:
    """Return whether the file or folder has a name of those that a killed process leaves behind."""
    return path.name == _BUILDING or _TEMPORARY.fullmatch(path.name) is not None


def remove_temporary(folder: pathlib.Path) -> None:
    """Remove what killed processes left in a folder into which no other process writes, if there is such a folder."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name == _BUILDING:
            _remove_abandoned(entry)
        elif is_temporary(entry):
            entry.unlink(missing_ok=True)


@contextlib.contextmanager
def _stage(folder: pathlib.Path, name: str | None = None) -> Iterator[pathlib.Path]:
    """Yield a new folder inside `folder`/.building and remove it at the end, and those of killed processes before.

    name: of what is built, if only one process may build it; another one raises filelock.Timeout.
    """
    building = folder / _BUILDING
    _remove_abandoned(building)
    unique = secrets.token_hex(8) if name is None else hashlib.sha256(name.encode(errors="replace")).hexdigest()[:16]
    stage = building / unique
    try:
        with _locked(stage.with_suffix(LOCK)):
            try:
                shutil.rmtree(stage, ignore_errors=True)  # of a process that was killed while this one waited
                stage.mkdir(parents=True)
                yield stage
            finally:
                _remove(stage)
    finally:
        with contextlib.suppress(OSError):  # another one is built
            building.rmdir()


def _locked(file: pathlib.Path) -> filelock.AcquireReturnProxy:
    """Acquire the lock of a file, whose folder another process may be removing at this moment."""
    lock = filelock.FileLock(file, timeout=_WAIT)
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            file.parent.mkdir(exist_ok=True)
            return lock.acquire()
    return lock.acquire()


def _remove_abandoned(building: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # another process may remove the folder at any moment, or build in it
        for lock in [entry for entry in building.iterdir() if entry.suffix == LOCK]:
            with contextlib.suppress(OSError, filelock.Timeout), filelock.FileLock(lock, timeout=0):
                _remove(lock.with_suffix(""))
        building.rmdir()


def _remove(stage: pathlib.Path) -> None:
    shutil.rmtree(stage, ignore_errors=True)
    stage.with_suffix(LOCK).unlink(missing_ok=True)


@contextlib.contextmanager
def _created(folder: pathlib.Path) -> Iterator[None]:
    """Create a folder, with those above it, and at the end remove those of them that are empty."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()


@contextlib.contextmanager
def atomic_write(
    path: pathlib.Path, final_path: Callable[[pathlib.Path], pathlib.Path] | None = None
) -> Iterator[pathlib.Path]:
    """Yield a temporary path of the same name; on success it is synced to disk and moved, on failure removed.

    Args:
        path: of the file; for one in a bucket the temporary path is a local one.
        final_path: takes the temporary path of the complete file and returns the path to move it to, for names that
            depend on the content; default: `path`.
    """
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory() as folder:
            local = pathlib.Path(folder) / path.name
            yield local
            target = path if final_path is None else final_path(local)
            assert isinstance(target, RemotePath)
            target.upload(local)
        return
    with _stage(path.parent) as stage:
        temporary = stage / path.name
        yield temporary
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path if final_path is None else final_path(temporary))


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary folder; it is moved to `path` on success and removed on failure.

    Of a path in a bucket, it is a local folder, whose files are uploaded one after the other.

    Raises UserError if another process writes this folder, or has written it in the meantime.
    """
    if isinstance(path, RemotePath):
        with staged(path) as stage:
            yield stage
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = f"Another process writes {path}; wait until it ends, or choose another folder."
    with explained(busy, filelock.Timeout), _stage(path.parent, path.name) as stage:
        _check_free(path)
        yield stage
        try:
            os.rename(stage, path)
        except OSError:
            _check_free(path)
            raise


def _check_free(path: pathlib.Path) -> None:
    if path.exists() and not (path.is_dir() and next(path.iterdir(), None) is None):
        raise UserError(f"{path} exists by now; choose another folder, or delete it.")


@contextlib.contextmanager
def staged(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield an empty folder inside `directory`; on success its files are moved into `directory`.

    A file there of the same name is replaced; a folder of the same name keeps its other files. On failure nothing
    remains, including parent folders created for it. For a directory in a bucket the folder is a local one, and its
    files are uploaded one after the other, a saved_model.pb last.
    """
    if isinstance(directory, RemotePath):
        with tempfile.TemporaryDirectory() as local:
            yield pathlib.Path(local)
            upload_folder(pathlib.Path(local), directory)
        return
    with _created(directory), _stage(directory) as stage:
        yield stage
        _move_content(stage, directory)


def _move_content(folder: pathlib.Path, directory: pathlib.Path) -> None:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and (directory / entry.name).is_dir():
            _move_content(entry, directory / entry.name)
        else:
            os.replace(entry, directory / entry.name)


def upload_folder(folder: pathlib.Path, directory: RemotePath) -> None:
    """Upload the files of a local folder and its subfolders; a saved_model.pb last, which servers look for."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    for file in sorted(files, key=lambda file: file.name == "saved_model.pb"):
        target = directory / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.upload(file)


# The lock of a folder: one process at a time writes into it.


@contextlib.contextmanager
def locked(folder: pathlib.Path, name: str = LOCK) -> Iterator[None]:
    """Hold an exclusive lock on a folder, which is created if needed, and removed again if nothing was written.

    The operating system releases the lock when the process ends, so a lock file that a killed process left behind does
    no harm. It works across machines on file systems with locks, such as NFS, but not on a mounted bucket.

    name: of the lock file in it; different names are independent locks. Raises UserError if another process still holds
    the lock after some seconds.
    """
    if is_remote(folder):
        print(f"{folder} has no locks; make sure that no other process trains there.")
        yield
        return
    file = folder / name
    lock = filelock.FileLock(file, timeout=_WAIT, fallback_to_soft=False)
    with _created(folder):
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


def check_unlocked(folder: pathlib.Path) -> None:
    """Raise UserError if another process holds the lock of a folder for some seconds. Creates nothing."""
    file = folder / LOCK
    try:
        if file.exists():
            filelock.FileLock(file, timeout=_WAIT, fallback_to_soft=False).acquire().lock.release()
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

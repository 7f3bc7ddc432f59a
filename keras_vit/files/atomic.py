"""Atomic writes: a file or folder appears under its name only when it is complete.

In a bucket, a file is written locally, uploaded under a temporary name, compared by size, and renamed.
"""

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator

from keras_vit.files.remote import RemotePath, temporary_beside

_TEMPORARY = re.compile(r".+\.\d+\.tmp(\.\w+)?")


def is_temporary(path: pathlib.Path) -> bool:
    """Whether the file has a name of `temporary_beside`; a killed process leaves such files behind."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_temporary(folder: pathlib.Path) -> None:
    """Remove the temporary files in a folder into which no other process writes, if there is such a folder."""
    for file in folder.iterdir() if folder.is_dir() else ():
        if is_temporary(file):
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_write(
    path: pathlib.Path, final_path: Callable[[pathlib.Path], pathlib.Path] | None = None
) -> Iterator[pathlib.Path]:
    """Yield a temporary path in the same folder; on success it is synced to disk and renamed, on failure removed.

    Args:
        path: of the file; for one in a bucket the temporary path is a local one.
        final_path: takes the temporary path of the complete file and returns the path to rename it to, for names that
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
    temporary = temporary_beside(path)
    try:
        yield temporary
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path if final_path is None else final_path(temporary))
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary folder beside `path`; it is renamed on success and removed on failure.

    Of a path in a bucket, it is a local folder, whose files are uploaded one after the other.

    Raises OSError (EEXIST or ENOTEMPTY) if another process has written a folder of that name in the meantime.
    """
    if isinstance(path, RemotePath):
        with staged(path) as stage:
            yield stage
        return
    temporary = temporary_beside(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=directory) as stage:
            yield pathlib.Path(stage)
            _move_content(pathlib.Path(stage), directory)
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty after success
                path.rmdir()


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

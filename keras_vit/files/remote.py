"""Paths in a bucket, such as gs://bucket/run: everything with a scheme that TensorFlow has a file system for.

`to_path` makes a `pathlib.Path` of any path; with a scheme it is a `RemotePath`, whose methods ask `tf.io.gfile`. So
TensorFlow is imported only for paths with a scheme. What fails for a moment is tried again. Code that needs a local
file uses `local_copy` to read, and `keras_vit.files.atomic` to write.
"""

import atexit
import contextlib
import errno
import fnmatch
import glob
import hashlib
import io
import os
import pathlib
import random
import re
import secrets
import shutil
import stat
import tempfile
import time
import types
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from keras_vit.errors import UserError, near_path, reason_of

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
PAUSES = (0.1, 0.4, 1.6, 6.4)  # seconds before the second and each later attempt, half of it at random
# Names of TensorFlow's errors that another attempt does not change, and the errno of each.
_LASTING = {
    "NotFoundError": errno.ENOENT,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "AlreadyExistsError": errno.EEXIST,
    "UnimplementedError": errno.ENOSYS,
    "InvalidArgumentError": errno.EINVAL,
}
_LASTING_OS_ERRORS = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)

Result = TypeVar("Result")


class RemoteError(OSError, UserError):
    """A path of a bucket that cannot be read or written: errno, what is wrong, path."""

    def __str__(self) -> str:
        advice = (
            "TensorFlow has no file system of this scheme"
            if self.errno == errno.ENOSYS
            else "check the name of the bucket, and your permission to read and write there"
        )
        return f"{self.filename} cannot be read or written ({self.strerror}); {advice}."


class RemoteNotFound(RemoteError, FileNotFoundError):
    """There is no such object, folder or bucket."""


class RemotePath(pathlib.PosixPath):
    """A path with a scheme. Of the methods that ask a file system, only those below are for it."""

    def __str__(self) -> str:
        return _SCHEME.sub(r"\1://", super().__str__(), count=1)

    def __fspath__(self) -> str:
        return str(self)

    def _ask(self, function: str) -> Any:
        return ask_gfile(self, lambda gfile: getattr(gfile, function)(str(self)))

    def exists(self, **_) -> bool:
        return self._ask("exists")

    def is_dir(self, **_) -> bool:
        return self._is_directory() is True

    def is_file(self, **_) -> bool:
        return self._is_directory() is False

    def _is_directory(self) -> bool | None:
        """None if there is nothing, or an address. gfile.isdir would hide that a bucket may not be read."""
        try:
            return None if is_web(self) else self._ask("stat").is_directory
        except FileNotFoundError:
            return None

    def is_symlink(self) -> bool:
        return False

    def samefile(self, other_path) -> bool:
        return str(self) == str(to_path(other_path))

    def stat(self, **_) -> Any:
        """`st_mode`, `st_size` and `st_mtime_ns` alone."""
        status = self._ask("stat")
        mode = stat.S_IFDIR if status.is_directory else stat.S_IFREG
        return types.SimpleNamespace(st_mode=mode, st_size=status.length, st_mtime_ns=status.mtime_nsec)

    def iterdir(self) -> Generator["RemotePath", None, None]:
        return (self / name.rstrip("/") for name in self._ask("listdir") if name.rstrip("/"))

    def glob(self, pattern, **_) -> Generator["RemotePath", None, None]:
        """Yield names in this folder; none if there is no such folder."""
        with contextlib.suppress(FileNotFoundError):
            yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def rglob(self, pattern, **_) -> Generator["RemotePath", None, None]:
        """Files, without folders."""

        def walk(gfile) -> list[str]:
            return [f"{folder.rstrip('/')}/{name}" for folder, _, names in gfile.walk(str(self)) for name in names]

        paths = (type(self)(path) for path in ask_gfile(self, walk))
        return (path for path in paths if fnmatch.fnmatchcase(path.name, pattern))

    def mkdir(self, mode=0o777, parents=False, exist_ok=False) -> None:
        self._ask("makedirs")

    def unlink(self, missing_ok=False) -> None:
        with contextlib.suppress(*[FileNotFoundError] * missing_ok):
            self._ask("remove")

    def rmtree(self) -> None:
        """Remove the folder and all that is in it, if there is such a folder."""
        with contextlib.suppress(FileNotFoundError):
            self._ask("rmtree")

    def read_bytes(self, count: int = -1) -> bytes:
        """Return the content, or its first bytes, at most `count`."""

        def read(gfile) -> bytes:
            with gfile.GFile(str(self), "rb") as stream:
                return stream.read(count)

        return ask_gfile(self, read)

    def read_text(self, encoding=None, errors=None, **_) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_bytes(self, data) -> int:
        def write(gfile, name: str) -> None:
            with gfile.GFile(name, "wb") as stream:
                stream.write(data)

        self._put(write, len(data))
        return len(data)

    def write_text(self, data, encoding=None, errors=None, newline=None) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8", errors or "strict"))

    def open(self, mode="r", *_, **__) -> Any:
        """Return the content in memory, to read bytes."""
        if mode != "rb":
            raise ValueError(f"only whole objects are written, but mode is {mode!r}")
        return io.BytesIO(self.read_bytes())

    def upload(self, file: pathlib.Path) -> None:
        """Write the content of a local file."""
        self._put(lambda gfile, name: gfile.copy(str(file), name, overwrite=True), file.stat().st_size)

    def _put(self, write: Callable[[Any, str], None], size: int) -> None:
        """Write under a temporary name, compare the size, and rename; all of it again if something fails."""

        def attempt(gfile) -> None:
            temporary = str(self.with_name(f"{self.stem}.{secrets.randbelow(10**18)}.tmp{self.suffix}"))
            try:
                write(gfile, temporary)
                _check_size(gfile, temporary, size)
                gfile.rename(temporary, str(self), overwrite=True)
            except BaseException:
                with contextlib.suppress(Exception):  # the first error says more
                    gfile.remove(temporary)
                raise

        ask_gfile(self, attempt)

    def download(self, file: pathlib.Path) -> None:
        """Write the object to a local file, and check its size."""

        def read(gfile) -> None:
            gfile.copy(str(self), str(file), overwrite=True)
            _check_size(gfile, str(self), file.stat().st_size)

        ask_gfile(self, read)


def is_remote(path: str | os.PathLike) -> bool:
    """Return whether a path has a scheme, such as gs://bucket/run; also a pathlib.Path, which has one slash less."""
    scheme = _SCHEME.match(os.fsdecode(path))
    return scheme is not None and (scheme[0].endswith("://") or isinstance(path, pathlib.PurePath))


def is_web(path: str | os.PathLike) -> bool:
    """Whether a path is an address that `find_checkpoint` downloads, and that TensorFlow has no file system for."""
    return is_remote(path) and os.fsdecode(path).lower().startswith(("http:", "https:"))


def to_path(path: str | os.PathLike) -> pathlib.Path:
    """Return `pathlib.Path(path)`, or a RemotePath of a path with a scheme."""
    if not is_remote(path):
        return pathlib.Path(path)
    return path if isinstance(path, RemotePath) else RemotePath(os.fsdecode(path))


def existing_file(path: str | os.PathLike, takes: str, *, folder: bool = False) -> pathlib.Path:
    """Return the path of a file, or folder. Raises UserError without, with the nearest name or what an option takes."""
    place = to_path(path)
    if place.is_dir() if folder else place.is_file():
        return place
    advice = "" if is_remote(path) else near_path(path, os.path.isdir if folder else os.path.isfile)
    raise UserError(f"There is no {'folder' if folder else 'file'} {os.fspath(path)!r}{advice or f'; {takes}.'}")


def existing_folder(path: str | os.PathLike, takes: str) -> pathlib.Path:
    """Return the path of a folder; see `existing_file`."""
    return existing_file(path, takes, folder=True)


def local_path(path: str | os.PathLike, option: str) -> pathlib.Path:
    """`pathlib.Path(path)`. Raises UserError for a path with a scheme, which the option does not take."""
    if is_remote(path):
        raise UserError(f"--{option} accepts a directory of this machine, but is {path}; give one such as runs/mine.")
    return pathlib.Path(path)


def output_folder(output: str | os.PathLike) -> pathlib.Path:
    """Return the path of --output. Raises UserError unless it is a writable directory or can be created.

    Creates nothing. Of a directory in a bucket, only whether the bucket answers.
    """
    folder, problem = to_path(output), ""
    remote = is_remote(folder)
    nearest = folder if remote else next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if is_web(folder):
        problem = "an address to download from"
    elif nearest.is_file() or not (remote or nearest.is_dir()):
        problem = "a file"
    elif not (remote or os.access(nearest, os.W_OK | os.X_OK)):
        problem = "not writable"
    if problem:
        raise UserError(f"{nearest} is {problem}; --output accepts a directory that can be written.")
    return folder


def read_places(path: str, use: Callable[[Callable[[int, int], bytes]], Result]) -> Result:
    """Call `use` with a function (position, size) -> bytes at most, of a file that is open meanwhile."""
    if not is_remote(path):
        with open(path, "rb", buffering=0) as local:
            return use(lambda position, size: os.pread(local.fileno(), size, position))

    def use_remote(gfile) -> Result:
        with gfile.GFile(path, "rb") as stream:

            def read(position: int, size: int) -> bytes:
                stream.seek(position)
                return stream.read(size)

            return use(read)

    return ask_gfile(to_path(path), use_remote)


def first_bytes(path: pathlib.Path, count: int) -> bytes:
    """Return the first bytes of a file, at most `count`; the rest is not read."""
    if isinstance(path, RemotePath):
        return path.read_bytes(count)
    with path.open("rb") as stream:
        return stream.read(count)


def can_be_saved_model(path: str | os.PathLike) -> bool:
    """Whether TensorFlow can load a SavedModel from a path, which it takes for a pattern if it has some characters."""
    return not {"[", "\\"} & {*os.fspath(path)}


def check_saved_model_path(path: str | os.PathLike) -> None:
    """Raise UserError for a path from which TensorFlow cannot load a SavedModel."""
    if not can_be_saved_model(path):
        raise UserError(
            f"TensorFlow cannot load a SavedModel from a path with [ or \\, but it is {os.fspath(path)!r}; give a "
            "folder without them."
        )


def matching(pattern: str) -> list[str]:
    """The paths that a pattern with * and ? matches; of this machine also with [ ], unless a folder is called so."""
    if not is_remote(pattern):
        path = pathlib.Path(pattern)
        folder = next((folder for folder in path.parents if folder.is_dir()), pathlib.Path())
        return glob.glob(str(pathlib.Path(glob.escape(str(folder))) / path.relative_to(folder)), recursive=True)
    return ask_gfile(to_path(pattern), lambda gfile: gfile.glob(pattern))


_downloads: list[pathlib.Path] = []


def local_copy(path: str | os.PathLike) -> pathlib.Path:
    """Return a local file of the same content and name; of a remote path a copy that is removed when the process ends.

    Of a remote folder, a local folder with copies of the files directly in it.
    """
    path = to_path(path)
    if not isinstance(path, RemotePath):
        return path
    if not _downloads:
        _downloads.append(pathlib.Path(tempfile.mkdtemp(prefix="keras_vit-")))
        atexit.register(shutil.rmtree, _downloads[0], ignore_errors=True)
    folder = _downloads[0] / hashlib.sha256(str(path).encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    local = folder / path.name
    if not path.is_dir():
        path.download(local)
        return local
    local.mkdir(exist_ok=True)
    for file in path.iterdir():
        if file.is_file():
            file.download(local / file.name)
    return local


def remove_folder(path: pathlib.Path) -> None:
    """Remove a folder, local or remote, and all that is in it, if it is there."""
    if isinstance(path, RemotePath):
        path.rmtree()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _check_size(gfile, path: str, size: int) -> None:
    arrived = gfile.stat(path).length
    if arrived != size:
        raise OSError(errno.EIO, f"{arrived} bytes arrived of {size}", path)


def ask_gfile(path: pathlib.Path, ask: Callable[[Any], Result]) -> Result:
    """Call `ask` with tf.io.gfile, up to five times. Raises RemoteError, or RemoteNotFound."""
    if is_web(path):
        raise RemoteError(errno.ENOSYS, "an address is downloaded as a checkpoint, and nothing else", str(path))
    try:
        import tensorflow as tf
    except ImportError as error:
        raise UserError(f"{path} needs TensorFlow, which reads buckets; install it, or give a local path.") from error
    pauses = iter(PAUSES)
    while True:
        try:
            return ask(tf.io.gfile)
        except (tf.errors.OpError, OSError) as error:
            pause = next(pauses, None)
            number = _LASTING.get(type(error).__name__)
            if pause is None or number is not None or isinstance(error, _LASTING_OS_ERRORS):
                number = number or getattr(error, "errno", None) or errno.EIO
                error_type = RemoteNotFound if number == errno.ENOENT else RemoteError
                raise error_type(number, reason_of(error), str(path)) from error
            time.sleep(pause * random.uniform(0.5, 1.0))

"""Reading and writing .npz archives that come from strangers: no pickle, sizes checked before memory is taken."""

import os
import pathlib
import zipfile

import numpy as np

from keras_vit.errors import UserError

# Float arrays hardly compress; an archive that claims more than this many times its own size is a bomb.
_LARGEST_EXPANSION = 4


def read_npz(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All arrays of an archive by name. Raises UserError for whatever is not a whole .npz of plain numbers."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"There is no checkpoint file {str(path)!r}; give the path of an .npz file.")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            claimed, size = sum(member.file_size for member in members), path.stat().st_size
            if claimed > _LARGEST_EXPANSION * size + 2**20:
                raise UserError(f"{path.name} is {size} bytes but claims to hold {claimed}; it is no checkpoint.")
            return {member.filename.removesuffix(".npy"): _read_member(archive, member) for member in members}
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
        raise UserError(
            f"{path.name} cannot be read as a whole .npz archive ({error}); it may be truncated: fetch it again."
        ) from error


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
            shape, _, dtype = read_header(stream)
        except (ValueError, KeyError) as error:
            raise UserError(f"The entry {member.filename!r} of the archive is not a NumPy array ({error}).") from error
        expected = stream.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if dtype.hasobject:
        raise UserError(f"The array {member.filename!r} holds pickled objects, which are never loaded; save numbers.")
    if expected != member.file_size:
        raise UserError(
            f"The array {member.filename!r} claims shape {shape} of {dtype}, {expected} bytes, "
            f"but the archive holds {member.file_size}."
        )
    with archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def write_npz(path: str | os.PathLike, arrays: dict[str, np.ndarray]) -> None:
    """Write an uncompressed archive under a temporary name, then rename it: it is whole or not there."""
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            np.savez(stream, **arrays)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

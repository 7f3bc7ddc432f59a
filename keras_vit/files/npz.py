"""Read and write .npz archives. Files may be untrusted: no pickle, and sizes are checked before memory is allocated."""

import contextlib
import functools
import io
import os
import pathlib
import tokenize
import typing
import zipfile
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike

from keras_vit.errors import UserError, reading
from keras_vit.files.atomic import atomic_write
from keras_vit.files.lazy_array import ByteStream, LazyArray, read_exactly
from keras_vit.files.remote import existing_file, local_copy, to_path

# Float arrays hardly compress; an archive that claims to expand by more than this factor is a zip bomb.
_LARGEST_EXPANSION = 4
# What NumPy raises for a header that is damaged, beside ValueError.
_OF_HEADERS = KeyError, MemoryError, SyntaxError, tokenize.TokenError, zlib.error


def read_npz(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Read all arrays of an archive, by name. Raises UserError like `open_npz`."""
    arrays = open_npz(local_copy(existing_file(path, "give the path of an .npz file")))
    return {key: array.fetch() for key, array in arrays.items()}


def open_npz(path: pathlib.Path) -> dict[str, LazyArray]:
    """Return the arrays of an archive, by name. Raises UserError unless it is a complete .npz of numeric arrays."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        claimed, size = sum(member.file_size for member in members), path.stat().st_size
        if claimed > _LARGEST_EXPANSION * size + 2**20:
            raise ValueError(f"it is {size} bytes but claims to hold {claimed}")
        arrays: dict[str, LazyArray] = {}
        for member in members:
            array = _open_member(path, archive, member)
            if array.key in arrays:
                raise ValueError(f"it holds the array {array.key!r} twice")
            arrays[array.key] = array
        return arrays


def _reading(path: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    errors = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)
    return reading(path.name, "an .npz archive", *errors, advice="it may be truncated: download it again")


def _open_member(path: pathlib.Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> LazyArray:
    name = f"The entry {member.filename!r} of the archive"
    with archive.open(member) as stream, reading(name, "a NumPy array", *_OF_HEADERS):
        version = np.lib.format.read_magic(stream)
        read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
        shape, fortran_order, dtype = read_header(stream)
        start = stream.tell()
    key = member.filename.removesuffix(".npy")
    expected = start + int(np.prod(shape, dtype=object)) * dtype.itemsize
    is_numeric = dtype.kind in "fiub" or dtype == np.dtype("V2")
    problem = ""
    if dtype.hasobject:
        problem = "holds pickled objects, which are never loaded; save numbers"
    elif not is_numeric or min(shape, default=0) < 0:
        problem = f"should be numeric, but has shape {shape} of {dtype}"
    elif expected != member.file_size:
        problem = f"claims shape {shape} of {dtype}, {expected} bytes, but the archive holds {member.file_size}"
    if problem:
        raise UserError(f"The array {member.filename!r} {problem}.")
    return LazyArray(
        key, shape, dtype, functools.partial(_open_values, path, member, start), fortran_order=fortran_order
    )


@contextlib.contextmanager
def _open_values(path: pathlib.Path, member: zipfile.ZipInfo, start: int) -> Iterator[ByteStream]:
    """A stream of a member after its header of `start` bytes; verifies the checksum on exit."""
    header = memoryview(bytearray(start))
    with _reading(path):
        if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
            with open(path, "rb", buffering=0) as stream:
                stream.seek(data_offset(stream, member))
                checked = _ChecksumStream(stream)
                read_exactly(checked, header)
                yield checked
            if checked.checksum != member.CRC:
                raise zipfile.BadZipFile(f"bad checksum of {member.filename!r}")
        else:
            with zipfile.ZipFile(path) as archive, archive.open(member) as compressed:  # verifies the checksum
                read_exactly(typing.cast(ByteStream, compressed), header)
                yield typing.cast(ByteStream, compressed)


class _ChecksumStream:
    """A stream that computes the checksum of what is read; faster than zipfile's, which copies each byte twice."""

    def __init__(self, stream: io.RawIOBase) -> None:
        self._stream = stream
        self.checksum = 0

    def readinto(self, buffer: memoryview) -> int | None:
        count = self._stream.readinto(buffer)
        self.checksum = zlib.crc32(buffer[:count], self.checksum)
        return count


def data_offset(stream: io.RawIOBase, member: zipfile.ZipInfo) -> int:
    """Return the offset of an uncompressed member, after its local header; that of the central directory may differ."""
    stream.seek(member.header_offset)
    local = stream.read(30) or b""
    if len(local) < 30 or local[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"bad local header of {member.filename!r}")
    return member.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")


def write_npz(path: str | os.PathLike, arrays: Mapping[str, ArrayLike]) -> None:
    """Write an uncompressed archive atomically: the bytes of np.savez, which leaves it open if an array fails."""
    with atomic_write(to_path(path)) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array))

"""Read the .weights.h5 files of Keras, and check those inside a .keras file before Keras reads them."""

import functools
import io
import pathlib
import typing
import zipfile

import numpy as np

from keras_vit.errors import reading, refuse_first
from keras_vit.files.lazy_array import LazyArray
from keras_vit.files.npz import data_offset

KERAS_WEIGHTS = ".weights.h5"


def open_keras_weights(path: pathlib.Path) -> dict[str, LazyArray]:
    """The arrays of a .weights.h5 file, by name of the layer and index: "head/0" is the first variable of "head".

    Raises UserError unless the file is complete and holds floating-point arrays of its own.
    """
    import h5py

    arrays: dict[str, LazyArray] = {}
    total = 0

    def add(name: str, dataset: object) -> None:
        nonlocal total
        if not isinstance(dataset, h5py.Dataset):
            return
        total += dataset.nbytes
        layer = dataset.parent.attrs.get("name")
        parts = name.split("/")
        is_own = isinstance(layer, str) and len(parts) == 4 and parts[0] == "layers"
        key = f"{layer}/{parts[3]}" if is_own else name
        it = f"The array {key!r} of {path.name}"
        refuse_first(
            [
                (dataset.external or dataset.is_virtual, f"{it} is in another file; give one that holds its arrays."),
                (
                    dataset.dtype.kind != "f",
                    f"{it} has the type {dataset.dtype}, but only floating-point weights can be read; save the weights "
                    "of a model that is not quantized.",
                ),
                (total > size or key in arrays, f"{it} cannot be of this file; the file is damaged."),
            ]
        )
        arrays[key] = LazyArray(key, dataset.shape, dataset.dtype, functools.partial(_open, path, name))

    with reading(path.name, "Keras weights", OSError, RuntimeError, KeyError, advice="it may be damaged"):
        size = path.stat().st_size
        with h5py.File(path, "r") as file:
            file.visititems(add)  # without following links
    return arrays


def check_weights_in(archive: zipfile.ZipFile) -> None:
    """Raise ValueError if an HDF5 file in a .keras file declares more bytes than it has, or reads other files.

    Keras writes arrays uncompressed, and would allocate whatever one declares.
    """
    import h5py

    for member in archive.infolist():
        if not member.filename.endswith(".h5"):
            continue
        with _opened_member(archive, member) as stream, h5py.File(stream, "r") as file:
            datasets: list[h5py.Dataset] = []
            file.visititems(lambda _, each, add=datasets.append: add(each) if isinstance(each, h5py.Dataset) else None)
            declared = sum(each.nbytes for each in datasets)
            if declared > member.file_size:
                raise ValueError(f"its arrays would be {declared:,} bytes, but it has {member.file_size:,}")
            if any(each.external or each.is_virtual for each in datasets):
                raise ValueError("an array of it is in another file")


def _opened_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> typing.BinaryIO:
    """A stream of a member, in which seeking takes no time where the member is not compressed, as Keras writes it."""
    if member.compress_type != zipfile.ZIP_STORED or archive.filename is None:
        return typing.cast(typing.BinaryIO, archive.open(member))
    return typing.cast(typing.BinaryIO, _Part(archive.filename, member))


class _Part(io.RawIOBase):
    """The bytes of an uncompressed member of an archive."""

    def __init__(self, path: str, member: zipfile.ZipInfo) -> None:
        self._stream = open(path, "rb", buffering=0)  # noqa: SIM115  (close does)
        self._begin, self._size, self._place = data_offset(self._stream, member), member.file_size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        self._stream.seek(self._begin + self._place)
        count = self._stream.readinto(view[: max(self._size - self._place, 0)]) or 0
        self._place += count
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _open(path: pathlib.Path, name: str) -> io.BufferedIOBase:
    """A stream of the values of one array."""
    import h5py

    with h5py.File(path, "r") as file:
        dataset = file[name]
        offset = dataset.id.get_offset()
        if offset is None:  # in chunks, perhaps compressed
            return io.BytesIO(np.ascontiguousarray(dataset).tobytes())
    stream = open(path, "rb")  # noqa: SIM115  (the reader closes it)
    stream.seek(offset)
    return stream

"""Read the .weights.h5 files of Keras."""

import functools
import io
import pathlib

import numpy as np

from keras_vit.errors import reading, refuse_first
from keras_vit.files.lazy_array import LazyArray

KERAS_WEIGHTS = ".weights.h5"


def open_keras_weights(path: pathlib.Path) -> dict[str, LazyArray]:
    """The arrays of a .weights.h5 file, by name of the layer and index: "head/0" is the first variable of "head".

    Raises UserError unless the file is complete and holds floating-point arrays of its own.
    """
    import h5py

    arrays: dict[str, LazyArray] = {}

    def add(name: str, dataset: object) -> None:
        if not isinstance(dataset, h5py.Dataset):
            return
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
                (dataset.nbytes > size or key in arrays, f"{it} cannot be of this file; the file is damaged."),
            ]
        )
        arrays[key] = LazyArray(key, dataset.shape, dataset.dtype, functools.partial(_open, path, name))

    with reading(path.name, "Keras weights", OSError, RuntimeError, KeyError, advice="it may be damaged"):
        size = path.stat().st_size
        with h5py.File(path, "r") as file:
            file.visititems(add)  # without following links
    return arrays


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

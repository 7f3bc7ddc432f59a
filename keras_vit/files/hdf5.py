"""Read and write HDF5 files of Keras: .weights.h5 files, and whole models of Keras 2. None is trusted."""

import contextlib
import functools
import io
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from keras_vit.errors import UserError, reading
from keras_vit.files.documents import validated
from keras_vit.files.lazy_array import ByteStream, LazyArray

# Bytes of the JSON text in which a file of Keras 2 describes its model.
_LARGEST_CONFIG = 2**22
_BFLOAT16 = np.dtype("V2")
WEIGHTS = "model.weights.h5"  # the weights of a model in a folder that Keras wrote


def weights_file(path: pathlib.Path) -> pathlib.Path:
    """The file of weights in a folder that Keras wrote; the path of another folder or of a file."""
    file = path / WEIGHTS
    return file if file.is_file() else path


def open_hdf5(path: pathlib.Path, *, named: bool = False) -> dict[str, LazyArray]:
    """The arrays of an HDF5 file. Raises UserError unless it is complete and holds them itself.

    Args:
        path: of the file.
        named: whether their keys are the names of layers and an index, instead of the path in the file. The name of a
            layer within another one follows the name that the other was given, unless it begins with it.
    """
    return _opened(path, lambda parts: named)


def open_keras_weights(path: pathlib.Path) -> dict[str, LazyArray]:
    """The arrays of a .weights.h5 file, by names of layers and index: "head/0" is the first variable of "head".

    Raises UserError unless the file is complete and holds floating-point arrays of its own.
    """
    arrays = _opened(path, lambda parts: len(parts) == 4 and parts[0] == "layers")
    for key, array in arrays.items():
        if array.dtype.kind != "f":
            raise UserError(
                f"The array {key!r} of {path.name} has the type {array.dtype}, but only floating-point weights can be "
                "read; save the weights of a model that is not quantized."
            )
    return arrays


def _opened(path: pathlib.Path, is_named: Callable[[list[str]], bool]) -> dict[str, LazyArray]:
    """`is_named`: the parts of the path in the file -> whether the key is the name of the layer and the last part."""
    import h5py

    arrays: dict[str, LazyArray] = {}
    total = 0

    def add(name: str, dataset: object) -> None:
        nonlocal total
        if not isinstance(dataset, h5py.Dataset):
            return
        total += dataset.nbytes
        layer, parts = dataset.parent.attrs.get("name"), name.split("/")
        key = name
        if isinstance(layer, str) and is_named(parts):
            outer = _name_around(dataset, parts)
            key = f"{layer}/{parts[-1]}" if layer.startswith(outer) else f"{outer}/{layer}/{parts[-1]}"
        is_outside = dataset.external or dataset.is_virtual
        if is_outside or total > size or key in arrays:
            outside = "is in another file; give one that holds its arrays"
            problem = outside if is_outside else "cannot be of this file; the file is damaged"
            raise UserError(f"The array {key!r} of {path.name} {problem}.")
        is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16" and dataset.dtype.itemsize == 2
        dtype = _BFLOAT16 if is_bfloat16 else dataset.dtype
        arrays[key] = LazyArray(key, dataset.shape, dtype, functools.partial(_open, path, name))

    with _reading(path):
        size = path.stat().st_size
        with h5py.File(path, "r") as file:
            file.visititems(add)  # without following links
    return arrays


def _reading(path: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    errors = OSError, EOFError, RuntimeError, KeyError, TypeError  # the last of a name that is no text
    return reading(path.name, "Keras weights", *errors, advice="it may be damaged")


def _name_around(dataset: Any, parts: list[str]) -> str:
    """The name of the layer around that of an array; empty without one, and for one that Keras named by its class."""
    import h5py

    path, file = f"{parts[0]}/{parts[1]}/vars", dataset.file
    if len(parts) <= 4 or not isinstance(file.get(path, getlink=True), h5py.HardLink):  # links may lead to other files
        return ""
    name = str(file[path].attrs.get("name", ""))
    return "" if name.startswith(re.sub(r"_\d+$", "", parts[1])) else name


@contextlib.contextmanager
def _open(path: pathlib.Path, name: str) -> Iterator[ByteStream]:
    """A stream of the values of one array."""
    import h5py

    with _reading(path), open(path, "rb") as stream:
        with h5py.File(path, "r") as file:
            dataset = file[name]
            offset = dataset.id.get_offset()
            chunks = b"" if offset is not None else np.ascontiguousarray(dataset).tobytes()  # perhaps compressed
        stream.seek(offset or 0)
        yield stream if offset is not None else io.BytesIO(chunks)


def read_model_config(path: pathlib.Path) -> dict:
    """The description of the model in a whole-model file of Keras 2; empty in a file of weights. Raises UserError."""
    import h5py

    with reading(path.name, "an HDF5 file of Keras", OSError, RuntimeError, ValueError, advice="it may be damaged"):
        with h5py.File(path, "r") as file:
            text = file.attrs.get("model_config", "{}")
        if not isinstance(text, str | bytes) or len(text) > _LARGEST_CONFIG:
            raise ValueError("its model_config is no text, or too large")
        return validated(json.loads(text), dict, path.name)


def write_hdf5(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Write arrays by their paths in the file. attributes: those of groups, by path."""
    import h5py

    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file.create_dataset(key, data=np.asarray(array, order="C"))
        for key, values in (attributes or {}).items():
            file.require_group(key).attrs.update(values)

"""Read and write .safetensors files, and the folders of transformers and timm."""

import contextlib
import functools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from keras_vit.errors import UserError, reading
from keras_vit.files import documents
from keras_vit.files.atomic import atomic_write
from keras_vit.files.documents import Rule, validated
from keras_vit.files.kinds import MODEL_SUFFIXES, readable_kind
from keras_vit.files.lazy_array import ByteStream, LazyArray

_DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "V2", "I64": "i8", "I32": "i4", "U8": "u1"}
_IMAGE_SIZE = "keras_vit.image_size"  # in the metadata of a file, "HEIGHTxWIDTH"; a name that no other code writes
_LARGEST_CONFIG = 2**22  # bytes
_LARGEST_HEADER = 2**24  # bytes; about a hundred per array
_SHARD = Rule(
    "a .safetensors file of that folder",
    lambda name: isinstance(name, str) and pathlib.Path(name).name == name and name.endswith(".safetensors"),
)


def open_folder(folder: pathlib.Path) -> dict[str, LazyArray]:
    """Return the arrays of a folder of transformers or timm: one file, or shards with an index."""
    if (folder / "model.safetensors").is_file():
        return open_safetensors(folder / "model.safetensors")
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        return _open_only_model(folder)
    shards = validated(read_json(index), {"weight_map": dict}, index.name)["weight_map"]
    validated(list(shards.values()), [_SHARD], f"The weight_map of {index.name}")
    arrays: dict[str, LazyArray] = {}
    for name in sorted(set(shards.values())):
        shard = open_safetensors(folder / name)
        if different := sorted(shard.keys() ^ {key for key, listed in shards.items() if listed == name}):
            raise UserError(
                f"{index.name} and {name} should hold the same arrays, but {different[0]!r} is only in one of them; "
                "download the folder again."
            )
        arrays |= shard
    return arrays


def _open_only_model(folder: pathlib.Path) -> dict[str, LazyArray]:
    """Return the arrays of the only .safetensors file of a folder, or of all shards."""
    files, name = sorted(folder.glob("*.safetensors")), folder.resolve().name
    shards = re.search(r"-of-0*(\d+)\.safetensors$", files[0].name) if files else None
    if shards and int(shards[1]) != len(files):
        raise UserError(f"The folder {name!r} holds {len(files)} of the {shards[1]} shards of a model; download all.")
    if not files or (len(files) > 1 and not shards):
        others = [path for path in folder.iterdir() if path.name.endswith((".msgpack", *MODEL_SUFFIXES))]
        if not files and others:
            readable_kind(max(others, key=lambda path: path.stat().st_size))
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise UserError(f"The folder {name!r} should hold model.safetensors, but has {names}.")
    arrays: dict[str, LazyArray] = {}
    for file in files:
        own = open_safetensors(file)
        if twice := sorted(arrays.keys() & own.keys()):
            raise UserError(f"Two shards in the folder {name!r} hold the array {twice[0]!r}; download them again.")
        arrays |= own
    return arrays


def read_json(path: pathlib.Path) -> dict:
    """Read a JSON object of at most 4 MB. Raises UserError for anything else."""
    return validated(documents.read_json(path, _LARGEST_CONFIG), dict, path.name)


def folder_of(path: pathlib.Path) -> pathlib.Path:
    """The folder of a model: the path, or that of the file."""
    return path if path.is_dir() else path.parent


def json_files(path: pathlib.Path, names: Sequence[str]) -> dict[str, dict]:
    """The JSON files of these names that lie in a folder, or beside a file of weights, by name."""
    folder = folder_of(path)
    return {name: read_json(folder / name) for name in names if (folder / name).is_file()}


def open_safetensors(path: pathlib.Path) -> dict[str, LazyArray]:
    """The arrays of a .safetensors file, by key. Raises UserError unless it is a complete file of numeric arrays.

    The safetensors library checks the header. It does not read the values, because it maps the file into memory and
    would double the memory use.
    """
    import safetensors

    readable_kind(path)
    with _reading(path, safetensors.SafetensorError), open(path, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _LARGEST_HEADER and size + 8 <= path.stat().st_size:
            raise ValueError(f"its header is {size} bytes, too large")
        with safetensors.safe_open(path, "numpy"):
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        arrays = {}
        for key, tensor in header.items():
            if (dtype := _DTYPES.get(tensor["dtype"])) is None:
                raise ValueError(f"the array {key!r} has the unknown dtype {tensor['dtype']}")
            values = functools.partial(_open_values, path, 8 + size + tensor["data_offsets"][0])
            arrays[key] = LazyArray(key, tuple(tensor["shape"]), np.dtype(dtype), values)
    return arrays


def stored_image_size(path: pathlib.Path) -> tuple[int, int] | None:
    """Return the image size that `write_safetensors` has stored beside the arrays; None in a file of another code."""
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as file:
            size = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", (file.metadata() or {}).get(_IMAGE_SIZE, ""))
    except (safetensors.SafetensorError, OSError):
        return None  # reported by `open_safetensors`
    return (int(size[1]), int(size[2])) if size else None


def _reading(path: pathlib.Path, *errors: type[Exception]) -> contextlib.AbstractContextManager[None]:
    return reading(path.name, "a .safetensors file", OSError, EOFError, *errors, advice="download it again")


@contextlib.contextmanager
def _open_values(path: pathlib.Path, start: int) -> Iterator[ByteStream]:
    with _reading(path), open(path, "rb", buffering=0) as stream:
        stream.seek(start)
        yield stream


def write_safetensors(
    path: pathlib.Path, arrays: Mapping[str, np.ndarray], image_size: tuple[int, int] | None = None
) -> None:
    """Write a file that PyTorch reads, atomically. Raises OSError. image_size: for `stored_image_size`."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    metadata = {"format": "pt"}
    if image_size is not None:
        metadata[_IMAGE_SIZE] = f"{image_size[0]}x{image_size[1]}"
    contiguous = {key: np.asarray(array, order="C") for key, array in arrays.items()}
    with atomic_write(path) as temporary:
        try:
            save_file(contiguous, temporary, metadata=metadata)
        except SafetensorError as error:  # in which the library hides that of the system, such as a full disk
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def overwrite(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Replace the values of those arrays of equal shapes that a file has, in its dtypes, and return their keys."""
    stored = {key: array for key, array in open_safetensors(path).items() if key in arrays}
    with open(path, "r+b") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_size))
        for key, array in stored.items():
            stream.seek(8 + header_size + header[key]["data_offsets"][0])
            stream.write(_in_dtype(arrays[key], array.dtype).tobytes())
    return list(stored)


def _in_dtype(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "f":
        return np.asarray(values, dtype, order="C")
    bits = np.asarray(values, np.float32, order="C").view(np.uint32)  # bfloat16: the upper half, rounded to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_json(path: pathlib.Path, value: dict) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

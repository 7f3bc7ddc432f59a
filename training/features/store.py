"""Features on disk: a folder of Parquet files, and features.json, which says of which model and images they are.

    features.json           FeatureDescription: the model, its fingerprint, the kind, width and dtype, classes, splits
    train-00000.parquet     up to 2,048 images of the split train, in their order
    test-00000.parquet      those of the split test; of images without splits the files are called pictures-00000 …

Columns of each file: path (text), digest (text, 16 hexadecimal digits), label (text, or null), split (text), embedding
(a list of `width` float16 or float32). The metadata of each file has the fingerprint of the model, and the images
that cannot be read, each with the reason. pandas, polars and DuckDB read these files as they are.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow
import pyarrow.parquet

from keras_vit import UserError
from keras_vit.errors import reading
from keras_vit.files.atomic import atomic_write, write_text
from keras_vit.files.documents import read_json, validated
from keras_vit.files.remote import existing_folder, local_copy
from training.options.features import DESCRIPTION, IndexKind

PART = 2048  # images of one file: what a killed process loses at most
NO_SPLIT = "pictures"  # the split of images that have none
_VERSION = 1
_FINGERPRINT, _PROBLEMS = b"fingerprint", b"problems"
_COLUMNS = ("path", "digest", "label", "split", "embedding")
# Of a description: bytes, its fields that are read, the width of features and the number of images.
_LARGEST_DESCRIPTION, _WIDEST, _MOST_IMAGES = 2**26, 2**15, 10**11
_FIELDS = {"model": str, "fingerprint": str, "features": str, "width": int, "dtype": str, "labels": [str],
           "splits": dict, "settings": dict, "version": int}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FeatureDescription:
    """The content of features.json."""

    model: str
    """Run or checkpoint, as it was given."""
    fingerprint: str
    """A hash of the model's numbers, its preprocessing and the kind of features."""
    features: IndexKind
    """The kind; see `EmbedOptions.features`."""
    width: int
    dtype: str
    labels: tuple[str, ...]
    """The names of the classes, in order; empty for images without classes."""
    splits: dict[str, int]
    """Split -> images, also those that cannot be read."""
    checksum: int
    """A checksum of the images."""
    data: dict | None = None
    """The fields of DataOptions; None for single images."""
    settings: dict = dataclasses.field(default_factory=dict)
    """image_size, num_heads and resize of the command."""
    version: int = _VERSION


@dataclasses.dataclass(frozen=True)
class Part:
    """The images of one file."""

    paths: Sequence[str]
    digests: np.ndarray
    """(n,) uint64, of the contents."""
    labels: Sequence[str | None]
    embeddings: np.ndarray
    """(n, D) float16 or float32."""
    problems: dict[str, str]
    """Path -> why it cannot be read."""


@dataclasses.dataclass(frozen=True)
class Images:
    """All images of an index, in order: those of the split train, then test."""

    paths: list[str]
    digests: list[str]
    labels: list[str | None]
    splits: list[str]


@dataclasses.dataclass(frozen=True)
class FeatureIndex:
    """A folder of features, opened. No embedding is read before it is asked for."""

    folder: pathlib.Path
    description: FeatureDescription

    @functools.cached_property
    def images(self) -> Images:
        """The table without the embeddings."""
        return _images(self._table(file, _COLUMNS[:-1]) for file in self.files())

    @functools.cached_property
    def counts(self) -> dict[pathlib.Path, int]:
        """File -> its images, without those that cannot be read; reads the ends of the files."""
        return {file: self._opened(file).metadata.num_rows for file in self.files()}

    def some(self, rows: Sequence[int]) -> Images:
        """Return the table of some rows, in their order; reads only the files that have them."""
        if not len(rows):
            return _images([])
        files, ends = list(self.counts), np.cumsum([*self.counts.values()])
        numbers = np.searchsorted(ends, rows, side="right")
        parts = []
        for number in np.unique(numbers).tolist():
            begin = int(ends[number]) - self.counts[files[number]]
            parts.append(self._table(files[number], _COLUMNS[:-1]).take(np.asarray(rows)[numbers == number] - begin))
        order = np.argsort(np.argsort(numbers, kind="stable"))  # from that of the files to that of the rows
        return _images([pyarrow.concat_tables(parts).take(order)])

    def shown(self, path: str) -> str:
        """Return the path of an image as it is shown: within the folder of the data."""
        data = (self.description.data or {}).get("data", "")
        return path.removeprefix(f"{data.removeprefix('folder:').rstrip('/')}/") if data.startswith("folder:") else path

    @functools.cached_property
    def problems(self) -> dict[str, str]:
        """Path -> why it cannot be read."""
        return {path: why for file in self.files() for path, why in self._problems(file).items()}

    def contents(self, split: str, number: int) -> tuple[dict[str, str], dict[str, str]]:
        """Return for a file of features path -> digest of the image, and path -> why it cannot be read."""
        file = part_file(self.folder, split, number)
        table = self._table(file, ("path", "digest"))
        digests = dict(zip(table["path"].to_pylist(), table["digest"].to_pylist(), strict=True))
        return digests, self._problems(file)

    def files(self, splits: Sequence[str] | None = None) -> list[pathlib.Path]:
        """Return the files of some or all splits, whether they are there or not."""
        counts = self.description.splits
        return [
            part_file(self.folder, split, number)
            for split in (counts if splits is None else splits)
            for number in range(-(-counts[split] // PART))
        ]

    def parts(self, splits: Sequence[str] | None = None) -> Iterator[np.ndarray]:
        """Yield the embeddings (n, D) file by file, in float16 or float32 as they are stored."""
        for file in self.files(splits):
            yield self._values(self._table(file, ("embedding",)))

    def paths(self, file: pathlib.Path) -> list[str]:
        """Return the paths of the images of a file."""
        return self._table(file, ("path",))["path"].to_pylist()

    def by_digest(self, files: Iterable[pathlib.Path]) -> dict[int, np.ndarray]:
        """Return the embeddings (D,) in some files by the digests of their images."""
        found: dict[int, np.ndarray] = {}
        for file in files:
            table = self._table(file, ("digest", "embedding"))
            digests = (int(digest, 16) for digest in table["digest"].to_pylist())
            found |= zip(digests, self._values(table), strict=True)
        return found

    def _values(self, table: pyarrow.Table) -> np.ndarray:
        column = table["embedding"].combine_chunks()
        return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), self.description.width)

    def embeddings(self, splits: Sequence[str] | None = None) -> np.ndarray:
        """Return all embeddings (n, D) float32, of some or all splits."""
        empty = np.zeros((0, self.description.width), np.float32)
        return np.concatenate([empty, *(part.astype(np.float32) for part in self.parts(splits))])

    def _problems(self, file: pathlib.Path) -> dict[str, str]:
        with _reading(file):
            return dict(json.loads(self._opened(file).schema_arrow.metadata[_PROBLEMS]))

    def _table(self, file: pathlib.Path, columns: Sequence[str]) -> pyarrow.Table:
        """Read columns of a file. Raises UserError for one that is damaged, or of another model."""
        opened = self._opened(file)
        with _reading(file):
            table = opened.read(columns=list(columns))
            table.validate(full=True)  # also that texts are UTF-8
            if any(table[name].null_count for name in columns if name != "label"):
                raise ValueError("a value is missing")
            return table

    def _opened(self, file: pathlib.Path) -> pyarrow.parquet.ParquetFile:
        """Open a file, of which the end is read. Raises UserError for one that is damaged, or of another model."""
        with _reading(file):
            opened = pyarrow.parquet.ParquetFile(local_copy(file))
            schema = opened.schema_arrow
            if (schema.metadata or {}).get(_FINGERPRINT) != self.description.fingerprint.encode():
                raise ValueError(f"it is of another model than {DESCRIPTION} says")
            types = dict(zip(schema.names, schema.types, strict=True))
            if opened.metadata.num_rows > PART or types != _types_of(self.description):
                raise ValueError("its rows are of another form")
            return opened


def _images(tables: Iterable[pyarrow.Table]) -> Images:
    tables = list(tables)
    columns = ([text for table in tables for text in table[name].to_pylist()] for name in _COLUMNS[:-1])
    return Images(*columns)


def _reading(file: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    advice = "remove it and run keras-vit embed again, which makes what is missing"
    return reading(file, "features", pyarrow.ArrowException, OSError, KeyError, TypeError, advice=advice)


def part_file(folder: pathlib.Path, split: str, number: int) -> pathlib.Path:
    return folder / f"{split}-{number:05d}.parquet"


def _types_of(description: FeatureDescription) -> dict[str, pyarrow.DataType]:
    value = pyarrow.float16() if description.dtype == "float16" else pyarrow.float32()
    return {**dict.fromkeys(_COLUMNS[:-1], pyarrow.string()), "embedding": pyarrow.list_(value, description.width)}


def write_part(folder: pathlib.Path, description: FeatureDescription, split: str, number: int, part: Part) -> None:
    """Write the file of a part; it is there as a whole or not at all. Equal parts give equal bytes."""
    text, values = pyarrow.string(), pyarrow.array(np.ascontiguousarray(part.embeddings).reshape(-1))
    columns = [
        pyarrow.array(part.paths, text),
        pyarrow.array([f"{digest:016x}" for digest in part.digests.tolist()], text),
        pyarrow.array(part.labels, text),
        pyarrow.array([split] * len(part.paths), text),
        pyarrow.FixedSizeListArray.from_arrays(values, description.width),
    ]
    metadata = {_FINGERPRINT: description.fingerprint, _PROBLEMS: json.dumps(part.problems)}
    schema = pyarrow.schema(_types_of(description).items(), metadata=metadata)
    with atomic_write(part_file(folder, split, number)) as temporary:
        pyarrow.parquet.write_table(
            pyarrow.table(columns, schema=schema),
            temporary,
            compression=dict.fromkeys(_COLUMNS[:-1], "zstd"),  # of embeddings hardly anything can be saved
            use_dictionary=["label", "split"],
            write_statistics=False,
        )


def write_description(folder: pathlib.Path, description: FeatureDescription) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / DESCRIPTION, json.dumps(dataclasses.asdict(description), indent=2) + "\n")


def read_description(folder: pathlib.Path) -> FeatureDescription:
    """Read features.json. Raises UserError for a file that is not as `write_description` writes it."""
    file = folder / DESCRIPTION
    fields = validated(read_json(file, _LARGEST_DESCRIPTION), _FIELDS, file)
    with reading(file, "a description of features", TypeError, advice="make the features again, elsewhere"):
        found = FeatureDescription(**{**fields, "labels": tuple(fields["labels"])})
        if found.version != _VERSION:
            raise ValueError(f"version {found.version}")
        splits = {"splits": dict.fromkeys(found.splits, int)}
        counts = [*validated({"splits": found.splits}, splits, file)["splits"].values()]
        if not (0 < found.width <= _WIDEST and all(0 <= count <= _MOST_IMAGES for count in counts)):
            raise ValueError(f"a width of {found.width} and splits of {counts} images")
        return found


def open_index(path: str) -> FeatureIndex:
    """Open a folder of features. Raises UserError unless it is there and complete."""
    folder = existing_folder(path, "make it by keras-vit embed, whose --output is this folder")
    index = FeatureIndex(folder, read_description(folder))
    if missing := [file.name for file in index.files() if not file.is_file()]:
        raise UserError(f"{path} is not complete, {missing[0]} is missing; run the same keras-vit embed again.")
    return index


def check_same_model(index: FeatureIndex, fingerprint: str, features: str, name: str) -> None:
    """Raise UserError unless an index has features of this model, preprocessing and kind."""
    known = index.description
    if (known.features, known.fingerprint) != (features, fingerprint):
        raise UserError(
            f"{index.folder} has the features {known.features} of {known.model}, but asked for are the features "
            f"{features} of {name}, which has other weights or another preprocessing if it has the same name; features "
            "of two models are never mixed: give the same --features and model, or make another index."
        )

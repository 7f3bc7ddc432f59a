"""Lists of images as streams: files, folders, patterns and CSV files, here or in a bucket, without a list in memory.

A pipeline reads its list twice: once where it is started, to count it, and once in a worker, which hands the images
on in groups. Both times the order is the same: that of the list, and that of their names in a folder.
"""

import collections
import dataclasses
import io
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from apache_beam.io.filesystems import FileSystems

from keras_vit import UserError
from keras_vit.files.remote import is_remote, to_path
from keras_vit.images.formats import is_hidden, is_image_name, looks_like_image
from training.data.dataset import check_classes_of_splits
from training.data.listed_files import ONE_CLASS, check_columns, check_several_classes, read_lines, used_splits
from training.features.store import NO_SPLIT


class Row(NamedTuple):
    """An image of the list."""

    path: str
    label: str | None
    split: str  # as the list calls it


class Group(NamedTuple):
    """Images of one split in a row."""

    split: str
    number: int  # the number of the group in its split, from 0
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Summary:
    """The content of a list, after it was read once."""

    splits: dict[str, str]  # the name of each used split in the list -> its name in the output
    counts: dict[str, int]  # images of each split, by its name in the output
    labels: tuple[str, ...]  # names of the classes, in order
    checksum: int
    first: str  # the path of the first image


@dataclasses.dataclass(frozen=True)
class ImageList:
    """A list of images."""

    names: tuple[str, ...] = ()  # files, folders, patterns with *, ** and ?, and CSV files with a column path
    table: str | None = None  # CSV file with the columns path, label and split, instead of these
    evaluation: str = "test"  # name in the output of the split to evaluate on

    def rows(self) -> Iterator[Row]:
        """Return the images, in order. Raises UserError for what cannot be read as a list."""
        if self.table is not None:
            yield from _table(self.table, labeled=True)
            return
        for name in self.names:
            if name.lower().endswith(".csv"):
                yield from _table(name, labeled=False)
            else:
                yield from (Row(path, None, NO_SPLIT) for path in _files(name))

    def groups(self, splits: Mapping[str, str], size: int) -> Iterator[Group]:
        """The images of the splits that are used, in groups of one size; the last of each split may be smaller."""
        waiting: dict[str, list[Row]] = {split: [] for split in splits.values()}
        numbers = dict.fromkeys(waiting, 0)
        for row in self.rows():
            if (split := splits.get(row.split)) is None:
                continue
            waiting[split].append(row)
            if len(waiting[split]) == size:
                yield Group(split, numbers[split], tuple(waiting[split]))
                waiting[split], numbers[split] = [], numbers[split] + 1
        for split, rows in waiting.items():
            if rows:
                yield Group(split, numbers[split], tuple(rows))

    def summary(self) -> Summary:
        """Read the list. Raises UserError without images, and for a table whose splits have not the same classes."""
        counts: collections.Counter[str] = collections.Counter()
        labels: dict[str, set[str]] = collections.defaultdict(set)
        checksum, first = 0, ""
        for row in self.rows():
            text = os.fsencode(row.path) if row.label is None else f"{row.split}\0{row.path}\0{row.label}".encode()
            checksum = zlib.crc32(b"\0" + text if first else text, checksum)
            first = first or row.path
            counts[row.split] += 1
            if row.label is not None:
                labels[row.split].add(row.label)
        if not counts:
            raise UserError(f"There is no image in {', '.join(map(repr, self.names)) or self.table}; give others.")
        splits = {NO_SPLIT: NO_SPLIT} if self.table is None else self._splits(counts)
        named: collections.Counter[str] = collections.Counter()
        classes: dict[str, set[str]] = {split: set() for split in splits.values()}
        for name, split in splits.items():
            named[split] += counts[name]
            classes[split] |= labels[name]
        if self.table is not None:
            check_classes_of_splits(classes["train"], classes[self.evaluation], self.table)
            check_several_classes(classes["train"], self.table)
        return Summary(splits, dict(named), tuple(sorted(set.union(*classes.values()))), checksum, first)

    def _splits(self, counts: Mapping[str, int]) -> dict[str, str]:
        """The splits of a table that are used: those to train on, and the first to evaluate on that has images."""
        train, evaluation = used_splits(counts, self.table)
        for name in evaluation[1:]:
            print(f"Not used: {counts[name]:,} images of {self.table} with the split {name}.")
        return {**dict.fromkeys(train, "train"), evaluation[0]: self.evaluation}


def _table(path: str, *, labeled: bool) -> Iterator[Row]:
    """Return the rows of a CSV file in UTF-8 (`training/data/listed_files.py`), line by line."""
    with io.TextIOWrapper(FileSystems.open(path), "utf-8-sig", newline="") as stream:
        place_of, lines = read_lines(stream, path)
        wanted = ("path", ONE_CLASS, "split") if labeled else ("path",)
        check_columns(place_of, wanted, path)
        for _, image, label, split, _ in lines:
            file = image if is_remote(image) else str(to_path(path).parent / image)
            yield Row(file, label if labeled else None, split if labeled else NO_SPLIT)


def _files(name: str) -> Iterator[str]:
    """Return a file, the images of a folder and of those inside it, or the files that a pattern matches."""
    if is_remote(name):
        yield from _in_bucket(name)
        return
    path = pathlib.Path(name)
    if path.is_dir():
        yield from (str(file) for file in _walk(path) if looks_like_image(file))
    elif path.is_file():
        yield name
    else:
        prefix = re.match(r"[^\[*?]*", name)[0]  # type: ignore[index]
        matches = re.compile(FileSystems.get_filesystem(name).translate_pattern(name))
        folder = pathlib.Path(os.path.dirname(prefix))
        yield from (str(file) for file in _walk(folder) if matches.match(str(file)))


def _walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the files in and below a folder by their paths, without hidden ones and without a list of all of them."""
    if not folder.is_dir():
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if is_hidden(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name)
        else:
            yield folder / entry.name


def _in_bucket(name: str) -> Iterator[str]:
    """Yield what a pattern matches, or the images of a folder, in the bucket's order, page by page."""
    system = FileSystems.get_filesystem(name)
    if re.search(r"[\[*?]", name):
        prefix = re.match(r"[^\[*?]*", name)[0]  # type: ignore[index]
        objects = system.match_files(system._list(os.path.dirname(prefix) if system.has_dirs() else prefix), name)
        yield from (file.path for file in objects)
    elif is_image_name(name):
        yield name
    else:
        folder = name.rstrip("/") + "/"
        for file in system._list(folder):
            inside = file.path.removeprefix(folder).split("/")
            if is_image_name(inside[-1]) and not any(map(is_hidden, inside)):
                yield file.path

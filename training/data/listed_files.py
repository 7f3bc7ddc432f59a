"""Files that a file of others names: a CSV file of images and their classes, and names in files of annotations.

Imports neither TensorFlow nor NumPy.

In a CSV file, the column path names the files, relative to its folder. One of the columns label (a class), labels (any
number of classes such as "cat|dog", or none) and probabilities (shares that sum to 1, such as "cat=0.7|dog=0.3") says
what they show. A further column split says train (or training), or test (testing, val, valid, validation); as in a
folder, the images of test are evaluated on where there are others beside them. A column group has a name that images of
one scene, patient or day share. Other columns are ignored.

The text is UTF-8, with or without a byte order mark. Columns may have some other names, in any case (`_NAMES`), and may
be separated by commas, semicolons, tabs or bars, as the first line says. What is ambiguous is refused.
"""

import csv
import math
import os
import pathlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from keras_vit.errors import UserError, reading, shown
from keras_vit.files.labels import composed
from keras_vit.files.remote import existing_file
from training.options.common import EVALUATION_NAMES, TRAINING_NAMES

# Columns for one class, for any number of classes, and for a share of each class.
ONE_CLASS, SEVERAL_CLASSES, CLASS_SHARES = "label", "labels", "probabilities"
_OF_CLASSES = (ONE_CLASS, SEVERAL_CLASSES, CLASS_SHARES)
# Meaning of a column -> its names, without spaces and underscores.
_NAMES = {
    "path": ("path", "filepath", "filename", "file", "imagepath", "image"),
    ONE_CLASS: ("label", "class", "category", "species"),
    SEVERAL_CLASSES: ("labels", "classes", "tags"),
    CLASS_SHARES: ("probabilities",),
    "split": ("split",),
    "group": ("group",),
}
_SEPARATORS = ",;\t|"
_SPLITS = (*TRAINING_NAMES, *EVALUATION_NAMES)
_KIND, _ADVICE = ("CSV in UTF-8", csv.Error), 'save it again, in Excel as "CSV UTF-8"'
_ROUNDING = 0.02  # how far from 1 the sum of an image's shares may be; they are then divided by it
_MOST_NAMED = 3  # files that a message names


class ListedFiles(NamedTuple):
    """The contents of a CSV file."""

    column: str  # the column of the classes
    value_of: dict[str, dict[str, str]]  # split ("train" and "test", or "" alone) -> file -> what the column says of it
    not_used: dict[str, int]  # the further evaluation splits, and their numbers of images
    group_of: dict[str, str]  # file -> the name of its group; without files that have none

    @property
    def classes(self) -> set[str]:
        """The names of the classes."""
        texts, column = {text for files in self.value_of.values() for text in files.values()}, self.column
        return texts if column == ONE_CLASS else {name for text in texts for name in class_shares(text, column)}


class Line(NamedTuple):
    """A line below the first one."""

    where: str  # its number and file, as a message begins
    image: str
    label: str  # the value in the column of the classes; "" without one
    split: str  # in lower case; "" without the column
    group: str  # the name of the group; "" without one


def listed_files(path: pathlib.Path) -> ListedFiles:
    """Read a CSV file. Raises UserError for the first wrong row."""
    existing_file(path, "--data csv:FILE takes one with the columns path and label")
    with path.open(encoding="utf-8-sig", newline="") as stream:
        place_of, lines = read_lines(stream, path)
        columns = [name for name in _OF_CLASSES if name in place_of]
        column = columns[0] if len(columns) == 1 else f"one of {', '.join(_OF_CLASSES)}"
        check_columns(place_of, ("path", column), path)
        by_split: dict[str, dict[str, str]] = {}
        first_line, group_of = dict[str, str](), dict[str, str]()
        for where, image, label, split, group in lines:
            file = str(listed_file(path.parent, image))
            if file in first_line:
                raise UserError(f"{first_line[file]} and {where} are of the same image {image!r}; keep one of them.")
            if column != ONE_CLASS:
                class_shares(label, column, where)
            first_line[file] = where
            by_split.setdefault(split, {})[file] = label
            group_of |= {file: group} if group else {}
    listed = ListedFiles(column, by_split, {}, group_of)
    check_several_classes(listed.classes, path)
    if "" in by_split:
        return listed
    train, evaluation = used_splits(by_split, path)
    used = {"train": {file: label for name in train for file, label in by_split[name].items()}}
    used["test"] = by_split[evaluation[0]]
    return listed._replace(value_of=used, not_used={name: len(by_split[name]) for name in evaluation[1:]})


def check_columns(place_of: Mapping[str, int], wanted: Sequence[str], path: object) -> None:
    """Raise UserError unless the first line of a CSV file names columns."""
    if missing := [name for name in wanted if name not in place_of]:
        listed = " and ".join(wanted)
        raise UserError(f"The first line of {path} must name the columns {listed}, each once, but has no {missing[0]}.")


def used_splits(names: Collection[str], path: object) -> tuple[list[str], list[str]]:
    """Return the splits to train on and to evaluate on, of which the first is used. Raises UserError without any."""
    train, evaluation = ([name for name in known if name in names] for known in (TRAINING_NAMES, EVALUATION_NAMES))
    if not train or not evaluation:
        raise UserError(
            f"The column split of {path} says only {', '.join(names)}; it must say train and one of "
            f"{', '.join(EVALUATION_NAMES)}, or leave the column out."
        )
    return train, evaluation


def read_lines(stream: TextIO, path: object) -> tuple[dict[str, int], Iterator[Line]]:
    """Return the meanings of the columns with their numbers, and the lines, which are read one after the other.

    Raises UserError for a line that lacks a value, has more of them than columns, or a split of another name.

    Args:
        stream: the text.
        path: of the file, for messages.
    """
    with reading(path, *_KIND, advice=_ADVICE):
        first = stream.readline().rstrip("\r\n")
        separator = next((each for each in _SEPARATORS if "path" in places_of(_cells(first, each))), ",")
        header = _cells(first, separator)
    rows = csv.reader(stream, delimiter=separator, skipinitialspace=True, strict=True)
    return places_of(header), _lines(rows, path, len(header), places_of(header))


def _lines(rows: Any, path: object, num_columns: int, place_of: Mapping[str, int]) -> Iterator[Line]:
    """Yield the lines of a reader of csv, without empty ones."""
    column = next((name for name in _OF_CLASSES if name in place_of), "")
    with reading(path, *_KIND, advice=_ADVICE):
        for row in rows:
            if not any(map(str.strip, row)):
                continue
            where = f"Line {rows.line_num + 1} of {path}"
            values = {name: row[place].strip() for name, place in place_of.items() if place < len(row)}
            image, label = values.get("path", ""), composed(values.get(column, ""))
            split = values.get("split", "").lower()
            has_label = label.isprintable() and (label or column not in (ONE_CLASS, CLASS_SHARES))
            has_split = split in _SPLITS or not column or "split" not in place_of
            if not image or not has_label or not has_split or any(map(str.strip, row[num_columns:])):
                raise UserError(
                    f"{where} should have a path, printable characters in the column {column or 'path'}, as a split "
                    f"train or one of {', '.join(EVALUATION_NAMES)}, and no more values than there are columns, but is "
                    f"{shown(row)}; put a value with commas in quotes, and | between several classes."
                )
            yield Line(where, image, label, split, values.get("group", ""))


def check_several_classes(names: Collection[str], path: object) -> None:
    """Raise UserError for fewer than two classes."""
    if len(names) < 2:
        raise UserError(f"{path} must list images of at least two classes.")


def _cells(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])


def places_of(header: Sequence[str]) -> dict[str, int]:
    """Return the meaning -> the number of its column; without a meaning that several columns may have."""
    names = [re.sub("[^a-z]", "", name.lower()) for name in header]
    own = {meaning: [meaning] if meaning in names else known for meaning, known in _NAMES.items()}
    places = {meaning: [n for n, name in enumerate(names) if name in known] for meaning, known in own.items()}
    return {meaning: numbers[0] for meaning, numbers in places.items() if len(numbers) == 1}


def class_shares(text: str, column: str, where: str = "") -> dict[str, float]:
    """Return the share of each class: 1 for each of "cat|dog", or those of "cat=0.7|dog=0.3", which sum to 1.

    Raises UserError, which begins with `where`, for anything else.
    """
    parts = [part.strip() for part in text.split("|")] if text else []
    names, shares, total = parts, [1.0] * len(parts), 1.0
    advice = "give different classes with | between them"
    if column == CLASS_SHARES:
        names, shares = [part.rpartition("=")[0].strip() for part in parts], [_share(part) for part in parts]
        total, advice = sum(shares), "give them as cat=0.7|dog=0.3, each class once, with a sum of 1"
    is_distribution = abs(total - 1.0) <= _ROUNDING and min(shares, default=0.0) >= 0.0
    if "" in names or len(set(names)) < len(names) or not is_distribution:
        raise UserError(f"{where} has the {column} {text!r:.200}; {advice}.")
    return {name: share / total for name, share in zip(names, shares, strict=True)}


def _share(part: str) -> float:
    """Return the number behind the last = of a text; NaN if it is none."""
    try:
        return float(part.rpartition("=")[2])
    except ValueError:
        return math.nan


def listed_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return the normalized path of a file that is named relative to a folder.

    The name is taken as it is written or, if only that exists, with slashes for backslashes (Windows) or with letters
    and accents as one character or as two (macOS). No file has a name with a zero character, which is replaced.
    """
    name = name.replace("\0", "\ufffd")
    slashed = name.replace("\\", "/")
    others = (slashed, unicodedata.normalize("NFC", slashed), unicodedata.normalize("NFD", slashed))
    paths = [os.path.normpath(folder / form) for form in dict.fromkeys((name, *others))]
    usual = os.path.normpath(folder / slashed)
    return pathlib.Path(next(filter(os.path.lexists, paths), usual) if len(paths) > 1 else usual)


def check_listed(files: Collection[pathlib.Path], source: object, folder: pathlib.Path, allow_outside: bool) -> None:
    """Raise UserError unless all files that a source names are there, and inside of the folder; links count by target.

    Args:
        files: paths by `listed_file`.
        source: the file that names them, for the message.
        folder: that the user named.
        allow_outside: whether `--allow-outside` was given.
    """
    check_inside(files, source, folder, allow_outside)
    missing = [path for path in files if not os.path.isfile(path)]
    check_found(missing, len(files), source, folder, "give their folder by --images, or correct the paths")


def check_found(
    missing: Sequence[str | pathlib.Path], count: int, source: object, folder: pathlib.Path, advice: str
) -> None:
    """Raise UserError for files that a source of `count` files names, relative to a folder, and that are not there."""
    if missing:
        named = ", ".join(_name(os.path.relpath(path, folder)) for path in missing[:_MOST_NAMED])
        raise UserError(
            f"{len(missing):,} of {count:,} files that {source} names are not there, such as {named}; a path is "
            f"relative to {folder.absolute()}: {advice}."
        )


def check_inside(files: Iterable[pathlib.Path], source: object, folder: pathlib.Path, allow_outside: bool) -> None:
    """Raise UserError for files outside of a folder, and for links that lead out of it; see `check_listed`."""
    if allow_outside:
        return
    root, parents = os.path.realpath(folder), dict[pathlib.Path, str]()
    outside = list[tuple[pathlib.Path, str]]()
    for path in files:
        if path.parent not in parents:
            parents[path.parent] = os.path.realpath(path.parent)
        real = os.path.realpath(path) if os.path.islink(path) else os.path.join(parents[path.parent], path.name)
        if real != root and not real.startswith(os.path.join(root, "")):
            outside.append((path, real))
    if outside:
        path, real = outside[0]
        link = f" (a link to {_name(real)})" if path.is_relative_to(os.path.normpath(folder)) else ""
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise UserError(
            f"{source} names {_name(path.name) if link else _name(path)}{link}{more}, outside of {folder}; copy them "
            "into it, or give --allow-outside if you trust the file."
        )


def _name(path: object) -> str:
    """Return a path for a message, cut and without control characters."""
    return shown(str(path))[1:-1]

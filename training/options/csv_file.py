"""Read a CSV file of images and their classes. Imports neither TensorFlow nor Keras.

The column path names the files, relative to the folder of the CSV file or, if the first is not there, to the current
folder. One of the columns label (a class), labels (any number of classes such as "cat|dog", or none) and probabilities
(shares that sum to 1, such as "cat=0.7|dog=0.3") says what they show. A further column split says train (or training),
or test (testing, val, valid, validation); as in a folder, the images of test are evaluated on where there are others
beside them. Other columns are ignored.

Columns may have other usual names, in any case (`_NAMES`), and may be separated by commas, semicolons, tabs or bars, as
the first line says. The text is UTF-8, UTF-16, UTF-32, or else Windows' cp1252, as Excel writes it.
"""

import codecs
import csv
import io
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keras_vit.errors import UserError, reading, refuse_first
from keras_vit.files.remote import existing_file
from keras_vit.images.formats import is_picture_name
from training.options.common import EVALUATION_NAMES, TRAINING_NAMES, composed
from training.options.listed_files import listed_file

# Columns for one class, for any number of classes, and for a share of each class.
ONE_CLASS, SEVERAL_CLASSES, CLASS_SHARES = "label", "labels", "probabilities"
# Meaning of a column -> its usual names, without spaces and underscores; the first of them that is there is taken.
_NAMES = {
    "path": (
        "path",
        "filepath",
        "filename",
        "fname",
        "file",
        "imagepath",
        "imagefile",
        "imagename",
        "image",
        "img",
        "photo",
    ),
    ONE_CLASS: ("label", "classname", "labelname", "class", "category", "species", "target"),
    SEVERAL_CLASSES: ("labels", "classes", "categories", "tags"),
    CLASS_SHARES: ("probabilities",),
    "split": ("split",),
}
_SEPARATORS = ",;\t|"
# How far from 1 the sum of an image's shares may be; they are then divided by it.
_ROUNDING = 0.02


class ListedFiles(NamedTuple):
    """What a CSV file says."""

    column: str
    """The column of the classes."""
    value_of: dict[str, dict[str, str]]
    """Split ("train" and "test", or "" alone) -> file -> what the column says of it."""
    not_used: dict[str, int]
    """The further evaluation splits, and their numbers of images."""
    remarks: tuple[str, ...]
    """A sentence on each thing that was assumed of the file."""


def listed_files(path: pathlib.Path) -> ListedFiles:
    """Read a CSV file. Raises UserError for the first wrong row."""
    existing_file(path, "--data csv:FILE takes one with the columns path and label")
    with reading(path, "a CSV file", csv.Error, advice="save it again"):
        content, encoding = _decoded(path.read_bytes())
        content = re.sub(r"\Asep=.(?=[\r\n])", "", content)  # Excel's first line
        separator = separator_of(content)
        # Line breaks stay, since those in quotes belong to a value.
        lines = csv.reader(io.StringIO(content, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
        table = [(lines.line_num, row) for row in lines if any(map(str.strip, row))]
    remarks = [f"{path} is not in UTF-8; it is read as {encoding}, of Windows."] if encoding == "cp1252" else []
    header = [name.strip() for name in table[0][1]] if table else []
    if len(header) == 2 and is_picture_name(header[0]):
        remarks.append(f"The first line of {path} names no columns; they are taken as path and label.")
        header = ["path", ONE_CLASS]
    else:
        table = table[1:]
    place_of = places_of(header)
    of_classes = [name for name in (ONE_CLASS, SEVERAL_CLASSES, CLASS_SHARES) if name in place_of]
    of_classes = [name for name in of_classes if name in map(_plain, header)] or of_classes
    if "path" not in place_of or len(of_classes) != 1:
        raise UserError(
            f"The first line of {path} must name the columns path and one of label, labels and probabilities, but is "
            f"{separator.join(header)[:200]!r}."
        )
    [column] = of_classes
    for meaning in ("path", column):
        if len({_plain(name) for name in header} & {*_NAMES[meaning]}) > 1 and meaning not in map(_plain, header):
            remarks.append(f"{path}: the column {header[place_of[meaning]]!r} is taken as the {meaning}.")
    folder = path.parent
    first = table[0][1][place_of["path"]].strip() if table and place_of["path"] < len(table[0][1]) else ""
    if first and os.path.lexists(first) and not os.path.lexists(listed_file(folder, first)):
        folder = pathlib.Path()
        remarks.append(f"The paths of {path} are taken relative to the current folder.")
    splits = (*TRAINING_NAMES, *EVALUATION_NAMES) if "split" in place_of else ("",)
    found: dict[str, dict[str, str]] = {split: {} for split in splits}
    seen: dict[str, tuple[int, str, str]] = {}
    repeated = 0
    for number, row in table:
        image, label, split = row_values(row, header, place_of, column, f"Line {number} of {path}")
        file = str(listed_file(folder, image))
        if file in seen:
            line, known_label, known_split = seen[file]
            if (known_label, known_split) != (label, split):
                advice = _same_image(column, known_label, known_split, label, split)
                raise UserError(f"Lines {line} and {number} of {path} are of the same image {image!r}{advice}.")
            repeated += 1
            continue
        if column != ONE_CLASS:
            class_shares(label, column, f"Line {number} of {path}")
        seen[file] = number, label, split
        found[split][file] = label
    if repeated:
        remarks.append(
            f"Of {path}, {repeated:,} {'line is' if repeated == 1 else 'lines are'} there twice; each counts once."
        )
    texts = {label for files in found.values() for label in files.values()}
    names = texts if column == ONE_CLASS else {name for text in texts for name in class_shares(text, column)}
    parts = {name: [part.strip() for part in re.split("[;,]", name)] for name in sorted(names)}
    joined = [name for name, several in parts.items() if len(several) > 1 and names.issuperset(several)]
    refuse_first(
        [
            (len(names) < 2, f"{path} must list images of at least two classes."),
            (
                column == SEVERAL_CLASSES and joined,
                f"{path} has labels that are several classes, {', '.join(map(repr, joined[:3]))}; put | between them.",
            ),
        ]
    )
    if splits == ("",):
        return ListedFiles(column, found, {}, tuple(remarks))
    for names_of_split, purpose in ((TRAINING_NAMES, "train"), (EVALUATION_NAMES, "evaluate")):
        if not any(found[name] for name in names_of_split):
            words = ", ".join(name for name in splits if found[name])
            raise UserError(
                f"{path} has no image to {purpose} on, since its column split says only {words}; give "
                f"some lines one of {', '.join(names_of_split)}, or leave the column out."
            )
    evaluation, *others = [name for name in EVALUATION_NAMES if found[name]]
    train = {file: label for name in TRAINING_NAMES for file, label in found[name].items()}
    used = {"train": train, "test": found[evaluation]}
    return ListedFiles(column, used, {name: len(found[name]) for name in others}, tuple(remarks))


def row_values(
    row: Sequence[str], header: Sequence[str], place_of: Mapping[str, int], column: str | None, where: str
) -> tuple[str, str, str]:
    """(path, what the column says of it, split) of a line; "" for a column that is not there.

    Raises UserError, which begins with `where`, for a line that lacks a value, or has more of them than columns, and
    for a split of another name beside the column of the classes.
    """
    value_of = {name: row[place].strip() for name, place in place_of.items() if place < len(row)}
    image, label = value_of.get("path", ""), composed(value_of.get(column or "", ""))
    split = value_of.get("split", "").lower()
    refuse_first(
        [
            (
                any(map(str.strip, row[len(header) :])),
                f"{where} has more values than there are columns; put a value with commas in quotes, and | between "
                "several classes.",
            ),
            (
                not image or (not label and column in (ONE_CLASS, CLASS_SHARES)) or not label.isprintable(),
                f"{where} needs a path and a value of printable characters in the column {column or 'path'}; complete "
                "it.",
            ),
            (
                column is not None and "split" in place_of and split not in (*TRAINING_NAMES, *EVALUATION_NAMES),
                f"{where} has the split {split!r}; give train or one of {', '.join(EVALUATION_NAMES)}.",
            ),
        ]
    )
    return image, label, split


def _same_image(column: str, label: str, split: str, other_label: str, other_split: str) -> str:
    """The end of a sentence on two lines of one image: what is wrong with them, and what to do."""
    if label != other_label:
        return f", with {label!r} and {other_label!r}; an image has one {'label' if column == ONE_CLASS else 'line'}"
    return f", of the splits {split} and {other_split}; keep it in one of them"


def _decoded(content: bytes) -> tuple[str, str]:
    """The text of a file and its encoding. Raises UnicodeDecodeError if it has none of the usual ones."""
    unit = 32 if content[:4].count(0) == 3 or content[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE) else 16
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        return content.decode(f"utf-{unit}"), f"utf-{unit}"
    if b"\0" in content[:2]:
        return content.decode(f"utf-{unit}-{'be' if content[:1] == bytes(1) else 'le'}"), f"utf-{unit}"
    if b"\0" in content:
        raise csv.Error("it is no text, as a workbook of Excel is none")
    try:
        return content.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        return content.decode("cp1252"), "cp1252"


def separator_of(content: str) -> str:
    """What separates the values: what makes columns of the first line that can be used, else a comma.

    Python's `csv.Sniffer` counts characters, and takes a letter or a bar between classes for it.
    """
    first = next(filter(str.strip, content.splitlines()), "")
    for separator in _SEPARATORS:
        columns = next(csv.reader([first], delimiter=separator, skipinitialspace=True))
        if "path" in places_of(columns) or (len(columns) == 2 and is_picture_name(columns[0])):
            return separator
    return _SEPARATORS[0]


def places_of(header: Sequence[str]) -> dict[str, int]:
    """Meaning -> the number of the column with the first of its usual names; without what is there twice."""
    names = [_plain(name) for name in header]
    usual = {meaning: next((name for name in known if name in names), "") for meaning, known in _NAMES.items()}
    return {meaning: names.index(name) for meaning, name in usual.items() if name and names.count(name) == 1}


def _plain(column: str) -> str:
    """The name of a column as in `_NAMES`."""
    return re.sub("[^a-z]", "", column.lower())


def class_shares(text: str, column: str, where: str = "") -> dict[str, float]:
    """Class name -> share: 1 for each of "cat|dog", or the shares of "cat=0.7|dog=0.3", which sum to 1.

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
    """The number behind the last = of a text; NaN if it is none."""
    try:
        return float(part.rpartition("=")[2])
    except ValueError:
        return math.nan

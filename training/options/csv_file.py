"""Read a CSV file of images and their classes. Imports neither TensorFlow nor Keras.

The column path names the files, relative to the folder of the CSV file. One of the columns label (a class), labels (any
number of classes such as "cat|dog", or none) and probabilities (shares that sum to 1, such as "cat=0.7|dog=0.3") says
what they show. A further column split says train (or training), or test (testing, val, valid, validation); as in a
folder, the images of test are evaluated on where there are others beside them. Other columns are ignored.
"""

import csv
import io
import math
import os
import pathlib
import re
from typing import NamedTuple

from keras_vit.errors import UserError, near_path
from training.options.common import EVALUATION_NAMES, TRAINING_NAMES, composed

# Columns for one class, for any number of classes, and for a share of each class.
ONE_CLASS, SEVERAL_CLASSES, CLASS_SHARES = "label", "labels", "probabilities"
# What some programs write between two values, with its name in a sentence.
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs"}
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


def listed_files(path: pathlib.Path) -> ListedFiles:
    """Read a CSV file. Raises UserError for the first wrong row."""
    if not path.is_file():
        advice = near_path(path, os.path.isfile) or "; --data csv:FILE takes one with the columns path and label."
        raise UserError(f"There is no file {str(path)!r}{advice}")
    try:
        content = path.read_bytes().decode("utf-8-sig")
        _check_separator(path, content)
        # Line breaks stay, since those in quotes belong to a value.
        rows = csv.DictReader(io.StringIO(content, newline=""), strict=True)
        rows.fieldnames = columns = [name.strip() for name in rows.fieldnames or []]
        table = [(rows.line_num, row) for row in rows]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file in UTF-8 ({str(error)[:100]}); write it again.") from error
    of_classes = [name for name in columns if name in (ONE_CLASS, SEVERAL_CLASSES, CLASS_SHARES)]
    if columns.count("path") != 1 or columns.count("split") > 1 or len(of_classes) != 1:
        raise UserError(
            f"The first line of {path} must name the columns path and one of label, labels and probabilities, but is "
            f"{','.join(columns)!r}."
        )
    [column] = of_classes
    splits = (*TRAINING_NAMES, *EVALUATION_NAMES) if "split" in columns else ("",)
    found: dict[str, dict[str, str]] = {split: {} for split in splits}
    seen: dict[str, tuple[int, str, str]] = {}
    for number, row in table:
        image, label = row["path"] or "", composed((row[column] or "").strip())
        if None in row:
            raise UserError(
                f"Line {number} of {path} has more values than there are columns; put a value with commas in quotes, "
                "and | between several classes."
            )
        if not image or not (label or column == SEVERAL_CLASSES) or not label.isprintable():
            raise UserError(
                f"Line {number} of {path} needs a path and a value of printable characters in the column {column}; "
                "complete it."
            )
        split = (row.get("split") or "").strip().lower()
        if split not in found:
            raise UserError(
                f"Line {number} of {path} has the split {split!r}; give train or one of {', '.join(EVALUATION_NAMES)}."
            )
        file = str(path.parent / image)
        if file in seen:
            first, known_label, known_split = seen[file]
            advice = _same_image(column, known_label, known_split, label, split)
            raise UserError(f"Lines {first} and {number} of {path} are of the same image {image!r}{advice}.")
        if column != ONE_CLASS:
            class_shares(label, column, f"Line {number} of {path}")
        seen[file] = number, label, split
        found[split][file] = label
    texts = {label for files in found.values() for label in files.values()}
    names = texts if column == ONE_CLASS else {name for text in texts for name in class_shares(text, column)}
    if len(names) < 2:
        raise UserError(f"{path} must list images of at least two classes.")
    if column == SEVERAL_CLASSES:
        _check_labels(path, names)
    if splits == ("",):
        return ListedFiles(column, found, {})
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
    return ListedFiles(column, used, {name: len(found[name]) for name in others})


def _same_image(column: str, label: str, split: str, other_label: str, other_split: str) -> str:
    """The end of a sentence on two lines of one image: what is wrong with them, and what to do."""
    if label != other_label:
        return f", with {label!r} and {other_label!r}; an image has one {'label' if column == ONE_CLASS else 'line'}"
    if split != other_split:
        return f", of the splits {split} and {other_split}; keep it in one of them"
    return "; remove one of them"


def _check_labels(path: pathlib.Path, names: set[str]) -> None:
    """Raise UserError for a label that is others with commas or semicolons between them."""
    for name in sorted(names):
        parts = [part.strip() for part in re.split("[;,]", name)]
        if len(parts) > 1 and names.issuperset(parts):
            raise UserError(f"{path} has the labels {name!r}, which are {len(parts)} classes; put | between them.")


def _check_separator(path: pathlib.Path, content: str) -> None:
    """Raise UserError if the first line names the column path between other separators than commas."""
    first = next(iter(content.splitlines()), "")
    for separator, name in _OTHER_SEPARATORS.items():
        columns = [column.strip(' "') for column in first.split(separator)]
        if "path" in columns and len(columns) > 1:
            raise UserError(
                f"{path} must have commas between its values, but its first line has {name} between the columns "
                f"{' and '.join(columns[:2])}; write it with commas."
            )


def class_shares(text: str, column: str, where: str = "") -> dict[str, float]:
    """Class name -> share: 1 for each of "cat|dog", or the shares of "cat=0.7|dog=0.3", which sum to 1.

    Raises UserError, which begins with `where`, for anything else.
    """
    parts = [part.strip() for part in text.split("|")] if text else []
    if column == SEVERAL_CLASSES:
        shares = dict.fromkeys(parts, 1.0)
        if len(shares) != len(parts) or "" in shares:
            raise UserError(f"{where} has the labels {text!r}; give different classes with | between them.")
        return shares
    shares = {}
    for part in parts:
        name, _, share = part.rpartition("=")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if not name.strip() or name.strip() in shares or not 0.0 <= value <= 1.0:
            raise UserError(f"{where} has the probabilities {text!r}; give them as cat=0.7|dog=0.3, each class once.")
        shares[name.strip()] = value
    total = sum(shares.values())
    if abs(total - 1.0) > _ROUNDING:
        raise UserError(f"{where} has probabilities that sum to {total:.6g}, not to 1; correct them.")
    return {name: value / total for name, value in shares.items()}

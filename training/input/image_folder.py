"""Class folders or a CSV file as a data set: which files are images, which class and which split each is of."""

import csv
import hashlib
import os
import pathlib
import zlib

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.files.image_formats import format_list
from keras_vit.files.remote import is_remote
from training.input.dataset import Oddities, Source, Split, decoding_problem, listed, problems_of, reason
from training.options.common import OnBadImage

EVALUATION_NAMES = ("test", "val", "valid", "validation")
# Of a folder without splits of its own, a tenth of each class is kept for evaluation.
_HOLD_OUT = 10


def folder(path: pathlib.Path, on_bad_image: OnBadImage, split_seed: int | None = None) -> Source:
    """Class folders of image files (keras_vit/files/image_formats.py), whatever they are called; classes in name order.

    With train and test (or val, valid, validation) above the classes these are the splits, and must hold the same
    classes; else a tenth of each class is kept for evaluation, as `_held_out` says.
    """
    splits = split_folders(path)
    if splits:
        _refuse_seed(split_seed, path)
        train, test = (_class_files(split, on_bad_image) for split in splits)
        if train.keys() != test.keys():
            raise UserError(
                f"The classes of {splits[0]} and {splits[1]} must be the same, but "
                f"{', '.join(sorted(train.keys() ^ test.keys()))} are only in one of them."
            )
    else:
        train, test = _held_out(_class_files(path, on_bad_image), path, split_seed)
    names = tuple(train)
    return Source(names, _file_split(train), _file_split(test))


def _held_out(
    classes: dict[str, list[str]], root: pathlib.Path, seed: int | None
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The files of each class to train on, and to evaluate on: a tenth, rounded up.

    Without a seed it is every tenth file by name, else the first tenth in the order of a hash of the seed and of the
    path below `root`. So the split is the same on any machine, and a new file hardly changes it.
    """

    def place(file: str) -> bytes:
        return hashlib.sha256(os.fsencode(f"{seed}/{os.path.relpath(file, root)}")).digest()

    train, test = {}, {}
    for name, files in classes.items():
        if len(files) < 2:
            raise UserError(f"The class {name!r} has one image, and needs two: to train on and to evaluate on.")
        count = -(-len(files) // _HOLD_OUT)
        test[name] = files[::_HOLD_OUT] if seed is None else sorted(sorted(files, key=place)[:count])
        train[name] = sorted(set(files) - set(test[name]))
    kept, images = (sum(map(len, files.values())) for files in (test, classes))
    fewest, most = (limit(map(len, test.values())) for limit in (min, max))
    each = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    how = "Every tenth image of each class" if seed is None else f"A tenth of each class, drawn with the seed {seed},"
    print(f"{how} is kept for evaluation: {kept:,} of {images:,} images, {each} of each class.")
    return train, test


def _refuse_seed(split_seed: int | None, path: pathlib.Path) -> None:
    """Raise UserError for a seed of splits that are there already."""
    if split_seed is not None:
        raise UserError(f"--split-seed draws a split, but {path} has splits of its own; leave it out.")


def csv_list(path: pathlib.Path, on_bad_image: OnBadImage, split_seed: int | None = None) -> Source:
    """Image files with one class each from a CSV file with the columns path and label; classes in name order.

    Paths are relative to the folder of the CSV file. A further column split says train, or test (val, valid,
    validation); without it a tenth of each class is kept for evaluation, as `_held_out` says. Other columns are
    ignored.
    """
    found = _listed_files(path)
    if set(found) == {""}:
        train, test = _held_out(_readable(found[""], str(path), on_bad_image), path.parent, split_seed)
    else:
        _refuse_seed(split_seed, path)
        train, test = (_readable(found[split], f"{path} ({split})", on_bad_image) for split in ("train", "test"))
        if train.keys() != test.keys():
            only = ", ".join(sorted(train.keys() ^ test.keys()))
            raise UserError(f"Both splits of {path} must have the same classes, but {only} are only in one of them.")
    return Source(tuple(train), _file_split(train), _file_split(test))


def _listed_files(path: pathlib.Path) -> dict[str, dict[str, list[str]]]:
    """Split ("train" and "test", or "" alone) -> class name -> files. Raises UserError for the first wrong row."""
    if not path.is_file():
        raise UserError(f"There is no file {str(path)!r}; --data csv:FILE takes one with the columns path and label.")
    try:
        rows = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines(), restkey="")
        columns = rows.fieldnames or []
        table = list(rows)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is no CSV file in UTF-8 ({str(error)[:100]}); write it again.") from error
    if not {"path", "label"} <= set(columns):
        raise UserError(f"The first line of {path} must name the columns path and label, but is {','.join(columns)!r}.")
    splits = ("train", "test") if "split" in columns else ("",)
    found: dict[str, dict[str, list[str]]] = {split: {} for split in splits}
    seen: dict[str, int] = {}
    for number, row in enumerate(table, 2):
        image, label = row["path"] or "", (row["label"] or "").strip()
        if not image or not label or not label.isprintable():
            raise UserError(f"Line {number} of {path} needs a path and a label of printable characters; complete it.")
        if image in seen:
            raise UserError(
                f"Lines {seen[image]} and {number} of {path} are of the same image {image!r}; an image has one label."
            )
        seen[image] = number
        split = (row.get("split") or "").strip().lower()
        split = "test" if split in EVALUATION_NAMES else split
        if split not in found:
            raise UserError(
                f"Line {number} of {path} has the split {split!r}; give train or one of {', '.join(EVALUATION_NAMES)}."
            )
        found[split].setdefault(label, []).append(str(path.parent / image))
    if len({label for classes in found.values() for label in classes}) < 2:
        raise UserError(f"{path} must list images of at least two classes.")
    return {split: {label: sorted(classes[label]) for label in sorted(classes)} for split, classes in found.items()}


def split_folders(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
    """The folders of the training and the evaluation split, in any case; None where the folders are the classes."""
    found = {entry.lower(): path / entry for entry in _directories(path)}
    known = [found[name] for name in ("train", *EVALUATION_NAMES) if name in found]
    if "train" in found and len(known) > 1:
        return known[0], known[1]
    for split in known:
        if _directories(split):  # without folders inside it may well be a class, of railways
            raise UserError(
                f"{split} looks like one of two splits without the other: name them train and one of "
                f"{', '.join(EVALUATION_NAMES)}, or put the class folders directly into {path}."
            )
    return None


def _directories(path: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _class_files(path: pathlib.Path, on_bad_image: OnBadImage) -> dict[str, list[str]]:
    """Class name -> its image files in the order of their paths, all of them seen to be readable."""
    classes = _directories(path)
    if len(classes) < 2:
        raise UserError(f"{path} should hold a folder for each of at least two classes, but holds {len(classes)}.")
    for name in classes:
        if not name.isprintable():  # a line break would split it in labels.txt; no UTF-8 is not printable either
            raise UserError(f"The class folder {name!r} in {path} has unprintable characters in its name; rename it.")
    return _readable({name: _entries(path / name) for name in classes}, str(path), on_bad_image)


def _readable(found: dict[str, list[str]], where: str, on_bad_image: OnBadImage) -> dict[str, list[str]]:
    """The files of each class that are readable images; a UserError names the others, unless they are skipped."""
    oddities = Oddities()
    bad = problems_of([file for files in found.values() for file in files], lambda file: _file_problem(file, oddities))
    if bad:
        named = listed({_shown(file): why for file, why in bad.items()})
        count = f"{len(bad)} of {sum(map(len, found.values()))} files in {where} are no readable images: {named}"
        if on_bad_image == "stop":
            raise UserError(f"{count}; repair or remove them, or give --on-bad-image skip.")
        print(f"Skipped: {count}.")
    images = {name: [file for file in files if file not in bad] for name, files in found.items()}
    for name, files in images.items():
        if not files:
            raise UserError(f"The class {name!r} of {where} has no image ({format_list()}).")
    oddities.warn(f"{sum(map(len, images.values())):,} images in {where}")
    return images


def _entries(folder: pathlib.Path) -> list[str]:
    """What lies in a folder and the folders inside it, without what is hidden; a link to a folder is one entry."""
    entries = list(folder.rglob("*"))
    if not is_remote(folder):  # else they are files
        entries = [entry for entry in entries if entry.is_symlink() or not entry.is_dir()]
    return sorted(
        str(entry) for entry in entries if not any(part[0] == "." for part in entry.relative_to(folder).parts)
    )


def _file_problem(file: str, oddities: Oddities) -> str | None:
    """Why a file cannot be decoded, or None; `oddities` notes what else is odd about it."""
    if os.path.isdir(file):
        return "a link to a folder, which is not followed"
    if not is_remote(file) and not os.path.isfile(file):
        return "no file, or a link to none"
    try:
        return decoding_problem(tf.io.read_file(os.fsencode(file)), oddities, _shown(file))
    except tf.errors.OpError as error:
        return reason(error)


def _shown(file: str) -> str:
    """A path as a terminal can show it, whatever its bytes."""
    return os.fsencode(file).decode(errors="backslashreplace")


def _file_split(classes: dict[str, list[str]]) -> Split:
    paths = [file for files in classes.values() for file in files]
    files = tf.constant([os.fsencode(path) for path in paths])
    known = np.repeat(np.arange(len(classes)), [len(files) for files in classes.values()])
    labels = tf.constant(known, tf.int32)

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.io.read_file(files[index]), labels[index]

    names = "\0".join(os.path.join(name, os.path.basename(file)) for name, files in classes.items() for file in files)
    fingerprint = zlib.crc32(os.fsencode(names))  # without the path of the folder, which may differ between workers
    return Split(len(paths), read, lambda index: _shown(paths[index]), fingerprint=fingerprint, labels=known)

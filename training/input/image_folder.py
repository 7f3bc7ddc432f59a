"""Class folders as a data set: which files are images, which class and which split each is of."""

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
# Of a folder without a split of its own, every tenth image of each class is kept for evaluation.
_HOLD_OUT = 10


def folder(path: pathlib.Path, on_bad_image: OnBadImage) -> Source:
    """Class folders of image files (keras_vit/files/image_formats.py), whatever they are called; classes in name order.

    With train and test (or val, valid, validation) above the classes these are the splits, and must hold the same
    classes; else every tenth image of each class, by name, is kept for evaluation.
    """
    splits = _split_folders(path)
    if splits:
        train, test = (_class_files(split, on_bad_image) for split in splits)
        if train.keys() != test.keys():
            raise UserError(
                f"The classes of {splits[0]} and {splits[1]} must be the same, but "
                f"{', '.join(sorted(train.keys() ^ test.keys()))} are only in one of them."
            )
    else:
        train, test = {}, {}
        for name, files in _class_files(path, on_bad_image).items():
            if len(files) < 2:
                raise UserError(f"The class {name!r} has one image, and needs two: to train on and to evaluate on.")
            test[name] = files[::_HOLD_OUT]
            train[name] = sorted(set(files) - set(test[name]))
    names = tuple(train)
    return Source(names, _file_split(train), _file_split(test))


def _split_folders(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
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
    found = {name: _entries(path / name) for name in classes}
    oddities = Oddities()
    bad = problems_of([file for files in found.values() for file in files], lambda file: _file_problem(file, oddities))
    if bad:
        named = listed({_shown(file): why for file, why in bad.items()})
        count = f"{len(bad)} of {sum(map(len, found.values()))} files in {path} are no readable images: {named}"
        if on_bad_image == "stop":
            raise UserError(f"{count}; repair or remove them, or give --on-bad-image skip.")
        print(f"Skipped: {count}.")
    images = {name: [file for file in files if file not in bad] for name, files in found.items()}
    for name, files in images.items():
        if not files:
            raise UserError(f"The class folder {path / name} holds no image ({format_list()}).")
    oddities.warn(f"{sum(map(len, images.values())):,} images in {path}")
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
    labels = tf.constant(np.repeat(np.arange(len(classes)), [len(files) for files in classes.values()]), tf.int32)

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.io.read_file(files[index]), labels[index]

    names = "\0".join(os.path.join(name, os.path.basename(file)) for name, files in classes.items() for file in files)
    fingerprint = zlib.crc32(os.fsencode(names))  # without the path of the folder, which may differ between workers
    return Split(len(paths), read, lambda index: _shown(paths[index]), fingerprint=fingerprint)

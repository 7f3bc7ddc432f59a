"""Checks of paths and names that need no TensorFlow, whose import takes seconds."""

import dataclasses
import itertools
import os
import pathlib
import shlex
from collections.abc import Sequence

from keras_vit import UserError
from keras_vit.cli.options import option_name
from keras_vit.files.file_contents import shown
from keras_vit.files.remote import existing_folder, is_remote, matching
from keras_vit.images.formats import format_list, is_hidden
from training.data.csv_file import ONE_CLASS, class_shares, listed_files
from training.data.decisions import read_decisions
from training.options.common import EVALUATION_NAMES, TRAINING_NAMES, DataOptions, OnBadImage, composed

# Of a folder without splits of its own, a tenth of each class is kept for evaluation.
HOLD_OUT = 10
# Files of a list up to which it is looked whether they exist.
_MOST_LISTED = 10_000
# What the names of the files of a source end in, and those of compressed tar files.
_ENDINGS = {"tfrecord": ".tfrecord", "tar": ".tar"}
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

# What a path of each kind is.
_NOUNS: dict[str | None, str] = {"folder": "folder", "csv": "file"}
# Which fields of DataOptions each kind of source takes.
_FIELDS_OF = {
    "digits": (),
    "tfds": ("data_dir", "train_split", "eval_split"),
    "folder": ("on_bad_image", "split_seed", "exclude"),
    "csv": ("on_bad_image", "split_seed", "exclude"),
    "tfrecord": ("on_bad_image",),
    "tar": ("on_bad_image",),
}


def check_data(source: DataOptions) -> None:
    """Raise UserError unless `--data` names a kind of source, with the options that it takes, and its folder exists."""
    kind, _, rest = source.data.partition(":")
    if kind not in _FIELDS_OF or bool(rest) == (kind == "digits"):
        there = _kind_of(source.data)
        advice = f"; for this {_NOUNS[there]}, give --data {shlex.quote(f'{there}:{source.data}')}" if there else ""
        raise UserError(
            "--data takes digits, tfds:NAME[:CONFIG], folder:PATH, csv:FILE, tfrecord:GLOB or tar:GLOB, but was given "
            f"{source.data!r}{advice}."
        )
    for field in dataclasses.fields(source):
        if field.name not in ("data", *_FIELDS_OF[kind]) and getattr(source, field.name) != field.default:
            raise UserError(f"{option_name(field.name)} does not apply to --data {kind}; leave it out.")
    there = _kind_of(rest)
    if kind in _NOUNS and there not in (kind, None):
        raise UserError(f"{rest!r} is a {_NOUNS[there]}; give --data {shlex.quote(f'{there}:{rest}')}.")
    if source.exclude is not None:
        read_decisions(source.exclude)
    if kind == "folder":
        _check_folder(rest)
    if kind == "csv" and not is_remote(rest):
        _check_listed(source.path, source.on_bad_image)
    if kind in _ENDINGS and not is_remote(rest):
        files_of(kind, rest, matching(rest))
    if source.data_dir is not None and not is_remote(source.data_dir):
        existing_folder(source.data_dir, "--data-dir takes the folder of prepared data sets, or an empty one")


def _kind_of(path: str) -> str | None:
    """The kind of source that a path of this machine is; None if it is of neither."""
    if os.path.isdir(path):
        return "folder"
    return "csv" if path.lower().endswith(".csv") and os.path.isfile(path) else None


def _check_folder(name: str) -> None:
    """Raise UserError unless there are at least two folders of classes, or one of a split."""
    path = existing_folder(name, "--data folder:PATH takes a folder of class folders")
    if is_remote(name):
        return  # each entry costs a request
    inside = directories(path)
    if len(inside) < 2 and not {entry.lower() for entry in inside} & {*TRAINING_NAMES, *EVALUATION_NAMES}:
        raise few_classes(path, inside)
    for folder in split_folders(path) or (path,):
        _check_levels(folder)


def _check_levels(path: pathlib.Path) -> None:
    """Raise UserError if class folders hold nothing but folders of the same names: they are splits, or masks."""
    alike: dict[tuple[str, ...], str] = {}
    for name in directories(path):
        inside = _folders_alone(path / name)
        if len(inside) < 2:  # one of the same name, such as images, may well be in each class
            continue
        if inside in alike:
            raise UserError(
                f"{path / alike[inside]} and {path / name} should be class folders, but both hold only the folders "
                f"{', '.join(inside[:5])}{' …' if inside[5:] else ''}; call splits train and test, give one of the two "
                "as --data, or move the pictures of each class directly into its folder."
            )
        alike[inside] = name


def _folders_alone(path: pathlib.Path) -> tuple[str, ...]:
    """The names of the folders in a folder, in order; () if a file is beside them."""
    names = []
    with os.scandir(path) as entries:
        for entry in entries:
            if not is_hidden(entry.name) and not entry.is_dir():
                return ()  # at once: a class may have many pictures
            names += [] if is_hidden(entry.name) else [entry.name]
    return tuple(sorted(names))


def _check_listed(path: pathlib.Path, on_bad_image: OnBadImage) -> None:
    """Raise UserError unless a CSV file can be used and names files that exist; of a long one, the first are checked.

    Images may be skipped, but not all of them.
    """
    value_of = listed_files(path).value_of
    count = sum(map(len, value_of.values()))
    checked = list(itertools.islice(itertools.chain.from_iterable(value_of.values()), _MOST_LISTED))
    missing = [file for file in checked if not os.path.lexists(file)]
    if missing and (on_bad_image == "stop" or len(missing) == count):
        skip = ", or give --on-bad-image skip" if len(missing) < len(checked) else ""
        raise UserError(
            f"Of {'the first ' * (len(checked) < count)}{len(checked):,} files that {path} names, {len(missing):,} "
            f"cannot be found, first {shown(missing[0])}; a path is relative to {path.parent.absolute()}: "
            f"correct the paths{skip}."
        )


def files_of(kind: str, pattern: str, found: Sequence[str]) -> list[str]:
    """The TFRecord or tar files among those that a pattern matches, in order. Raises UserError if there is none.

    So it does for compressed tar files, in which nothing can be read by its place.
    """
    ending = _ENDINGS[kind]
    compressed = [file for file in found if file.endswith(_COMPRESSED)]
    if kind == "tar" and compressed:
        raise UserError(
            f"--data tar:GLOB takes tar files as they are, but {min(compressed)} is compressed; unpack it to a "
            f"{ending} file, such as by gunzip: the pictures inside are compressed already."
        )
    if files := sorted(file for file in found if file.endswith(ending)):
        return files
    folder = f"; for this folder, give {shlex.quote(f'{kind}:{pattern}/*{ending}')}" if os.path.isdir(pattern) else ""
    raise UserError(f"--data {kind}:GLOB takes files that end in {ending}, but {pattern!r} matches none{folder}.")


def few_classes(path: pathlib.Path, names: Sequence[str]) -> UserError:
    """Return the error of a folder with these class folders, fewer than two."""
    held = f"only the folder {names[0]}" if names else "none"
    return UserError(f"{path} should hold a folder for each of at least two classes, but holds {held}.")


def split_folders(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
    """The folders of the training and the evaluation split, in any case; None where the folders are the classes."""
    found = {entry.lower(): path / entry for entry in directories(path)}
    train, test = ([found[name] for name in names if name in found] for names in (TRAINING_NAMES, EVALUATION_NAMES))
    if train and test:
        return train[0], test[0]
    for split in train + test:
        if directories(split):  # without folders inside it may well be a class, of railways
            raise UserError(
                f"{split} looks like one of two splits without the other: name them train and one of "
                f"{', '.join(EVALUATION_NAMES)}, or put the class folders directly into {path}."
            )
    return None


def directories(path: pathlib.Path) -> list[str]:
    """The names of the folders in a folder, in order, without what is hidden."""
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not is_hidden(entry.name))


def check_class_size(name: str, count: int, where: str, *, least: int) -> None:
    """Raise UserError for a class of fewer images than `least`, which is 1, or 2 where some are kept for evaluation."""
    if count < least:
        few = "has one image, and needs two: to train on and to evaluate on"
        raise UserError(f"The class {name!r} {few if count else f'of {where} has no image ({format_list()})'}.")


def unlabelled_path(name: str) -> pathlib.Path:
    """The folder that `--unlabelled folder:PATH` names. Raises UserError unless it exists."""
    kind, _, rest = name.partition(":")
    if kind != "folder" or not rest:
        raise UserError(f"--unlabelled takes folder:PATH of pictures, but was given {name!r}.")
    return existing_folder(rest, "--unlabelled takes a folder of pictures")


def listed_classes(source: DataOptions) -> tuple[str, ...] | None:
    """The classes of a folder or CSV file of this machine, without a look at the pictures; None for other data."""
    kind, _, rest = source.data.partition(":")
    if kind not in ("folder", "csv") or is_remote(rest):
        return None
    if kind == "folder":
        splits = split_folders(source.path)
        return tuple(sorted(map(composed, directories(splits[0] if splits else source.path))))
    column, value_of, *_ = listed_files(source.path)
    texts = {text for files in value_of.values() for text in files.values()}
    return tuple(
        sorted(texts if column == ONE_CLASS else {name for text in texts for name in class_shares(text, column)})
    )

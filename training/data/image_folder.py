"""Class folders or a CSV file as a data set: which files are images, which classes and which split each is of."""

import collections
import concurrent.futures
import dataclasses
import hashlib
import itertools
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.errors import is_or_are, nearest
from keras_vit.files.labels import composed
from keras_vit.files.remote import is_remote
from keras_vit.images.formats import is_hidden, is_picture, is_picture_name, others_line
from training.data.checks import HOLD_OUT, check_class_size, directories, few_classes, split_folders
from training.data.csv_file import ONE_CLASS, SEVERAL_CLASSES, class_shares, listed_files
from training.data.dataset import (
    DataSet,
    ImageWarnings,
    Split,
    check_classes_of_splits,
    decoding_problem,
    error_reason,
    problems_of,
    summarize_problems,
)
from training.data.decisions import read_decisions
from training.data.file_contents import FileContents, shown
from training.options.common import OnBadImage

_PURPOSES = {"train": "train on", "test": "evaluate on"}


def folder(
    path: pathlib.Path, on_bad_image: OnBadImage, split_seed: int | None = None, exclude: str | None = None
) -> DataSet:
    """Class folders of image files (keras_vit/images/formats.py), whatever they are called; classes in name order.

    Files that neither are called like a picture nor hold one are counted in a line.

    With train (or training) and test (testing, val, valid, validation) above the classes these are the splits, and must
    hold the same classes; else a tenth of each class is kept for evaluation, as `_held_out` says. The decisions of the
    file `exclude` come before that.
    """
    splits, check = split_folders(path), _FileCheck(on_bad_image, exclude)
    if splits:
        if left_out := [name for name in directories(path) if path / name not in splits]:
            print(f"Not used, beside {splits[0].name} and {splits[1].name} of {path}: {', '.join(left_out)}.")
        _refuse_seed(split_seed, path)
        train, test = _decided([_class_files(split, check, least=1) for split in splits], check)
        check_classes_of_splits(train, test, path)
    else:
        [classes] = _decided([_class_files(path, check, least=2)], check)
        train, test = _held_out(classes, path, split_seed)
    return _source_of_classes(train, test, check.contents, held_out=not splits)


def unlabelled_folder(path: pathlib.Path, on_bad_image: OnBadImage) -> Split:
    """All image files in a folder and the folders inside it, whatever they are called; the labels are -1."""
    check = _FileCheck(on_bad_image, exclude=None)
    found, others = _entries(path)
    if others:
        print(others_line(others, str(path)))
    files = _good_files(found, str(path), check)
    if not files:
        raise UserError(f"{path} should hold pictures without labels, but has none; give another folder.")
    names = [os.path.relpath(file, path) for file in files]
    split = _split_of_files(files, np.full(len(files), -1), names, check.contents)
    return dataclasses.replace(split, labels=None)


@dataclasses.dataclass(frozen=True)
class _FileCheck:
    """Reads every file once: which are readable images, and what they contain."""

    on_bad_image: OnBadImage
    exclude: str | None
    """File of decisions on single images."""
    contents: FileContents = dataclasses.field(default_factory=FileContents)


def _decided(splits: Sequence[dict[str, list[str]]], check: _FileCheck) -> list[dict[str, list[str]]]:
    """Class name -> files of each split, without what the decisions drop, and with their new labels.

    Raises UserError for a new label that is no class, and for a class that loses all its images.
    """
    if check.exclude is None:
        return [*splits]
    files = [file for split in splits for found in split.values() for file in found]
    decisions = read_decisions(check.exclude).of_files(files, check.contents)
    results, dropped, relabeled = [], 0, 0
    for split in splits:
        result: dict[str, list[str]] = {name: [] for name in split}
        for name, found in split.items():
            for file in found:
                decision = decisions.get(file)
                label = decision.new_label if decision and decision.decision == "relabel" else name
                if label not in result:
                    raise UserError(
                        f"{check.exclude} gives {shown(file)} the label {label!r}, which the data do not have; "
                        f"correct it; the nearest: {nearest(label, result)}."
                    )
                if decision and decision.decision == "drop":
                    dropped += 1
                    continue
                result[label].append(file)
                relabeled += label != name
        if empty := [name for name, found in result.items() if not found]:
            raise UserError(
                f"{check.exclude} leaves no image of the class {empty[0]!r}; keep some, or remove the class."
            )
        results.append({name: sorted(found) for name, found in result.items()})
    print(
        f"{check.exclude}: {dropped:,} of {len(files):,} images {is_or_are(dropped)} left out, and {relabeled:,} "
        f"{'has' if relabeled == 1 else 'have'} another label."
    )
    return results


def _source_of_classes(
    train: dict[str, list[str]], test: dict[str, list[str]], contents: FileContents, *, held_out: bool
) -> DataSet:
    """The files of each class to train on, and to evaluate on, as a source."""
    label_of = [{file: name for name, files in split.items() for file in files} for split in (train, test)]
    for remark in contents.remarks(*label_of):
        print(f"Warning: {remark}")
    return DataSet(tuple(train), _file_split(train, contents), _file_split(test, contents), held_out=held_out)


def _held_out(
    classes: dict[str, list[str]], root: pathlib.Path, seed: int | None
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The files of each class to train on, and to evaluate on: a tenth, rounded up.

    Without a seed it is every tenth file by name, else the first tenth in the order of a hash of the seed and of the
    path below `root`. So the split is the same on any machine, and a new file hardly changes it.
    """
    train, test = {}, {}
    for name, files in classes.items():
        check_class_size(name, len(files), str(root), least=2)
        count = -(-len(files) // HOLD_OUT)
        drawn = files[::HOLD_OUT] if seed is None else sorted(files, key=lambda file: _draw(file, root, seed))[:count]
        test[name] = sorted(drawn)
        train[name] = sorted(set(files) - set(test[name]))
    kept, images = (sum(map(len, files.values())) for files in (test, classes))
    fewest, most = (limit(map(len, test.values())) for limit in (min, max))
    each = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    how = "Every tenth image of each class" if seed is None else f"A tenth of each class, drawn with the seed {seed},"
    print(f"{how} is kept for evaluation: {kept:,} of {images:,} images, {each} of each class.")
    return train, test


def _draw(file: str, root: pathlib.Path, seed: int) -> bytes:
    """Return a hash that puts the files in a random order."""
    return hashlib.sha256(os.fsencode(f"{seed}/{os.path.relpath(file, root)}")).digest()


def _refuse_seed(split_seed: int | None, path: pathlib.Path) -> None:
    """Raise UserError for a seed of splits that are there already."""
    if split_seed is not None:
        raise UserError(f"--split-seed draws a split, but {path} has splits of its own; leave it out.")


def csv_list(
    path: pathlib.Path, on_bad_image: OnBadImage, split_seed: int | None = None, exclude: str | None = None
) -> DataSet:
    """Image files with their classes from a CSV file with the columns path and label; classes in name order.

    What the file holds says `training.data.csv_file`. Without a column split a tenth of each class is kept for
    evaluation, as `_held_out` says.
    """
    column, value_of, not_used = listed_files(path)
    for split, count in not_used.items():
        print(f"Not used, beside the images of {path} to train and to evaluate on: {count:,} of the split {split}.")
    check = _FileCheck(on_bad_image, exclude)
    if column != ONE_CLASS:
        if exclude is not None:
            raise UserError(f"--exclude is for images of one class each, but {path} has the column {column}.")
        _warn_of_separators(path, column, {label for files in value_of.values() for label in files.values()})
        return _with_targets(path, column, value_of, check, split_seed)
    if unusual := [label for files in value_of.values() for label in files.values() if "|" in label]:
        print(f"{unusual[0]!r} is one class of {path}; for several classes of an image, call the column labels.")
    found = {split: _by_class(files) for split, files in value_of.items()}
    if set(found) == {""}:
        [classes] = _decided([_readable(found[""], str(path), check)], check)
        train, test = _held_out(classes, path.parent, split_seed)
    else:
        _refuse_seed(split_seed, path)
        train, test = _decided(
            [_readable(found[split], f"{path} ({split})", check) for split in ("train", "test")], check
        )
        check_classes_of_splits(train, test, path)
    return _source_of_classes(train, test, check.contents, held_out=set(found) == {""})


def _warn_of_separators(path: pathlib.Path, column: str, labels: set[str]) -> None:
    """Name a label with a comma or semicolon if none of the labels has a bar, which separates classes."""
    if column == SEVERAL_CLASSES and not any("|" in label for label in labels):
        for label in sorted(label for label in labels if {",", ";"} & {*label})[:1]:
            print(f"Warning: {label!r} is one class of {path}; for several classes of an image, put | between them.")


def _by_class(label_of: dict[str, str]) -> dict[str, list[str]]:
    """Class name -> its files, both in order, from the class name of each file."""
    classes: dict[str, list[str]] = {name: [] for name in sorted(set(label_of.values()))}
    for file in sorted(label_of):
        classes[label_of[file]].append(file)
    return classes


def _with_targets(
    path: pathlib.Path, column: str, value_of: dict[str, dict[str, str]], check: _FileCheck, split_seed: int | None
) -> DataSet:
    """A source of images with several classes each, or with a share of each class."""
    shares = {file: class_shares(text, column) for files in value_of.values() for file, text in files.items()}
    names = tuple(sorted({name for found in shares.values() for name in found}))
    parts = {
        split: _good_files(sorted(files), f"{path} ({split})" if split else str(path), check)
        for split, files in value_of.items()
    }
    if set(parts) == {""}:
        parts = _spread_tenth({file: shares[file] for file in parts[""]}, path.parent, split_seed)
    else:
        _refuse_seed(split_seed, path)
    for split, files in parts.items():
        missing = sorted(set(names) - {name for file in files for name, share in shares[file].items() if share})
        if not files or (missing and split == "train"):
            what = f"image of the class {missing[0]!r}" if files else "image"
            advice = "add some, or leave the class out" if files else "add some"
            raise UserError(f"{path} has no {what} to {_PURPOSES[split]}; {advice}.")
        if missing:
            print(f"No image to evaluate on has the class {', '.join(missing)}.")
    known = [{file: shares[file] for file in parts[split]} for split in ("train", "test")]
    for remark in check.contents.remarks(*known):
        print(f"Warning: {remark}")
    train, test = (_target_split(split, names, column == SEVERAL_CLASSES, check.contents) for split in known)
    return DataSet(names, train, test, held_out=set(value_of) == {""})


def _spread_tenth(shares: dict[str, dict[str, float]], root: pathlib.Path, seed: int | None) -> dict[str, list[str]]:
    """Split -> its files: every tenth is kept for evaluation, of the files in the order of the rarest of their classes.

    So each class has about a tenth of its images there.
    """
    counts = collections.Counter(name for found in shares.values() for name, share in found.items() if share)

    def place(file: str) -> tuple:
        classes = [name for name, share in shares[file].items() if share]
        rarest = min(((counts[name], name) for name in classes), default=(0, ""))
        return rarest, "" if seed is None else _draw(file, root, seed), file

    if len(shares) < 2:
        raise UserError("One image is too few: two are needed, to train on and to evaluate on.")
    ordered = sorted(shares, key=place)
    test = ordered[min(HOLD_OUT // 2, len(ordered) - 1) :: HOLD_OUT]  # the single image of a class is for training
    print(f"A tenth of the images is kept for evaluation, spread over the classes: {len(test):,} of {len(ordered):,}.")
    return {"train": sorted(set(ordered) - set(test)), "test": sorted(test)}


def _class_files(path: pathlib.Path, check: _FileCheck, *, least: int) -> dict[str, list[str]]:
    """Class name -> its image files in the order of their paths, at least so many, all of them seen to be readable."""
    classes = directories(path)
    if len(classes) < 2:
        raise few_classes(path, classes)
    if beside := [entry.name for entry in path.iterdir() if not entry.is_dir() and is_picture_name(entry.name)]:
        pictures = "1 picture" if len(beside) == 1 else f"{len(beside):,} pictures"
        print(f"Not used, because outside the class folders of {path}: {pictures}, {min(beside)} first.")
    names = sorted(map(composed, classes))
    # A line break would split a name in labels.txt; what is no UTF-8 is not printable either.
    if odd := [name for name in classes if not name.isprintable()]:
        raise UserError(f"The class folder {odd[0]!r} in {path} has unprintable characters in its name; rename it.")
    if twice := [name for name, following in itertools.pairwise(names) if name == following]:
        raise UserError(f"Two folders of {path} are called {twice[0]!r}, in two forms of Unicode; join them.")
    of_name, others = {}, []
    for name in classes:
        of_name[composed(name)], beside = _entries(path / name)
        others += beside
    if others:
        print(others_line(others, str(path)))
    for name in names:  # before all of them are decoded, which may take minutes
        check_class_size(name, len(of_name[name]), str(path), least=least)
    return _readable({name: of_name[name] for name in names}, str(path), check)


def _readable(found: dict[str, list[str]], where: str, check: _FileCheck) -> dict[str, list[str]]:
    """The files of each class that are readable images; a UserError names the others, unless they are skipped."""
    good = set(_good_files([file for files in found.values() for file in files], where, check))
    images = {name: [file for file in files if file in good] for name, files in found.items()}
    for name, files in images.items():
        check_class_size(name, len(files), where, least=1)
    return images


def _good_files(files: Sequence[str], where: str, check: _FileCheck) -> list[str]:
    """The files that are readable images; a UserError names the others, unless they are skipped."""
    image_warnings = ImageWarnings()
    bad = problems_of(files, lambda file: file_problem(file, image_warnings, check.contents))
    if bad:
        named = summarize_problems({shown(file): why for file, why in bad.items()})
        count = f"{len(bad)} of {len(files)} files in {where} cannot be read as images: {named}"
        if check.on_bad_image == "stop":
            raise UserError(f"{count}; repair or remove them, or give --on-bad-image skip.")
        print(f"Skipped: {count}.")
    good = [file for file in files if file not in bad]
    image_warnings.warn(f"{len(good):,} images in {where}")
    return good


def _entries(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """The pictures in a folder and the folders inside it, and what else lies there, without what is hidden.

    A link to a folder is one entry.
    """
    entries = [entry for entry in folder.rglob("*") if not any(map(is_hidden, entry.relative_to(folder).parts))]
    if not is_remote(folder):  # else they are files
        entries = [entry for entry in entries if entry.is_symlink() or not entry.is_dir()]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # of a bucket, each first byte is a request
        pictures = list(pool.map(is_picture, entries))
    split: tuple[list[str], list[str]] = ([], [])
    for entry, picture in zip(entries, pictures, strict=True):
        split[not picture].append(str(entry))
    return sorted(split[0]), split[1]


def file_problem(file: str, image_warnings: ImageWarnings, contents: FileContents) -> str | None:
    """Why a file cannot be decoded, or None; the others note what is odd about it and what is in it."""
    if os.path.isdir(file):
        return "a link to a folder, which is not followed"
    if not is_remote(file) and not os.path.isfile(file):
        return "no file, or a link to none"
    try:
        data = tf.io.read_file(os.fsencode(file))
        contents.note(file, data.numpy())
        return decoding_problem(data, image_warnings, shown(file))
    except tf.errors.OpError as error:
        return error_reason(error)


def _file_split(classes: dict[str, list[str]], contents: FileContents) -> Split:
    paths = [file for files in classes.values() for file in files]
    known = np.repeat(np.arange(len(classes)), [len(files) for files in classes.values()])
    # Without the path of the folder, which may differ between workers.
    names = [os.path.join(name, os.path.basename(file)) for name, files in classes.items() for file in files]
    return _split_of_files(paths, known, names, contents)


def _split_of_files(paths: Sequence[str], known: np.ndarray, lines: Sequence[str], contents: FileContents) -> Split:
    """The files with their labels (n,); the fingerprint is that of their contents and of a line of text for each."""
    files, labels = tf.constant([os.fsencode(path) for path in paths]), tf.constant(known, tf.int32)

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.io.read_file(files[index]), labels[index]

    return Split(
        len(paths),
        read,
        lambda index: shown(paths[index]),
        fingerprint=contents.fingerprint(paths, lines),
        digests=contents.digests(paths),
        labels=known,
    )


def _target_split(
    shares: dict[str, dict[str, float]], names: tuple[str, ...], multi_label: bool, contents: FileContents
) -> Split:
    """The files with their shares of the classes; the label is -1, or the first of those with the largest share."""
    number_of, paths = {name: index for index, name in enumerate(names)}, list(shares)
    classes = [[number_of[name] for name in found] for found in shares.values()]
    values = [list(found.values()) for found in shares.values()]
    # Rows of different lengths, since a whole matrix would be large with many classes.
    ends = tf.constant(np.cumsum([0, *map(len, classes)]), tf.int64)
    all_classes = tf.constant([number for row in classes for number in row], tf.int32)
    all_values = tf.constant([value for row in values for value in row], tf.float32)

    def target(index: tf.Tensor) -> tf.Tensor:
        begin, end = ends[index], ends[index + 1]
        return tf.linalg.matvec(tf.one_hot(all_classes[begin:end], len(names)), all_values[begin:end], transpose_a=True)

    lines = [f"{os.path.basename(path)} {sorted(found.items())}" for path, found in shares.items()]
    known = [-1 if multi_label else _first_largest(row, share) for row, share in zip(classes, values, strict=True)]
    split = _split_of_files(paths, np.array(known), lines, contents)
    return dataclasses.replace(
        split, target=target, multi_label=multi_label, labels=None if multi_label else split.labels
    )


def _first_largest(classes: Sequence[int], shares: Sequence[float]) -> int:
    """The lowest class number among those with the largest share, as argmax over all classes finds it."""
    return min(number for number, share in zip(classes, shares, strict=True) if share == max(shares))

"""Class folders or a CSV file as a data set: which files are images, which classes and which split each is of."""

import collections
import concurrent.futures
import dataclasses
import hashlib
import itertools
import operator
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.errors import is_or_are, nearest
from keras_vit.files.labels import composed
from keras_vit.files.remote import existing_folder, is_remote
from keras_vit.images.decode import error_reason
from keras_vit.images.formats import is_hidden, is_image_name, looks_like_image, others_line
from training.data.checks import FOLDER_ADVICE, check_class_size, check_list, class_folders, directories, split_folders
from training.data.dataset import (
    DataSet,
    ImageWarnings,
    Split,
    check_classes_of_splits,
    decoding_problem,
    problems_of,
    report_bad,
)
from training.data.file_contents import FileContents, decisions_of, read_decisions, shown
from training.data.groups import HOLD_OUT, groups_of, held_out
from training.data.listed_files import ONE_CLASS, SEVERAL_CLASSES, class_shares, listed_files
from training.options.common import ALONE, AUTO, DataOptions, OnBadImage

_PURPOSES = {"train": "train on", "test": "evaluate on"}
Labels = dict[str, str]  # file -> the name of its class, in the order of the classes and then of the files


def folder(options: DataOptions) -> DataSet:
    """Open class folders of image files (keras_vit/images/formats.py), whatever they are called; classes in name order.

    Files that neither are called like an image nor hold one are counted in a line.

    With train (or training) and test (testing, val, valid, validation) above the classes these are the splits, and must
    hold the same classes; else a tenth of each class is kept for evaluation, as `_held_out` says. The decisions of
    `--exclude` come before that.
    """
    path = existing_folder(options.path, FOLDER_ADVICE)
    folders = split_folders(path)
    if folders and (left_out := [name for name in directories(path) if path / name not in folders]):
        print(f"Not used, beside {folders[0].name} and {folders[1].name} of {path}: {', '.join(left_out)}.")
    places = dict(zip(("train", "test"), folders, strict=True)) if folders else {"": path}
    listed = {split: _class_files(place, least=1 if folders else 2) for split, place in places.items()}
    return _opened(options, listed, {split: str(place) for split, place in places.items()}, _Draw(path, options))


def unlabelled_folder(path: pathlib.Path, on_bad_image: OnBadImage) -> Split:
    """Open all image files in a folder and the folders inside it, whatever they are called; the labels are -1."""
    contents = FileContents()
    files = _good_files(sorted(images_in(path)), str(path), on_bad_image, contents)
    names = [os.path.relpath(file, path) for file in files]
    return dataclasses.replace(_split(files, np.full(len(files), -1), names, contents), labels=None)


def csv_list(options: DataOptions) -> DataSet:
    """Open image files with their classes from a CSV file with the columns path and label; classes in name order.

    What the file holds says `training.data.listed_files`. Without a column split a tenth of each class is kept for
    evaluation, as `_held_out` says.
    """
    path = options.path
    column, value_of, not_used, group_of = listed = listed_files(path)
    if not is_remote(path):
        check_list(listed, path, options.on_bad_image)
    for split, count in not_used.items():
        print(f"Not used: {count:,} images of {path} with the split {split}.")
    _say_separators(path, column, sorted({text for files in value_of.values() for text in files.values()}))
    where = {split: f"{path} ({split})" if split else str(path) for split in value_of}
    splits = {split: _sorted(labels) for split, labels in value_of.items()}
    return _opened(options, splits, where, _Draw(path.parent, options, group_of), column)


def _opened(
    options: DataOptions, splits: dict[str, Labels], where: Mapping[str, str], draw: "_Draw", column: str = ONE_CLASS
) -> DataSet:
    """Return the data set of files with what the column says of each; `where` is of each split, in messages.

    Raises UserError for options that the data do not allow.
    """
    path = options.path
    if column != ONE_CLASS and options.exclude is not None:
        raise UserError(f"--exclude is for images of one class each, but {path} has the column {column}.")
    if options.split_seed is not None and "" not in splits:
        raise UserError(f"--split-seed draws a split, but {path} has splits of its own; leave it out.")
    draw.contents.with_looks = "" in splits and options.group != ALONE
    if column != ONE_CLASS:
        return _of_shares(column, splits, where, draw)
    files: dict[str, Labels] = {}
    for split, labels in splits.items():
        good = _good_files(list(labels), where[split], options.on_bad_image, draw.contents)
        files[split] = {file: labels[file] for file in good}
        _check_sizes(files[split], labels.values(), where[split])
    return _of_classes(_decided(files, options.exclude, draw.contents), path, draw)


def _say_separators(path: pathlib.Path, column: str, texts: Sequence[str]) -> None:
    """Name a class with a bar in a column of one class, and one with a comma that may be several classes."""
    with_bar = [text for text in texts if "|" in text]
    if column == ONE_CLASS and with_bar:
        print(f"{with_bar[0]!r} is one class of {path}; for several classes of an image, call the column labels.")
    names = {name for text in texts for name in class_shares(text, column)} if column == SEVERAL_CLASSES else set()
    parts = {name: {part.strip() for part in re.split("[;,]", name)} for name in sorted(names)}
    joined = [name for name, own in parts.items() if len(own) > 1 and (not with_bar or own <= names)]
    if joined:
        print(f"Warning: {joined[0]!r} is one class of {path}; for several classes of an image, put | between them.")


def _good_files(files: Sequence[str], where: str, on_bad_image: OnBadImage, contents: FileContents) -> list[str]:
    """Return the files that are readable images; a UserError names the others, unless they are skipped."""
    image_warnings = ImageWarnings()
    bad = problems_of(files, lambda file: file_problem(file, image_warnings, contents))
    report_bad(
        [(shown(file), why) for file, why in bad.items()],
        f"of {len(files)} files in {where} cannot be read as images",
        "repair or remove them, or give --on-bad-image skip",
        on_bad_image,
    )
    good = [file for file in files if file not in bad]
    image_warnings.warn(f"{len(good):,} images in {where}")
    return good


def _check_sizes(labels: Labels, classes: Iterable[str], where: str, least: int = 1) -> None:
    counts = collections.Counter(labels.values())
    for name in sorted({*classes}):
        check_class_size(name, counts[name], where, least=least)


def _sorted(labels: Mapping[str, str]) -> Labels:
    return dict(sorted(labels.items(), key=lambda item: item[::-1]))


def _class_files(path: pathlib.Path, *, least: int) -> Labels:
    """Return the files in the class folders that are called like images or hold one, at least so many of each class."""
    classes = class_folders(path)
    if beside := [entry.name for entry in path.iterdir() if not entry.is_dir() and is_image_name(entry.name)]:
        count = "1 image" if len(beside) == 1 else f"{len(beside):,} images"
        print(f"Not used, because outside the class folders of {path}: {count}, such as {min(beside)}.")
    # A line break would split a name in labels.txt; what is no UTF-8 is not printable either.
    if odd := [name for name in classes if not name.isprintable()]:
        raise UserError(f"The class folder {odd[0]!r} in {path} has unprintable characters in its name; rename it.")
    labels, others = Labels(), list[str]()
    for name in classes:
        files, beside = _entries(path / name)
        labels |= dict.fromkeys(files, composed(name))
        others += beside
    if others:
        print(others_line(others, str(path)))
    _check_sizes(labels, map(composed, classes), str(path), least)  # before all are decoded, which may take minutes
    return _sorted(labels)


def images_in(folder: pathlib.Path) -> list[str]:
    """Return the images in and below a folder; print how many files are others. Raises UserError without images."""
    images, others = _entries(folder)
    if others:
        print(others_line(others, str(folder)))
    if not images:
        raise UserError(f"{folder} holds no image; give the folder with the images.")
    return images


def _entries(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """Return images in and below a folder, and what else is there but hidden; a link to a folder is one entry."""
    entries = [entry for entry in folder.rglob("*") if not any(map(is_hidden, entry.relative_to(folder).parts))]
    if not is_remote(folder):  # else they are files
        entries = [entry for entry in entries if entry.is_symlink() or not entry.is_dir()]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # of a bucket, each first byte is a request
        are_images = list(pool.map(looks_like_image, entries))
    others = map(operator.not_, are_images)
    return sorted(map(str, itertools.compress(entries, are_images))), [*map(str, itertools.compress(entries, others))]


def file_problem(file: str, image_warnings: ImageWarnings, contents: FileContents) -> str | None:
    """Say why a file cannot be decoded; of others return None, and note what is odd about them and what is in them."""
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


def _decided(splits: dict[str, Labels], exclude: str | None, contents: FileContents) -> dict[str, Labels]:
    """Return the files of each split without what the decisions of a file drop, and with their new labels.

    Raises UserError for a new label that is no class, and for a class that loses all its images.
    """
    if exclude is None:
        return splits
    files = [file for labels in splits.values() for file in labels]
    decided = decisions_of(files, contents, read_decisions(exclude))
    results, dropped, relabeled = {}, 0, 0
    for split, labels in splits.items():
        classes, result = set(labels.values()), dict(labels)
        for file in sorted(labels.keys() & decided.keys()):
            decision, label = decided[file].decision, decided[file].new_label
            if decision == "drop":
                del result[file]
                dropped += 1
            elif decision == "relabel":
                if label not in classes:
                    raise UserError(
                        f"{exclude} gives {shown(file)} the label {label!r}, which the data do not have; "
                        f"correct it; the nearest: {nearest(label, classes)}."
                    )
                relabeled += label != labels[file]
                result[file] = label
        _check_sizes(result, classes, f"the data without what {exclude} drops")
        results[split] = _sorted(result)
    print(
        f"{exclude}: {dropped:,} of {len(files):,} images {is_or_are(dropped)} left out, and {relabeled:,} "
        f"{'has' if relabeled == 1 else 'have'} another label."
    )
    return results


@dataclasses.dataclass(frozen=True)
class _Draw:
    """How a tenth of the images is kept for evaluation."""

    root: pathlib.Path  # the folder of the paths
    options: DataOptions
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """File -> the name of its group, of those that have one."""
    contents: FileContents = dataclasses.field(default_factory=FileContents)

    def place(self, file: str) -> bytes:
        """Return a hash that puts the files in a random order; the same for all without a seed."""
        if (seed := self.options.split_seed) is None:
            return b""
        return hashlib.sha256(os.fsencode(f"{seed}/{os.path.relpath(file, self.root)}")).digest()

    def groups(self, files: Sequence[str]) -> np.ndarray:
        """Return the number of the group of each file (n,)."""
        paths = [os.path.relpath(file, self.root) for file in files]
        looks = list(map(self.contents.looks.get, files))
        groups = groups_of(paths, self.options.group, looks, [self.named.get(file, "") for file in files])
        if self.options.group != ALONE:
            self.contents.group_of.update(zip(files, groups.tolist(), strict=True))
        return groups


def _of_classes(splits: dict[str, Labels], path: pathlib.Path, draw: _Draw) -> DataSet:
    """Return the data set of files of one class each; `path` is in messages."""
    held_out, contents = "" in splits, draw.contents
    if held_out:
        splits = _held_out(splits[""], draw)
    train, test = splits["train"], splits["test"]
    check_classes_of_splits(train.values(), test.values(), path)
    for remark in contents.remarks(train, test):
        print(f"Warning: {remark}")
    names = tuple(sorted({*train.values()}))
    made: list[Split] = []
    for labels in (train, test):
        # Without the path of the folder, which may differ between workers.
        lines = [os.path.join(label, os.path.basename(file)) for file, label in labels.items()]
        made.append(_split(list(labels), _numbers(labels, names), lines, contents))
    return DataSet(names, made[0], made[1], held_out=held_out)


def _held_out(labels: Labels, draw: _Draw) -> dict[str, Labels]:
    """Return the files to train on, and to evaluate on: a tenth of each class, rounded up.

    Without a seed it is every tenth file by name, else the first tenth in the order of a hash of the seed and of the
    path below `root`. So the split is the same on any machine, and a new file hardly changes it. Images that belong
    together are on one side.
    """
    _check_sizes(labels, labels.values(), str(draw.root), least=2)
    files, names = [*labels], sorted({*labels.values()})
    numbers = _numbers(labels, names)
    seed, insist = draw.options.split_seed, draw.options.group != AUTO or bool(draw.named)
    order = None if seed is None else np.array(sorted(range(len(files)), key=lambda row: draw.place(files[row])))
    are_kept = held_out(numbers, names, draw.groups(files), order, insist=insist)
    counts = np.bincount(numbers[are_kept])
    each = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
    how = f"A tenth of each class, drawn with the seed {seed},"
    how = "Every tenth image of each class" if seed is None else how
    print(f"{how} is kept for evaluation: {are_kept.sum():,} of {len(files):,} images, {each} of each class.")
    return _divided(labels, {*itertools.compress(files, are_kept)})


def _numbers(labels: Labels, names: Sequence[str]) -> np.ndarray:
    """Return the number of each file's class (n,)."""
    number_of = {name: number for number, name in enumerate(names)}
    return np.array([number_of[label] for label in labels.values()])


def _of_shares(
    column: str, value_of: Mapping[str, Mapping[str, str]], where: Mapping[str, str], draw: _Draw
) -> DataSet:
    """Return the data set of files with several classes each, or with a share of each class."""
    names: set[str] = set()
    splits: dict[str, dict[str, dict[str, float]]] = {}
    for split, texts in value_of.items():
        shares = {file: class_shares(text, column) for file, text in sorted(texts.items())}
        names = names.union(*shares.values())
        good = _good_files(list(shares), where[split], draw.options.on_bad_image, draw.contents)
        splits[split] = {file: shares[file] for file in good}
    if held_out := set(splits) == {""}:
        splits = _spread_tenth(splits[""], draw)
    _check_shares(splits, names, draw.options.path)
    train, test = splits["train"], splits["test"]
    for remark in draw.contents.remarks(train, test):
        print(f"Warning: {remark}")
    labels = tuple(sorted(names))
    made = [_target_split(part, labels, column == SEVERAL_CLASSES, draw.contents) for part in (train, test)]
    return DataSet(labels, made[0], made[1], held_out=held_out)


def _spread_tenth(shares: dict[str, dict[str, float]], draw: _Draw) -> dict[str, dict]:
    """Keep every tenth file, by its rarest class, so that each class has about a tenth; return both splits."""
    counts = collections.Counter(name for own in shares.values() for name, share in own.items() if share)

    def place(file: str) -> tuple:
        classes = [name for name, share in shares[file].items() if share]
        rarest = min(((counts[name], name) for name in classes), default=(0, ""))
        return rarest, draw.place(file), file

    ordered = sorted(shares, key=place)
    groups = draw.groups(ordered).tolist()
    firsts = [*dict.fromkeys(groups)]
    kept = {*firsts[min(HOLD_OUT // 2, len(firsts) - 1) :: HOLD_OUT]}  # the one image of a class is for training
    test = {file for file, group in zip(ordered, groups, strict=True) if group in kept}
    print(f"A tenth of the images is kept for evaluation, spread over the classes: {len(test):,} of {len(ordered):,}.")
    return _divided(dict(sorted(shares.items())), test)


def _divided(files: dict[str, Any], kept: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the files to train on, and those that are kept to evaluate on."""
    return {
        split: {file: value for file, value in files.items() if (file in kept) == (split == "test")}
        for split in ("train", "test")
    }


def _check_shares(splits: Mapping[str, dict[str, dict[str, float]]], names: set[str], path: pathlib.Path) -> None:
    """Raise UserError for a split without images, and for a class without any to train on."""
    for split in ("train", "test"):
        files = splits[split].values()
        missing = sorted(names - {name for shares in files for name, share in shares.items() if share})
        if not files or (missing and split == "train"):
            what = f"image of the class {missing[0]!r}" if files else "image"
            advice = "add some, or leave the class out" if files else "add some"
            raise UserError(f"{path} has no {what} to {_PURPOSES[split]}; {advice}.")
        if missing:
            print(f"Warning: no evaluation image has the class {', '.join(missing)}.")


def _split(paths: Sequence[str], known: np.ndarray, lines: Sequence[str], contents: FileContents) -> Split:
    """Return files with their labels (n,); the fingerprint is that of their contents and of a line of text for each."""
    files, labels = tf.constant([os.fsencode(path) for path in paths]), tf.constant(known, tf.int32)
    return Split(
        len(paths),
        lambda index: (tf.io.read_file(files[index]), labels[index]),
        lambda index: shown(paths[index]),
        fingerprint=contents.fingerprint(paths, lines),
        digests=contents.digests(paths),
        labels=known,
        groups=np.array([contents.group_of[path] for path in paths]) if contents.group_of else None,
    )


def _target_split(
    shares: dict[str, dict[str, float]], names: Sequence[str], multi_label: bool, contents: FileContents
) -> Split:
    """Return files with their shares of the classes; the label is -1, or the first of those with the largest share."""
    number_of, paths = {name: index for index, name in enumerate(names)}, list(shares)
    rows = [[(number_of[name], share) for name, share in own.items()] for own in shares.values()]
    # Rows of different lengths, since a whole matrix would be large with many classes.
    ends = tf.constant(np.cumsum([0, *map(len, rows)]), tf.int64)
    all_classes = tf.constant([number for row in rows for number, _ in row], tf.int32)
    all_values = tf.constant([share for row in rows for _, share in row], tf.float32)

    def target(index: tf.Tensor) -> tf.Tensor:
        begin, end = ends[index], ends[index + 1]
        return tf.linalg.matvec(tf.one_hot(all_classes[begin:end], len(names)), all_values[begin:end], transpose_a=True)

    lines = [f"{os.path.basename(path)} {sorted(own.items())}" for path, own in shares.items()]
    known = np.full(len(paths), -1)
    if not multi_label:  # as argmax over all classes finds it
        known = np.array([min(row, key=lambda pair: (-pair[1], pair[0]))[0] for row in rows])
    split = _split(paths, known, lines, contents)
    labels = None if multi_label else split.labels
    return dataclasses.replace(split, target=target, multi_label=multi_label, labels=labels)

"""Checks of paths and names that need no TensorFlow, whose import takes seconds."""

import itertools
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence

from keras_vit import UserError
from keras_vit.errors import refuse_without_effect
from keras_vit.files.atomic import is_temporary
from keras_vit.files.labels import LABELS, composed, distinct_names, read_labels
from keras_vit.files.remote import existing_folder, is_remote, matching, output_folder, to_path
from keras_vit.images.formats import format_list, is_hidden
from training.data.file_contents import read_decisions
from training.data.listed_files import ListedFiles, check_found, listed_files
from training.options.common import (
    DRAWN,
    EVALUATION_NAMES,
    PIPELINE,
    PROBLEMS,
    RECORD_INDEX,
    TRAINING_NAMES,
    DataOptions,
    OnBadImage,
)

_MOST_LISTED = 10_000  # files of a list up to which it is looked whether they exist
# What the names of the files of a source end in, and those of compressed tar files.
_ENDINGS = {"tfrecord": ".tfrecord", "tar": ".tar"}
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

FOLDER_ADVICE = "--data folder:PATH takes a folder of class folders"
_KINDS = ("digits", "tfds", "folder", "csv", "tfrecord", "tar")


def check_data(source: DataOptions) -> None:
    """Raise UserError for `--data` that `open_source` would refuse, as far as that is known without TensorFlow."""
    kind, rest = kind_and_path(source)
    if source.exclude is not None:
        read_decisions(source.exclude)
    if source.data_dir is not None:
        check_data_dir(source.data_dir)
    if kind == "folder":
        root = existing_folder(rest, FOLDER_ADVICE)
        for folder in () if is_remote(rest) else split_folders(root) or (root,):
            class_folders(folder)
    elif kind == "csv" and not is_remote(rest):
        check_list(listed_files(source.path), source.path, source.on_bad_image)
    elif kind in _ENDINGS and not is_remote(rest):
        files_of(kind, rest)


def check_data_dir(data_dir: str) -> None:
    """Raise UserError for a folder of data sets that is not there."""
    if not is_remote(data_dir):
        existing_folder(data_dir, "--data-dir accepts the folder of prepared data sets, or an empty one")


def kind_and_path(source: DataOptions) -> tuple[str, str]:
    """Return the kind of `--data` and what stands behind it. Raises UserError for other kinds, paths and options."""
    kind, _, rest = source.data.partition(":")
    is_known = kind in _KINDS and bool(rest) == (kind != "digits")
    path = rest if is_known else source.data
    meant = "folder" if os.path.isdir(path) else ""
    meant = "csv" if path.lower().endswith(".csv") and os.path.isfile(path) else meant
    if not is_known or (kind in ("folder", "csv") and meant not in (kind, "")):
        this = "folder" if meant == "folder" else "file"
        advice = f"; for this {this}, give --data {shlex.quote(f'{meant}:{path}')}" if meant else ""
        raise UserError(
            "--data accepts digits, tfds:NAME[:CONFIG], folder:PATH, csv:FILE, tfrecord:GLOB or tar:GLOB, but was "
            f"given {source.data!r}{advice}."
        )
    refuse_without_effect(
        source,
        [
            (("data_dir", "train_split", "eval_split"), kind == "tfds", "--data tfds:NAME"),
            (("split_seed", "exclude"), kind in ("folder", "csv"), "--data folder:PATH or csv:FILE"),
            (("group",), kind in DRAWN, "--data folder:, csv: or tar:, and to keras-vit shard of these"),
            (("on_bad_image",), kind not in ("digits", "tfds"), "--data folder:, csv:, tfrecord: or tar:"),
        ],
    )
    return kind, rest


def class_folders(path: pathlib.Path) -> list[str]:
    """Return the names of the class folders in a folder.

    Raises UserError for fewer than two, and if they hold nothing but folders of the same names: splits, or masks.
    """
    names = directories(path)
    if len(names) < 2:
        held = f"Only the class folder {names[0]!r} is" if names else "No class folders are"
        raise UserError(f"{held} in {str(path)!r}. Create one per class, such as {path / 'cat'} and {path / 'dog'}.")
    alike: dict[tuple[str, ...], str] = {}
    for name in () if is_remote(path) else names:  # of a bucket, each entry costs a request
        inside = _folders_alone(path / name)
        if len(inside) > 1 and (other := alike.setdefault(inside, name)) != name:  # one, such as images, may well be
            raise UserError(
                f"{path / other} and {path / name} should be class folders, but both hold only the folders "
                f"{', '.join(inside[:5])}{' …' if inside[5:] else ''}; call splits train and test, give one of the two "
                "as --data, or move the images of each class directly into its folder."
            )
    return names


def _folders_alone(path: pathlib.Path) -> tuple[str, ...]:
    """Return the names of the folders in a folder, in order; () if a file is beside them."""
    names = []
    with os.scandir(path) as entries:
        for entry in itertools.filterfalse(lambda each: is_hidden(each.name), entries):
            if not entry.is_dir():
                return ()  # at once: a class may have many images
            names.append(entry.name)
    return tuple(sorted(names))


def check_list(listed: ListedFiles, path: pathlib.Path, on_bad_image: OnBadImage) -> None:
    """Raise UserError unless the files of a CSV file exist, of a long one the first; of skipped images, one must."""
    files = list(itertools.chain.from_iterable(listed.value_of.values()))
    missing = [file for file in files[:_MOST_LISTED] if not os.path.lexists(file)]
    if on_bad_image == "stop" or len(missing) == len(files):
        skip = ", or give --on-bad-image skip" if len(missing) < len(files) else ""
        check_found(missing, len(files), path, path.parent, f"correct the paths{skip}")


def files_of(kind: str, pattern: str) -> list[str]:
    """Return the TFRecord or uncompressed tar files that a pattern matches, in order. Raises UserError if none is."""
    ending, matching_files = _ENDINGS[kind], matching(pattern)
    compressed = [file for file in matching_files if kind == "tar" and file.endswith(_COMPRESSED)]
    files = sorted(file for file in matching_files if file.endswith(ending))
    if compressed or not files:
        problem = f"{pattern!r} matches none"
        if compressed:
            problem = f"{min(compressed)} is compressed; unpack it, such as by gunzip: the images inside are compressed"
        elif os.path.isdir(pattern):
            problem += f"; for this folder, give {shlex.quote(f'{kind}:{pattern}/*{ending}')}"
        raise UserError(f"--data {kind}:GLOB takes files that end in {ending}, but {problem}.")
    return files


def check_shard_folder(output: str, *, is_pipeline: bool = False) -> pathlib.Path:
    """Return the folder for TFRecord files. Raises UserError for one with others; a pipeline goes on with its own."""
    folder, ours = output_folder(output), (RECORD_INDEX, LABELS, PIPELINE, PROBLEMS)
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_ours = is_pipeline and (entry.suffix == ".tfrecord" or entry.name in ours)
        if not (is_ours or is_temporary(entry) or is_hidden(entry.name)):
            raise UserError(
                f"{folder} should be new or empty, but holds {entry.name}; give --output a folder of its own."
            )
    return folder


def split_of(*words: str) -> str | None:
    """Return the split that the first of the words with a meaning names, "train" or "test"; None if none has one."""
    for word in map(str.lower, words):
        if word in (*TRAINING_NAMES, "eval", *EVALUATION_NAMES):
            return "train" if word in TRAINING_NAMES else "test"
    return None


def files_of_splits(pattern: str, splits: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return the files of "train" and "test", and print those of no split. Raises UserError if there is none of one."""
    files = {split: [file for file in splits if splits[file] == split] for split in ("train", "test")}
    if not all(files.values()):
        raise UserError(
            f"{pattern!r} should give files with train and files with eval, test or val in their names, but gives "
            f"{', '.join(os.path.basename(file) for file in [*splits][:5])}; rename them, or give another pattern."
        )
    if others := [os.path.basename(file) for file, split in splits.items() if split is None]:
        print(f"Not used, because their names contain no split: {len(others):,} files, such as {others[0]}.")
    return files


def labels_beside(files: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return where labels.txt is, in the folder that files have in common, and its names; none without it."""
    folder = os.path.commonpath([os.path.dirname(file) for file in files])
    path = str(type(to_path(files[0]))(folder, LABELS))  # with the slash of gs:// that commonpath drops
    return path, distinct_names(read_labels(path), path) if to_path(path).is_file() else ()


def split_folders(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
    """Return the folders of the training and the evaluation split; None where the folders are the classes."""
    folders = {entry.lower(): path / entry for entry in directories(path)}
    train, test = ([folders[name] for name in names if name in folders] for names in (TRAINING_NAMES, EVALUATION_NAMES))
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
    """Return the names of the folders in a folder, in order, without what is hidden."""
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not is_hidden(entry.name))


def check_class_size(name: str, count: int, where: str, *, least: int) -> None:
    """Raise UserError for a class of fewer images than `least`, which is 1, or 2 where some are kept for evaluation."""
    if count < least:
        few = "has one image, and needs two: to train on and to evaluate on"
        raise UserError(f"The class {name!r} {few if count else f'of {where} has no image ({format_list()})'}.")


def unlabelled_path(name: str) -> pathlib.Path:
    """Return the folder that `--unlabelled` names, as folder:PATH or PATH. Raises UserError unless it exists."""
    return existing_folder(name.removeprefix("folder:"), "--unlabelled accepts a folder of images")


def listed_classes(source: DataOptions) -> tuple[str, ...] | None:
    """Return the classes of a folder or CSV file of this machine, without a look at the images; None for others."""
    kind, _, rest = source.data.partition(":")
    if kind not in ("folder", "csv") or is_remote(rest):
        return None
    if kind == "folder":
        splits = split_folders(source.path)
        return tuple(sorted(map(composed, directories(splits[0] if splits else source.path))))
    return tuple(sorted(listed_files(source.path).classes))

"""Tar files of images as a data set, as webdataset writes them: any image is read by its number, and nothing unpacked.

`training/data/tar_index.py` gives the place of each. No operation of TensorFlow reads a part of a file, so Python
does: the hosts of a remote TPU, and workers of tf.data, need the TFRecord files that `keras-vit shard` makes of these.
"""

import os
import re
import zlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.errors import explained
from keras_vit.files.file_contents import shown
from keras_vit.files.labels import LABELS, distinct_names, read_labels
from keras_vit.files.remote import is_remote, matching, read_places, to_path
from training.data.checks import HOLD_OUT, check_class_size, files_of
from training.data.dataset import DataSet, Split, check_classes_of_splits, skip_undecodable
from training.data.tar_index import BLOCK, NAME, tar_images
from training.data.tfrecord import PARALLEL_READS
from training.options.common import EVALUATION_NAMES, TRAINING_NAMES, OnBadImage, composed

# Largest number of a class without a file of names.
_LARGEST_LABEL = 1_000_000


class TarImages:
    """The images of several tar files in a row, by number."""

    def __init__(self, images: dict[str, np.ndarray]):
        """`images`: path -> the images of each file, as `tar_images` finds them."""
        self._paths = list(images)
        self._images = np.concatenate(list(images.values()))
        self._ends = np.cumsum([len(part) for part in images.values()])  # of each file, among all images

    def __len__(self) -> int:
        return len(self._images)

    def place(self, index: int) -> tuple[str, np.void]:
        """The file of an image, and its place there."""
        return self._paths[int(np.searchsorted(self._ends, index, side="right"))], self._images[index]

    def name(self, index: int) -> str:
        """Name an image in a message: by the beginning of its name in the tar file."""
        path, image = self.place(index)
        header = read_places(path, lambda read: read(int(image["header"]), BLOCK))
        return f"{shown(os.fsdecode(header[:100].rstrip(bytes(1))))} of {os.path.basename(path)}"

    def bytes(self, index: int) -> bytes:
        """The content of an image. Raises UserError if the file has changed."""
        path, image = self.place(index)
        with explained(
            lambda reason: f"{path} can no longer be read ({reason}); put it back, and the same command continues.",
            OSError,
        ):
            data = read_places(path, lambda read: read(int(image["header"]), BLOCK + int(image["size"])))
        if zlib.crc32(data[:BLOCK]) != image["checksum"] or len(data) != BLOCK + image["size"]:
            index_file = os.path.join(os.path.dirname(path), NAME)
            raise UserError(f"The index {index_file} does not fit {path}; remove it, and start again.")
        return data[BLOCK:]

    def read(self, index: tf.Tensor) -> tf.Tensor:
        """The content of image number `index` (an int64 scalar) as a scalar string; usable in a tf.data map."""
        data = tf.numpy_function(lambda number: self.bytes(int(number)), [index], tf.string, stateful=False)
        return tf.ensure_shape(data, ())

    def split(self, labels: np.ndarray, on_bad_image: OnBadImage) -> Split:
        """The images as examples with these labels (n,)."""
        known = tf.constant(labels, tf.int32)
        split = Split(
            len(self),
            lambda index: (self.read(index), known[index]),
            self.name,
            _sentence,
            zlib.crc32(labels.astype(np.int32).tobytes(), self._fingerprint),
            parallel_reads=PARALLEL_READS if any(map(is_remote, self._paths)) else None,
            labels=labels,
        )
        return split if on_bad_image == "stop" else skip_undecodable(split)

    @property
    def labels(self) -> np.ndarray:
        """The number of each label among the texts that `tar_images` finds (n,)."""
        return self._images["label"]

    @property
    def _fingerprint(self) -> int:
        """The same for the same members in files of the same names, wherever they lie."""
        names = "\0".join(map(os.path.basename, self._paths))
        return zlib.crc32(self._images[["header", "size", "checksum"]].tobytes(), zlib.crc32(os.fsencode(names)))


def _sentence(message: str) -> str | None:
    """The sentence of a UserError of `TarImages.bytes` in that of a graph."""
    found = re.search(r"UserError: (.*)", message)
    return found[1] if found else None


def tar(pattern: str, on_bad_image: OnBadImage) -> DataSet:
    """Tar files of images with a label beside each, a number or the name of a class.

    The splits are the files with train, and with eval, test or val in their names, or else in those of their folders.
    Without such names, a tenth of each class is kept for evaluation. Numbers are lines of labels.txt, from 0, if the
    folder has one, and else the names of their classes.
    """
    files = files_of("tar", pattern, matching(pattern))
    kinds = [_split_of(file) for file in files]
    has_splits = any(kinds)
    if has_splits and (None in kinds or len(set(kinds)) < 2):
        first = ", ".join(os.path.basename(file) for file in files[:5])
        raise UserError(
            f"{pattern!r} should give tar files with train and tar files with eval, test or val in their names, or "
            f"files without any of these, but gives {first}; rename them, or give another pattern."
        )
    found, texts = tar_images(files)
    parts = [
        TarImages({file: found[file] for file, kind in zip(files, kinds, strict=True) if kind == wanted})
        for wanted in (("train", "evaluation") if has_splits else (None,))
    ]
    names, number_of = _classes(texts, [part.labels for part in parts], files)
    labeled = [(part, number_of[part.labels]) for part in parts]
    if has_splits:
        train, evaluation = (part.split(labels, on_bad_image) for part, labels in labeled)
    else:
        [(part, labels)] = labeled
        train, evaluation = _held_out(part.split(labels, on_bad_image), names, pattern)
    return DataSet(names, train, evaluation, held_out=not has_splits)


def _split_of(file: str) -> str | None:
    """Which split a file is of, by its name, or else by that of its folder; None if neither says it."""
    folder, name = os.path.split(file.lower())
    for word in (*re.split(r"[-_.]", name), os.path.basename(folder)):
        if word in TRAINING_NAMES:
            return "train"
        if word in ("eval", *EVALUATION_NAMES):
            return "evaluation"
    return None


def _classes(texts: list[str], labels: Sequence[np.ndarray], files: list[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """The names of the classes, and the class of each label text (n,).

    Args:
        texts: of the labels of both splits.
        labels: of the images of each split, as numbers among the texts.
        files: the tar files, whose folder may have a file of names.
    """
    used = [np.unique(numbers) for numbers in labels]
    spoken = {number: composed(texts[number]) for part in used for number in part}
    result = np.full(len(texts), -1, np.int32)
    names_file = os.path.join(os.path.commonpath([os.path.dirname(file) for file in files]), LABELS)
    names = distinct_names(read_labels(names_file), names_file) if to_path(names_file).is_file() else ()
    if all(re.fullmatch(r"[0-9]{1,18}", text) for text in spoken.values()):
        most = (len(names) if names else _LARGEST_LABEL) - 1
        numbers = {number: int(text) for number, text in spoken.items()}
        if max(numbers.values()) > most:
            raise UserError(
                f"The labels in the tar files should be numbers of classes, 0 to {most:,}"
                f"{f', the lines of {names_file}' if names else ''}, but one is {max(numbers.values())}; correct them."
            )
        names = names or tuple(str(number) for number in range(max(numbers.values()) + 1))
    else:
        if not names:
            train, evaluation = ({spoken[number] for number in part} for part in (used[0], used[-1]))
            check_classes_of_splits(train, evaluation, "the tar files")
        names = names or tuple(sorted(set(spoken.values())))
        known = {name: number for number, name in enumerate(names)}
        if unknown := sorted(set(spoken.values()) - known.keys()):
            raise UserError(
                f"The tar files have the label {unknown[0]!r}, which is no line of {names_file}; correct it."
            )
        numbers = {number: known[text] for number, text in spoken.items()}
    for number, label in numbers.items():
        result[number] = label
    return names, result


def _held_out(split: Split, names: tuple[str, ...], pattern: str) -> tuple[Split, Split]:
    """The images to train on, and every tenth of each class, which is kept for evaluation."""
    assert split.labels is not None
    counts = np.bincount(split.labels, minlength=len(names))
    for number in np.flatnonzero(counts == 1):
        check_class_size(names[number], 1, pattern, least=2)
    order = np.argsort(split.labels, kind="stable")
    place = np.empty(len(order), np.int64)  # of each image in its class
    place[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = place % HOLD_OUT == 0
    print(
        f"Every tenth image of each class is kept for evaluation: {kept.sum():,} of {len(kept):,} images; call the tar "
        "files train-… and val-… for splits of your own."
    )
    return split.take(np.flatnonzero(~kept)), split.take(np.flatnonzero(kept))

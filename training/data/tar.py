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
from keras_vit.files.labels import composed
from keras_vit.files.remote import is_remote, read_places
from training.data.checks import check_class_size, files_of, files_of_splits, labels_beside, split_of
from training.data.dataset import DataSet, Split, check_classes_of_splits, skip_undecodable
from training.data.file_contents import shown
from training.data.groups import MOST_COMPARED, groups_of, held_out, looks_of
from training.data.tar_index import BLOCK, NAME, member_names, tar_images
from training.data.tfrecord import PARALLEL_READS
from training.options.common import ALONE, AUTO, OnBadImage

_MOST_CLASSES = 1_000_000  # classes at most without a file of names


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
        """Return the file of an image, and its place there."""
        return self._paths[int(np.searchsorted(self._ends, index, side="right"))], self._images[index]

    def name(self, index: int) -> str:
        """Name an image in a message: by the beginning of its name in the tar file."""
        path, image = self.place(index)
        header = read_places(path, lambda read: read(int(image["header"]), BLOCK))
        return f"{shown(os.fsdecode(header[:100].rstrip(bytes(1))))} of {os.path.basename(path)}"

    def bytes(self, index: int) -> bytes:
        """Return the content of an image. Raises UserError if the file has changed."""
        path, image = self.place(index)
        lost = f"{path} can no longer be read"
        with explained(lambda why: f"{lost} ({why}); put it back, and the same command continues.", OSError):
            data = read_places(path, lambda read: read(int(image["header"]), BLOCK + int(image["size"])))
        if zlib.crc32(data[:BLOCK]) != image["checksum"] or len(data) != BLOCK + image["size"]:
            index_file = os.path.join(os.path.dirname(path), NAME)
            raise UserError(f"The index {index_file} does not fit {path}; remove it, and start again.")
        return data[BLOCK:]

    def read(self, index: tf.Tensor) -> tf.Tensor:
        """Return the content of image number `index` (an int64 scalar) as a scalar string; usable in a tf.data map."""
        data = tf.numpy_function(lambda number: self.bytes(int(number)), [index], tf.string, stateful=False)
        return tf.ensure_shape(data, ())

    def groups(self, rule: str) -> np.ndarray:
        """Return the group of each image (n,); of many, and of those in a bucket, only the names are looked at."""
        names = [""] * len(self)
        if rule != AUTO:
            of_file = {path: member_names(path) for path in self._paths}
            names = [of_file[path][int(image["header"])] for path, image in map(self.place, range(len(self)))]
        is_seen = len(self) <= MOST_COMPARED and not any(map(is_remote, self._paths))
        return groups_of(names, rule, looks_of(self.bytes, len(self)) if is_seen else ())

    def split(self, labels: np.ndarray, on_bad_image: OnBadImage, groups: np.ndarray | None = None) -> Split:
        """Return the images as examples with these labels (n,), and groups."""
        known, names = tf.constant(labels, tf.int32), "\0".join(map(os.path.basename, self._paths))
        # The same for the same members in files of the same names, wherever they lie.
        members = zlib.crc32(self._images[["header", "size", "checksum"]].tobytes(), zlib.crc32(os.fsencode(names)))
        split = Split(
            len(self),
            lambda index: (self.read(index), known[index]),
            self.name,
            lambda message: error[1] if (error := re.search(r"UserError: (.*)", message)) else None,  # of `bytes`
            zlib.crc32(labels.astype(np.int32).tobytes(), members),
            parallel_reads=PARALLEL_READS if any(map(is_remote, self._paths)) else None,
            labels=labels,
            groups=groups,
        )
        return split if on_bad_image == "stop" else skip_undecodable(split)

    @property
    def labels(self) -> np.ndarray:
        """The number of each label among the texts that `tar_images` finds (n,)."""
        return self._images["label"]


def tar(pattern: str, on_bad_image: OnBadImage, group: str = AUTO) -> DataSet:
    """Open tar files of images with a label beside each, a number or the name of a class.

    The splits are the files with train, and with eval, test or val in their names, or else in those of their folders.
    Without such names, a tenth of each class is kept for evaluation; images that belong together, as `group` says of
    their names in the files, are on one side. Numbers are lines of labels.txt, from 0, if the folder has one, and else
    the names of their classes.
    """
    files = files_of("tar", pattern)
    words = [(*re.split(r"[-_.]", os.path.basename(file)), os.path.basename(os.path.dirname(file))) for file in files]
    split_of_file = {file: split_of(*each) for file, each in zip(files, words, strict=True)}
    held_out = not any(split_of_file.values())
    splits = {"": files} if held_out else files_of_splits(pattern, split_of_file)
    images_of, texts = tar_images(files)
    images = [TarImages({file: images_of[file] for file in split}) for split in splits.values()]
    names, number_of = _classes(texts, [each.labels for each in images], files)
    groups = images[0].groups(group) if held_out and group != ALONE else None
    opened = [each.split(number_of[each.labels], on_bad_image, groups) for each in images]
    train, evaluation = _held_out(opened[0], names, pattern, insist=group != AUTO) if held_out else opened
    return DataSet(names, train, evaluation, held_out=held_out)


def _classes(texts: list[str], labels: Sequence[np.ndarray], files: list[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of the classes, and the class of each label text (n,).

    Args:
        texts: of the labels of both splits.
        labels: of the images of each split, as numbers among the texts.
        files: the tar files, whose folder may have a file of names.
    """
    used = [{int(number): composed(texts[number]) for number in np.unique(each)} for each in labels]
    spoken = {number: text for each in used for number, text in each.items()}
    are_numbers = all(re.fullmatch(r"[0-9]{1,18}", text) for text in spoken.values())
    names_file, names = labels_beside(files)
    if not names and are_numbers:
        names = tuple(map(str, range(min(max(map(int, spoken.values())) + 1, _MOST_CLASSES))))
    elif not names:
        check_classes_of_splits(used[0].values(), used[-1].values(), "the tar files")
        names = tuple(sorted({*spoken.values()}))
    number_of = {name: number for number, name in enumerate(names)}
    result = np.full(len(texts), -1, np.int32)
    for number, text in spoken.items():
        label = int(text) if are_numbers else number_of.get(text, len(names))
        if label >= len(names):
            raise UserError(
                f"The tar files have the label {text!r}, but there are {len(names):,} classes, the lines of "
                f"{names_file} or numbers from 0 on; correct it."
            )
        result[number] = label
    return names, result


def _held_out(split: Split, names: tuple[str, ...], pattern: str, insist: bool) -> tuple[Split, Split]:
    """Return the images to train on, and a tenth of each class, which is kept for evaluation."""
    assert split.labels is not None
    counts = np.bincount(split.labels, minlength=len(names))
    for number in np.flatnonzero(counts == 1):
        check_class_size(names[number], 1, pattern, least=2)
    groups = np.arange(len(split.labels)) if split.groups is None else split.groups
    kept = held_out(split.labels, names, groups, insist=insist)
    print(
        f"Every tenth image of each class is kept for evaluation: {kept.sum():,} of {len(kept):,} images; call the tar "
        "files train-… and val-… for splits of your own."
    )
    return split.take(np.flatnonzero(~kept)), split.take(np.flatnonzero(kept))

"""Data sources: whatever `--data` names becomes examples that can be read by number.

Each source gives a training and an evaluation split. A split is a function from an index to one image and its label, so
that the order of training can be computed from seed and epoch, and continued anywhere.
"""

import errno
import re
import socket
import urllib.error
import urllib.parse

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.errors import explained, nearest
from keras_vit.files.transfer import TransferError, opened
from training.data.checks import check_data
from training.data.dataset import DataSet, Split, bad_examples_reported, checked_label, warn_about_images
from training.data.image_folder import csv_list, folder
from training.data.tar import tar
from training.data.tfrecord import TFRecords, tfrecord
from training.options.common import EVALUATION_NAMES, DataOptions

__all__ = ["DataOptions", "DataSet", "Split", "array_split", "bad_examples_reported", "digits", "open_source"]

# Errors of a system without a network.
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
# Sets of equal images up to this size are decoded once and held; larger ones are read when needed.
_IN_MEMORY_BYTES = 2**30


def open_source(options: DataOptions, *, multi_label: bool = False) -> DataSet:
    """Open what `--data` names. Raises UserError when there is no such thing or it cannot be used.

    multi_label: whether the caller can use images of several classes each.
    """
    source = _open(options)
    _warn_of_similar_names(source.labels)
    if source.multi_label and not multi_label:
        raise UserError(
            f"The images of {options.data} have several classes each, which pretrain, finetune, evaluate and predict "
            "can use, but not this command; give images of one class each."
        )
    return source


def _warn_of_similar_names(labels: tuple[str, ...]) -> None:
    """Name the classes that differ only in case or in outer spaces, as a table that was typed by hand has them."""
    of_name: dict[str, list[str]] = {}
    for label in labels:
        of_name.setdefault(label.strip().casefold(), []).append(label)
    for names in of_name.values():
        if len(names) > 1:
            reason = "spaces" if len({name.strip() for name in names}) == 1 else "upper and lower case"
            shown = " and ".join(map(repr, names) if reason == "spaces" else names)
            print(f"Warning: {shown} are different classes, because {reason} count.")


def _open(options: DataOptions) -> DataSet:
    check_data(options)
    kind, _, rest = options.data.partition(":")
    if kind in ("tfds", "tfrecord", "tar"):
        if kind == "tfds":
            source = tfds_source(rest, options.data_dir, options.train_split, options.eval_split)
        else:
            source = {"tfrecord": tfrecord, "tar": tar}[kind](rest, options.on_bad_image)
        warn_about_images(source.train, source.evaluation)  # of a folder all files are looked at
        return source
    if kind == "csv":
        return csv_list(options.path, options.on_bad_image, options.split_seed, options.exclude)
    if kind == "folder":
        return folder(options.path, options.on_bad_image, options.split_seed, options.exclude)
    return digits()


def digits() -> DataSet:
    """The 1,797 handwritten digits that scikit-learn ships, 8x8 gray: four fifths to train on, the rest to test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # 0..16 as stored
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    names = tuple(str(digit) for digit in range(10))
    return DataSet(names, array_split(train_x, train_y, names), array_split(test_x, test_y, names))


def array_split(images: np.ndarray, labels: np.ndarray, names: tuple[str, ...]) -> Split:
    """Images (n, h, w, C) uint8 and labels (n,) in memory."""
    _check_labels(labels, names)
    known, images, labels = labels, tf.constant(images), tf.constant(labels, tf.int32)
    return Split(len(known), lambda index: (images[index], labels[index]), labels=known)


def _check_labels(labels: np.ndarray, names: tuple[str, ...]) -> None:
    outside = labels[(labels < 0) | (labels >= len(names))]
    if len(outside):
        raise UserError(
            f"Labels must be 0 to {len(names) - 1}, one for each of the {len(names)} classes, "
            f"but {len(outside)} of {len(labels)} are outside, {outside[0]} first."
        )


def tfds_builder(name: str, data_dir: str | None):
    """The builder of a data set, NAME or NAME:CONFIG, which is prepared (downloading) if it is not yet."""
    import tensorflow_datasets as tfds

    if not re.fullmatch(r"\w+(:[^:]+)?", name):
        raise UserError(f"--data takes tfds:NAME or tfds:NAME:CONFIG, as tfds:mnist, but was given 'tfds:{name}'.")
    name, _, config = name.partition(":")
    try:
        builder = tfds.builder(name, config=config or None, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        raise UserError(
            f"TensorFlow Datasets has no data set {name!r}; "
            f"the nearest names are {nearest(name, tfds.list_builders())}."
        ) from None
    except ValueError:
        known = tfds.builder_cls(name).builder_configs
        raise UserError(
            f"The data set {name!r} has no configuration {config!r}; "
            + (f"the nearest names are {nearest(config, known)}." if known else f"it has none: give tfds:{name}.")
        ) from None
    if not builder.is_prepared():
        if unreachable := _unreachable_server(builder):
            raise UserError(
                f"The data set {name!r} is not prepared in {builder.data_dir}, and {unreachable[0]}, which has it, "
                f"cannot be reached ({unreachable[1]}); prepare it there, or give --data-dir."
            )
        with explained(
            lambda reason: (
                f"The data set {name!r} is not prepared in {builder.data_dir} and could not be fetched "
                f"({reason}); prepare it there, or give --data-dir."
            ),
            Exception,  # whatever the data set's own code raises: no network, a moved file, no space
        ):
            builder.download_and_prepare()
    return builder


def _unreachable_server(builder) -> tuple[str, str] | None:
    """A server of a data set and why it cannot be reached, if none of them can: TFDS would try each for minutes.

    None if files that were fetched before, or by hand, are there, or if a server answers anything.
    """
    root = builder.data_path.parents[builder.info.full_name.count("/")]
    downloads = root / "downloads"
    if downloads.exists() and any(downloads.iterdir()):
        return None
    unreachable: dict[str, str] = {}
    for address in builder.url_infos or ():
        host = urllib.parse.urlsplit(address).hostname
        if host in unreachable:
            continue
        try:
            with opened(address):
                return None
        except TransferError as failure:
            if not _is_no_network(failure.__cause__):
                return None
            unreachable[host] = str(failure)
    return next(iter(unreachable.items()), None)


def _is_no_network(error: BaseException | None) -> bool:
    """Whether there is no way to a server; one that refuses, or that another program may reach, is not meant."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(reason, socket.gaierror | TimeoutError) or getattr(reason, "errno", None) in _UNREACHABLE


def tfds_eval_split(builder) -> str:
    """The first usual name of an evaluation split that a data set has."""
    for split in EVALUATION_NAMES:
        if split in builder.info.splits:
            return split
    raise UserError(f"{builder.name} has only the splits {', '.join(builder.info.splits)}; give --eval-split.")


def tfds_source(name: str, data_dir: str | None, train_split: str, eval_split: str | None) -> DataSet:
    """A data set of TensorFlow Datasets with images and labels, prepared (downloading) if it is not yet."""
    import tensorflow_datasets as tfds

    builder = tfds_builder(name, data_dir)
    keys = builder.info.supervised_keys
    if keys is None or not isinstance(builder.info.features[keys[1]], tfds.features.ClassLabel):
        raise UserError(f"The data set {builder.name!r} has no image with one class label; its keys are {keys}.")
    labels = tuple(builder.info.features[keys[1]].names)
    splits = (train_split, eval_split or tfds_eval_split(builder))
    train, evaluation = (_tfds_split(builder, split, labels) for split in splits)
    return DataSet(labels, train, evaluation)


def _split_info(builder, split: str):
    known = ", ".join(builder.info.splits)
    with explained(f"{builder.name} has no split {split!r}; it has {known}, and slices of them.", KeyError, ValueError):
        info = builder.info.splits[split]
    if info.num_examples <= 0:  # below for a slice that ends before it begins
        raise UserError(f"The split {split!r} of {builder.name} is empty; give one that holds images.")
    return info


def tfds_records(builder, split: str) -> TFRecords:
    """The records of a split, by number."""
    info = _split_info(builder, split)
    return TFRecords([(part.filename, part.skip, part.take) for part in info.file_instructions])


def _tfds_split(builder, split: str, labels: tuple[str, ...]) -> Split:
    features, (image_key, label_key) = builder.info.features, builder.info.supervised_keys
    info = _split_info(builder, split)
    shape = features[image_key].shape
    if None not in shape and info.num_examples * np.prod(shape) <= _IN_MEMORY_BYTES:
        images, numbers = builder.as_dataset(split=split, batch_size=-1, as_supervised=True, shuffle_files=False)
        return array_split(images.numpy(), numbers.numpy(), labels)

    import tensorflow_datasets as tfds

    records = tfds_records(builder, split)
    encoded = isinstance(features[image_key], tfds.features.Image) and features[image_key].np_dtype == np.uint8
    decoders = {image_key: tfds.decode.SkipDecoding()} if encoded else None

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        decoded = features.deserialize_example(records.read(index), decoders=decoders)
        return decoded[image_key], checked_label(decoded[label_key], labels)

    return records.split(read)

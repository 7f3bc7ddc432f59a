"""Data sets of TensorFlow Datasets, with classes or with masks, prepared (downloading) if they are not yet."""

import errno
import socket
import urllib.error
import urllib.parse
from collections.abc import Collection

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.errors import check_known, explained
from keras_vit.files.transfer import TransferError, opened
from training.data.annotations.masks import (
    IGNORED,
    UNCOUNTED,
    Segments,
    check_classes_of_masks,
    ignored_sentence,
    segments_of_values,
    two_values,
)
from training.data.checks import check_data_dir
from training.data.dataset import DataSet, Split, array_split, checked_label
from training.data.tfrecord import TFRecords
from training.options.common import EVALUATION_NAMES
from training.options.dense import SceneOptions

_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)  # errors of a system without a network
# Sets of equal images up to this size are decoded once and held; larger ones are read when needed.
_IN_MEMORY_BYTES = 2**30


def tfds_builder(name: str, data_dir: str | None):
    """Return the builder of a data set, NAME or NAME:CONFIG, which is prepared (downloading) if it is not yet."""
    import tensorflow_datasets as tfds

    if data_dir is not None:
        check_data_dir(data_dir)
    name, _, config = name.partition(":")
    try:
        builder = tfds.builder(name, config=config or None, data_dir=data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError):
        check_known("data set of TensorFlow Datasets", name, tfds.list_builders())
        configs = tfds.builder_cls(name).builder_configs or (f"none, since {name} has no configurations",)
        check_known(f"configuration of {name}", config, configs)
        raise
    if not builder.is_prepared():
        missing = f"The data set {name!r} is not prepared in {builder.data_dir}, and could not be fetched"
        advice = "prepare it there, or give --data-dir"
        if unreachable := _unreachable_server(builder):
            raise UserError(f"{missing}, since {unreachable[0]} cannot be reached ({unreachable[1]}); {advice}.")
        # Whatever the data set's own code raises: no network, a moved file, no space.
        with explained(lambda reason: f"{missing} ({reason}); {advice}.", Exception):
            builder.download_and_prepare()
    return builder


def _unreachable_server(builder) -> tuple[str, str] | None:
    """Return a server of a data set and why it cannot be reached, if none of them can: TFDS would try each for minutes.

    None if files that were fetched before, or by hand, are there, or if a server answers anything.
    """
    root = builder.data_path.parents[builder.info.full_name.count("/")]
    downloads = root / "downloads"
    if downloads.exists() and any(downloads.iterdir()):
        return None
    first = None
    for host, address in {urllib.parse.urlsplit(each).hostname: each for each in builder.url_infos or ()}.items():
        try:
            with opened(address):
                return None
        except TransferError as failure:
            if not _is_no_network(failure.__cause__):
                return None
            first = first or (host, str(failure))
    return first


def _is_no_network(error: BaseException | None) -> bool:
    """Whether there is no way to a server; one that refuses, or that another program may reach, is not meant."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(reason, socket.gaierror | TimeoutError) or getattr(reason, "errno", None) in _UNREACHABLE


def tfds_eval_split(builder) -> str:
    """Return the first usual name of an evaluation split that a data set has, else one that it has not."""
    return next(filter(builder.info.splits.__contains__, EVALUATION_NAMES), EVALUATION_NAMES[0])


def tfds_source(name: str, data_dir: str | None, train_split: str, eval_split: str | None) -> DataSet:
    """Open a data set with images and labels, prepared (downloading) if it is not yet."""
    import tensorflow_datasets as tfds

    builder = tfds_builder(name, data_dir)
    keys = builder.info.supervised_keys
    if keys is None or not isinstance(builder.info.features[keys[1]], tfds.features.ClassLabel):
        raise UserError(f"The data set {builder.name!r} has no image with one class label; its keys are {keys}.")
    _check_bytes(builder, keys[0])
    labels = tuple(builder.info.features[keys[1]].names)
    splits = (train_split, eval_split or tfds_eval_split(builder))
    train, evaluation = (_tfds_split(builder, split, labels) for split in splits)
    return DataSet(labels, train, evaluation)


def _check_bytes(builder, key: str) -> None:
    """Raise UserError for images of other values than 0 to 255, which would be read as if they were these."""
    if (dtype := builder.info.features[key].np_dtype) != np.uint8:
        dtype = getattr(dtype, "__name__", dtype)
        raise UserError(
            f"The images of {builder.name!r} should be uint8, 0 to 255, but {key!r} is {dtype}; convert them, and give "
            "--data their folder."
        )


def _split_info(builder, split: str):
    known = f"{', '.join(builder.info.splits)}, and slices of them"
    advice = f"{builder.name} has no split {split!r}, but {known}; give these by --train-split and --eval-split."
    with explained(advice, KeyError, ValueError):
        info = builder.info.splits[split]
    if info.num_examples <= 0:  # below for a slice that ends before it begins
        raise UserError(f"The split {split!r} of {builder.name} is empty; give one that holds images.")
    return info


def tfds_records(builder, split: str) -> TFRecords:
    """Return the records of a split, by number."""
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


def tfds_scenes(options: SceneOptions) -> tuple[tuple[str, ...], tuple[Split, Split], int]:
    """Return the names of the classes, the images to train and to evaluate on, and the classes of an image at most.

    The segments are the classes.

    The image is the feature with three channels, or the one named image, and the mask the only one with one channel.
    All masks are read once, for their values: the classes are named by the data set or, if it has no names, by their
    numbers, and 255 is ignored beside other classes.

    Raises UserError if the data set has no such features, or a mask that does not fit its image.
    """
    name = options.data.partition(":")[2]
    builder = tfds_builder(name, options.data_dir)
    keys = _mask_keys(builder)
    names = options.train_split, options.eval_split or tfds_eval_split(builder)
    counts = [np.stack(_value_counts(builder, split, *keys)) for split in names]
    given, both = getattr(builder.info.features[keys[1]], "names", None) or (), np.concatenate(counts)
    seen = np.flatnonzero(both.any(axis=0)).tolist()
    one = _value_of_one(seen, len(given))
    if one is not None:
        print(f"The masks of {name} have the values 0 and {one}, read as 0 and 1.")
    classes = [each for each in seen if each != IGNORED or one == IGNORED]
    most = int(np.count_nonzero(both[:, classes], axis=1).max())
    classes = classes if one is None else [0, 1]
    labels = tuple(given or map(str, range(max(classes, default=-1) + 1)))
    check_classes_of_masks(classes, labels, name)
    train, evaluation = (_mask_split(builder, split, *keys, len(labels), one) for split in names)
    for split, rows in zip(names, [] if one == IGNORED else counts, strict=False):
        if sentence := ignored_sentence(np.array([rows.sum(), 0, rows[:, IGNORED].sum()]), split):
            print(sentence)
    return labels, (train, evaluation), most


def _value_of_one(values: Collection[int], num_names: int) -> int | None:
    """Return the value of class 1, see `two_values`, where 255 stands for ignored pixels."""
    value = two_values({UNCOUNTED if each == IGNORED else each for each in values}, num_names)
    return IGNORED if value == UNCOUNTED else value


def _mask_keys(builder) -> tuple[str, str]:
    """Return the names of the features of image and mask."""
    import tensorflow_datasets as tfds

    channels_of = {key: f.shape[-1] for key, f in builder.info.features.items() if isinstance(f, tfds.features.Image)}
    images = [key for key, channels in channels_of.items() if channels == 3 or key == "image"]
    masks = [key for key, channels in channels_of.items() if channels == 1 and key != "image"]
    if len(images) != 1 or len(masks) != 1:
        listed = ", ".join(f"{key} of {channels} channels" for key, channels in channels_of.items()) or "none"
        raise UserError(
            f"The data set {builder.name} should have one image and one mask, which has one channel, but has the "
            f"images {listed}; save images and masks in folders, and give --data that folder."
        )
    _check_bytes(builder, images[0])
    return images[0], masks[0]


def _mask_split(builder, split: str, image_key: str, mask_key: str, num_classes: int, one: int | None) -> Split:
    records, features = tfds_records(builder, split), builder.info.features

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(features.deserialize_example(records.read(index))[image_key], tf.uint8), tf.constant(-1)

    def values(index: tf.Tensor) -> tf.Tensor:
        mask = tf.cast(features.deserialize_example(records.read(index))[mask_key][..., 0], tf.int32)
        return mask if one is None else tf.where(mask == one, 1, mask)

    def target(index: tf.Tensor) -> dict[str, tf.Tensor]:
        mask = values(index)
        segments = tf.where(mask == IGNORED, UNCOUNTED, mask)
        return {"labels": tf.constant(np.arange(num_classes, dtype=np.int32)), "segments": segments}

    def truth(index: int) -> Segments:
        return segments_of_values(values(tf.constant(index, tf.int64)).numpy().astype(np.uint8))

    names = records.name, records.explain_damage, records.fingerprint
    return Split(len(records), read, *names, target=target, truth=truth)


def _value_counts(builder, split: str, image_key: str, mask_key: str) -> list[np.ndarray]:
    """Return how many pixels of each mask of a split have each value, (256,)."""
    records, features = tfds_records(builder, split), builder.info.features

    def count(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        decoded = features.deserialize_example(records.read(index))
        image, mask = decoded[image_key], tf.cast(decoded[mask_key], tf.int32)
        same = tf.reduce_all(tf.shape(image)[:2] == tf.shape(mask)[:2])
        counts = tf.math.bincount(tf.reshape(mask, [-1]), minlength=IGNORED + 1, maxlength=IGNORED + 1)
        return same, tf.reduce_max(mask), counts

    rows = []
    counted = tf.data.Dataset.range(len(records)).map(count, tf.data.AUTOTUNE)
    for number, (same, largest, counts) in enumerate(counted.as_numpy_iterator()):
        if not same or largest > IGNORED:
            listed = f"has {largest}" if same else "has another size"
            raise UserError(
                f"The mask of {records.name(number)} should have the size of its image and class numbers from 0 to "
                f"254, but {listed}; choose splits without it."
            )
        rows.append(counts)
    return rows

"""Write a data set as TFRecord files, and images of it as samples.npz, for commands that do not use TensorFlow."""

import contextlib
import math
import os
import pathlib
import shlex
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from keras_vit import Preprocessing, UserError
from keras_vit.cli.progress import tracked
from keras_vit.files.atomic import staged
from keras_vit.files.labels import LABELS, labels_text
from keras_vit.files.remote import output_folder
from keras_vit.images.files import SAMPLES, Samples
from training.data.checks import check_shard_folder
from training.data.dataset import Split, bad_examples_reported, without_autograph
from training.data.sources import open_source
from training.data.tfrecord import IMAGE, LABEL, shard_name, write_index
from training.options.common import DataOptions

# Of the images kept beside a model: largest side in sides of its input, and bytes of all together.
_LARGEST_SAMPLE, _SAMPLE_BYTES = 4, 64 * 2**20


def check_shards(counts: Mapping[str, int], shards: int) -> None:
    """Raise UserError for a split of fewer images than files. counts: images by the name of the split."""
    for name, count in counts.items():
        if count < shards:
            raise UserError(f"{count} images of {name} cannot fill {shards} files; give --shards {count} or fewer.")


def shard(source: DataOptions, output: str, *, shards: int = 1) -> None:
    """Write train-*, eval-* and labels.txt into the directory `output`, all of them or none."""
    directory, dataset = check_shard_folder(output), open_source(source)
    if dataset.train.target is not None:
        raise UserError(
            f"A record holds one class of its image, but {source.data} has a share of each class; train on that file "
            "itself, or give it a column label instead of probabilities."
        )
    splits = {"train": dataset.train, "eval": dataset.evaluation}
    check_shards({name: split.num_examples for name, split in splits.items()}, shards)
    with staged(directory) as stage:
        lengths: dict[str, np.ndarray] = {}
        for name, split in splits.items():
            paths = [str(stage / shard_name(name, number, shards)) for number in range(shards)]
            lengths |= _write(split, paths, f"Writing {name}")
        write_index(stage, lengths)
        (stage / LABELS).write_text(labels_text(dataset.labels), encoding="utf-8")
    print_written(directory, dataset.train.num_examples, dataset.evaluation.num_examples, len(dataset.labels), shards)


def print_written(directory: pathlib.Path, num_train: int, num_evaluation: int, num_classes: int, shards: int) -> None:
    """Say what was written, and what to give as `--data`."""
    print(
        f"{num_train:,} training and {num_evaluation:,} evaluation images of {num_classes} classes, in {shards} "
        f"{'file' if shards == 1 else 'files'} each: --data {shlex.quote(f'tfrecord:{directory}/*.tfrecord')}."
    )


def _write(split: Split, paths: list[str], title: str) -> dict[str, np.ndarray]:
    """Returns the length of each record by the file's name."""
    lengths: dict[str, list[int]] = {os.path.basename(path): [] for path in paths}

    def encoded(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = split.read(index)
        return image if image.dtype == tf.string else tf.io.encode_png(image), label

    data = tf.data.Dataset.range(split.num_examples).map(encoded, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    with contextlib.ExitStack() as open_files, bad_examples_reported(split):
        writers = [open_files.enter_context(tf.io.TFRecordWriter(path)) for path in paths]
        progress = tracked(data, title, split.num_examples)
        for number, (image, label) in enumerate(progress):
            data = record(image.numpy(), int(label))
            writers[number % len(writers)].write(data)
            lengths[os.path.basename(paths[number % len(paths)])].append(len(data))
    return {name: np.array(values, np.int64) for name, values in lengths.items()}


def record(image: bytes, label: int) -> bytes:
    """Return an image file with its class as a record; the same bytes each time."""
    feature = {
        IMAGE: tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        LABEL: tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString(deterministic=True)


def save_samples(
    split: Split, preprocessing: Preprocessing | None, path: str | os.PathLike, most: int | None = None
) -> int:
    """Write images of a split, as PNG in an evenly mixed order, up to `most`; return their number.

    Those that are kept beside a model have 64 MB at most. Images far larger than its input are reduced first, so that
    every data set gives enough of them.
    """
    most_bytes = math.inf if preprocessing is None else _SAMPLE_BYTES

    @without_autograph
    def sample(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = split.example(index, preprocessing)
        if preprocessing is None:
            return tf.io.encode_png(image), label
        limit = tuple(_LARGEST_SAMPLE * side for side in preprocessing.image_size)

        def reduced() -> tf.Tensor:
            seen = preprocessing.to_channels(image)  # first, as a model sees them: hidden colors must not mix in
            smaller = tf.image.resize(seen, limit, preserve_aspect_ratio=True, antialias=True)
            return tf.saturate_cast(tf.round(smaller), tf.uint8)

        is_large = tf.reduce_all(tf.shape(image)[:2] > limit)
        return tf.io.encode_png(tf.cond(is_large, reduced, lambda: image)), label

    # In a graph, which walks through the header of an image file a hundred times as fast as eager operations do.
    chosen = np.random.default_rng(0).permutation(split.num_examples)[:most]
    data = tf.data.Dataset.from_tensor_slices(chosen)
    data = data.map(sample, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    encoded, labels, total = list[bytes](), list[int](), 0
    # In batches, because a step of the iterator takes longer than a small image.
    for images, classes in data.batch(16).as_numpy_iterator():
        for image, label in zip(images, classes, strict=True):
            if total < most_bytes:
                encoded.append(image)
                labels.append(int(label))
                total += len(image)
        if total >= most_bytes:
            break
    paths = (pathlib.PurePath(split.name(int(index))) for index in chosen[: len(encoded)])
    names = tuple("/".join(path.parts[-2:]) for path in paths)  # of a file without the other folders
    Samples(tuple(encoded), np.array(labels), names).save(path)
    return len(encoded)


def write_samples(source: DataOptions, output: str | os.PathLike, *, count: int = 128) -> None:
    """Write samples.npz with up to `count` evaluation images in shuffled order, and labels.txt."""
    directory = output_folder(output)
    dataset = open_source(source)
    with staged(directory) as stage, bad_examples_reported(dataset.train, dataset.evaluation):
        written = save_samples(dataset.evaluation, None, stage / SAMPLES, count)
        (stage / LABELS).write_text(labels_text(dataset.labels), encoding="utf-8")
    print(f"{written} images in {directory / SAMPLES}.")

"""Times the input pipeline and a minimal tf.data loop in turn on the same synthetic photographs."""

import dataclasses
import itertools
import pathlib
import statistics
import tempfile
import time

import numpy as np
import tensorflow as tf

from benchmarks.server.photographs import photographs
from keras_vit import Preprocessing
from training.input.pipeline import training_batches
from training.input.record_index import record_lengths
from training.input.sources import Split, open_source
from training.input.tfrecord import IMAGE, shard_name
from training.input.write_tfrecord import shard
from training.options.common import DataOptions
from training.recipes.recipe import Recipe

_RECIPE = Recipe(image_size=(224, 224), batch_size=64, learning_rate=1.0, epochs=1, inception_crop=True, flip=True)
_PREPROCESSING = Preprocessing((224, 224))
# As the checkpoints of timm say it: antialiased, equal to Pillow's pixels.
_BICUBIC = Preprocessing((224, 224), interpolation="bicubic", library="timm")
_JITTER = 0.3


def write_photographs(folder: pathlib.Path, count: int) -> None:
    """Write random JPEG files in two class folders."""
    for number, content in enumerate(photographs(count)):
        path = folder / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def window(data: tf.Tensor) -> tf.Tensor:
    """Bytes of a JPEG -> a random window of it, flipped or not, with as few operations as possible."""
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(data),
        tf.zeros((0, 0, 4)),
        min_object_covered=0.0,
        area_range=(0.05, 1.0),
        aspect_ratio_range=(0.75, 1.33),
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.io.decode_and_crop_jpeg(data, tf.concat([begin[:2], size[:2]], 0), channels=3)
    return tf.image.random_flip_left_right(tf.image.resize(window, (224, 224)))


def _batches(images: tf.data.Dataset) -> tf.data.Dataset:
    data = images.batch(64, drop_remainder=True)
    return data.map(lambda images: (tf.cast(images, tf.float32) - 127.5) / 127.5).prefetch(tf.data.AUTOTUNE)


def minimal(folder: pathlib.Path) -> tf.data.Dataset:
    """Endless batches of the files of a folder."""
    files = tf.data.Dataset.from_tensor_slices([str(path) for path in folder.rglob("*.jpg")]).repeat()
    return _batches(files.map(lambda path: window(tf.io.read_file(path)), num_parallel_calls=tf.data.AUTOTUNE))


def whole(folder: pathlib.Path, preprocessing: Preprocessing) -> tf.data.Dataset:
    """Endless batches of the files of a folder, decoded and resized as in evaluation."""
    files = tf.data.Dataset.from_tensor_slices([str(path) for path in folder.rglob("*.jpg")]).repeat()
    return _batches(
        files.map(lambda path: preprocessing.read(tf.io.read_file(path)), num_parallel_calls=tf.data.AUTOTUNE)
    )


def sequential(shards: pathlib.Path) -> tf.data.Dataset:
    """Endless batches of TFRecord files, read from the first byte to the last."""

    def image(record: tf.Tensor) -> tf.Tensor:
        return window(tf.io.parse_single_example(record, {IMAGE: tf.io.FixedLenFeature((), tf.string)})[IMAGE])

    records = tf.data.TFRecordDataset([str(path) for path in sorted(shards.glob("train-*.tfrecord"))]).repeat()
    return _batches(records.map(image, num_parallel_calls=tf.data.AUTOTUNE))


def shuffled(split: Split) -> tf.data.Dataset:
    """The same of the records of a split in shuffled order, each read by its position."""

    def image(number: tf.Tensor) -> tf.Tensor:
        index = tf.raw_ops.RandomIndexShuffle(
            index=number % split.num_examples, seed=[0, 0, 0], max_index=split.num_examples - 1, rounds=16
        )
        return window(split.read(index)[0])

    return _batches(tf.data.Dataset.range(tf.int64.max).map(image, num_parallel_calls=tf.data.AUTOTUNE))


def keras_cv_jitter(folder: pathlib.Path) -> tf.data.Dataset:
    """The minimal loop followed by keras-cv's own layers with random amounts, as its guides use them."""
    from keras_cv import layers

    values = {"value_range": (0, 255)}
    brightness, contrast = layers.RandomBrightness(_JITTER, **values), layers.RandomContrast(factor=_JITTER, **values)
    saturation = layers.RandomSaturation((0.5 - _JITTER / 4, 0.5 + _JITTER / 4))

    def jitter(images: tf.Tensor) -> tf.Tensor:
        return saturation(contrast(brightness(images * 127.5 + 127.5))) / 127.5 - 1.0

    return minimal(folder).map(jitter, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def full(split: Split, **augmentation) -> tf.data.Dataset:
    """The batches of training."""
    recipe = dataclasses.replace(_RECIPE, **augmentation)
    return training_batches(split, recipe, _PREPROCESSING, num_classes=2, seed=0, first_step=0)


def rates(data: tf.data.Dataset, batches: int) -> tuple[float, float]:
    """Images per second, and per second of processor time, after two warm-up batches.

    The iterator is created and closed here. An open iterator would keep prefetching during the next measurement.
    """
    iterator = iter(data)
    for _ in itertools.islice(iterator, 2):
        pass
    start, worked = time.perf_counter(), time.process_time()
    for _ in itertools.islice(iterator, batches):
        pass
    images = batches * _RECIPE.batch_size
    return images / (time.perf_counter() - start), images / (time.process_time() - worked)


def compare(rounds: int, batches: int, images: int) -> None:
    """Write the photographs, time all pipelines, and print the ratios."""
    with tempfile.TemporaryDirectory() as directory:
        folder, shards = pathlib.Path(directory) / "photographs", pathlib.Path(directory) / "shards"
        write_photographs(folder, images)
        shard(DataOptions(f"folder:{folder}"), str(shards), shards=2)
        photographs = open_source(DataOptions(f"folder:{folder}")).train
        records = open_source(DataOptions(f"tfrecord:{shards}/*.tfrecord")).train
        peers = {
            "minimal loop": minimal(folder),
            "sequential TFRecord loop": sequential(shards),
            "shuffled TFRecord loop": shuffled(records),
            "folder": full(photographs),
            "tfrecord": full(records),
            "folder, color jitter": full(photographs, color_jitter=_JITTER),
            "keras-cv, color jitter": keras_cv_jitter(folder),
            "whole, bilinear": whole(folder, _PREPROCESSING),
            "whole, bicubic": whole(folder, _BICUBIC),
        }
        measured = {name: [] for name in peers}
        for number in range(rounds + 1):
            for name, data in peers.items():
                found = rates(data, batches)
                if number:
                    measured[name].append(found)
    for name, found in measured.items():
        ratios = np.array(found) / np.array(measured["minimal loop"])
        print(
            f"{name:24} {statistics.median(rate for rate, _ in found):6.0f} images/s, of the minimal loop "
            f"{np.median(ratios[:, 0]):.2f} ({ratios[:, 0].min():.2f} to {ratios[:, 0].max():.2f}); by work "
            f"{np.median(ratios[:, 1]):.2f} ({ratios[:, 1].min():.2f} to {ratios[:, 1].max():.2f})"
        )


def time_index(count: int) -> None:
    """Write `count` records of 64 bytes in 100 files, find them, and print how long it took, the second time too."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [str(pathlib.Path(directory) / shard_name("train", number, 100)) for number in range(100)]
        for number, path in enumerate(paths):
            with tf.io.TFRecordWriter(path) as writer:
                for _ in range(number, count, 100):
                    writer.write(b"0123456789abcdef" * 4)
        for title in ("without an index", "with the index"):
            start = time.perf_counter()
            found = sum(map(len, record_lengths(paths).values()))
            print(f"{found:,} records in 100 files found in {time.perf_counter() - start:.1f} s {title}")

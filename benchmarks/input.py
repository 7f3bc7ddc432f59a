"""Compares input pipelines of training, each in a process of its own, in images per second.

    python -m benchmarks.input
    python -m benchmarks.input --augmentation

All take a random window of 5 to 100% of a JPEG of 500x375, resize it to 224x224, flip it, scale it to [-1, 1] and make
batches of 64. This project's pipeline, over files and over TFRecord files, runs beside a minimal tf.data loop, which
has no labels, no seeds and no order that can resume. With --augmentation the pipeline runs beside those of Keras,
keras-cv, torchvision and timm, all with RandAugment and MixUp. Pipelines of tf.data decode only the window; the
others decode with Pillow in one worker process for each core. Rounds alternate, so that all meet the same conditions;
the ratios are more reliable than the rates.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.case import Case, photographs, processor
from benchmarks.comparison import PeerProcess
from benchmarks.peer_process import timed
from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.cli.options import Count
from keras_vit.files.tables import markdown_table

BATCH, SIZE = 64, 224
_SMALLEST_AREA, _MIXUP = 0.05, 0.2
_OPERATIONS, _MAGNITUDE = 2, 10
_WARM_UP = 3  # batches before the timed ones
_CORES = 2  # for the threads or worker processes of each pipeline


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compare the input pipeline of training with others, each on two cores."""

    rounds: Count = 9
    """Timed passes of each, after one warm-up pass."""
    batches: Count = 16
    """Batches of 64 images in each pass."""
    images: Count = 256
    """Number of different files."""
    augmentation: bool = False
    """Compare pipelines with RandAugment and MixUp."""


def compare(peers: Sequence[str], rounds: int, batches: int, images: int, cores: int = _CORES) -> str:
    """Write photographs, let the pipelines take turns, and return a table."""
    case = Case("inference", "ViT-S_16", BATCH, threads=cores)
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        folder = pathlib.Path(directory) / "photographs"
        for number, content in enumerate(photographs(images)):
            path = folder / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        processes = [PeerProcess(peer, case, stack, "benchmarks.input") for peer in peers]
        request = json.dumps({"folder": str(folder), "batches": batches})
        for number in range(rounds + 1):
            for process in processes:
                answer = process.ask(request)
                if answer and number:
                    seconds[process.peer].append(answer["seconds"])
        failures = {process.peer: process.end().failure for process in processes}
    return table(seconds, failures, batches * BATCH)


def table(seconds: dict[str, list[float]], failures: dict[str, str | None], images: int) -> str:
    """Return a Markdown table: images per second of each pipeline, and how many times as fast ours is, by round."""
    own = next(iter(seconds.values()))
    rows = []
    for peer, times in seconds.items():
        if failures[peer] is not None or not times:
            rows.append((peer, f"failed: {failures[peer]}", "", ""))
            continue
        rates = sorted(images / each for each in times)
        ratios = [theirs / ours for ours, theirs in zip(own, times, strict=True)] if len(own) == len(times) else []
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        rows.append((peer, f"{statistics.median(rates):.0f}", f"{rates[0]:.0f} to {rates[-1]:.0f}", shown))
    header = ("pipeline", "images/s, median", "least to most", "keras_vit is faster by")
    return markdown_table(header, rows, num_text_columns=1)


def keras_vit(folder: pathlib.Path, workers: int) -> Iterator:
    """The pipeline of `training.pretrain`, with Inception crop."""
    augmentation = {"randaugment_layers": _OPERATIONS, "randaugment_magnitude": _MAGNITUDE, "mixup": _MIXUP}
    return _ours(f"folder:{folder}", **augmentation)


def keras_vit_folder(folder: pathlib.Path, workers: int) -> Iterator:
    """The same without augmentation."""
    return _ours(f"folder:{folder}")


def keras_vit_tfrecord(folder: pathlib.Path, workers: int) -> Iterator:
    """The same of TFRecord files, read in shuffled order, each record by its position."""
    from training.data.write import shard
    from training.options.common import DataOptions

    shards = folder.with_name(f"{folder.name}-shards")
    if not shards.exists():
        shard(DataOptions(f"folder:{folder}"), str(shards), shards=2)
    return _ours(f"tfrecord:{shards}/*.tfrecord")


def _ours(data: str, **augmentation) -> Iterator:
    from keras_vit import Preprocessing
    from training.data.pipeline import training_batches
    from training.data.sources import open_source
    from training.options.common import DataOptions
    from training.recipes.recipe import Recipe

    sizes = {"image_size": (SIZE, SIZE), "batch_size": BATCH}
    recipe = Recipe(**sizes, learning_rate=1.0, epochs=1, inception_crop=True, flip=True, **augmentation)
    split = open_source(DataOptions(data)).train
    return iter(training_batches(split, recipe, Preprocessing((SIZE, SIZE)), num_classes=2, seed=0, first_step=0))


def minimal_loop(folder: pathlib.Path, workers: int) -> Iterator:
    """As few operations of tf.data as possible: no labels, no seeds, no order that can resume."""
    import tensorflow as tf

    def batch(images: tf.Tensor) -> tf.Tensor:
        return (tf.cast(images, tf.float32) - 127.5) / 127.5

    files = tf.data.Dataset.from_tensor_slices([str(path) for path in folder.rglob("*.jpg")]).repeat()
    images = files.map(_window, num_parallel_calls=tf.data.AUTOTUNE)
    return iter(images.batch(BATCH, drop_remainder=True).map(batch).prefetch(tf.data.AUTOTUNE))


def _window(path):
    """A JPEG file -> a random window of it, flipped or not, with as few operations as possible."""
    import tensorflow as tf

    data = tf.io.read_file(path)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(data),
        tf.zeros((0, 0, 4)),
        min_object_covered=0.0,
        area_range=(_SMALLEST_AREA, 1.0),
        aspect_ratio_range=(0.75, 1.33),
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.io.decode_and_crop_jpeg(data, tf.concat([begin[:2], size[:2]], 0), channels=3)
    return tf.image.random_flip_left_right(tf.image.resize(window, (SIZE, SIZE)))


def keras_layers(folder: pathlib.Path, workers: int) -> Iterator:
    """tf.data with the layers of Keras, which has no layer for the window."""
    from keras import layers

    augment = layers.RandAugment(value_range=(0, 255), num_ops=_OPERATIONS, factor=_MAGNITUDE / 30.0)
    return _in_tf_data(folder, augment, layers.MixUp(alpha=_MIXUP))


def keras_cv(folder: pathlib.Path, workers: int) -> Iterator:
    """tf.data with the layers of keras-cv."""
    from keras_cv import layers

    magnitude = {"magnitude": _MAGNITUDE / 30.0, "augmentations_per_image": _OPERATIONS}
    return _in_tf_data(folder, layers.RandAugment(value_range=(0, 255), **magnitude), layers.MixUp(alpha=_MIXUP))


def _in_tf_data(folder: pathlib.Path, augment: Callable, mixup: Callable) -> Iterator:
    import tensorflow as tf

    paths = sorted(folder.rglob("*.jpg"))
    labels = [float(path.parent.name == paths[0].parent.name) for path in paths]
    files = tf.data.Dataset.from_tensor_slices(([str(path) for path in paths], labels)).shuffle(len(paths)).repeat()

    def example(path: tf.Tensor, label: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"images": _window(path), "labels": tf.stack([label, 1.0 - label])}

    def batch(examples: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        mixed = mixup({**examples, "images": augment(examples["images"])})
        return (mixed["images"] - 127.5) / 127.5, mixed["labels"]

    data = files.map(example, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH, drop_remainder=True)
    return iter(data.map(batch, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))


def torchvision(folder: pathlib.Path, workers: int) -> Iterator:
    """Torchvision's transforms v2 on Pillow images in a DataLoader of torch."""
    import torch
    from torchvision.transforms import v2

    crop, augment = v2.RandomResizedCrop(SIZE, scale=(_SMALLEST_AREA, 1.0)), v2.RandAugment(_OPERATIONS, _MAGNITUDE)
    to_numbers = v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), augment, *to_numbers])
    mixup = v2.MixUp(alpha=_MIXUP, num_classes=2)
    return (mixup(images, labels) for images, labels in _in_torch(folder, transform, workers))


def timm(folder: pathlib.Path, workers: int) -> Iterator:
    """Timm's transforms on Pillow images in a DataLoader of torch."""
    from timm.data import Mixup, create_transform

    mixup = Mixup(mixup_alpha=_MIXUP, num_classes=2)
    transform = create_transform(
        SIZE,
        is_training=True,
        scale=(_SMALLEST_AREA, 1.0),
        color_jitter=None,
        auto_augment=f"rand-m{_MAGNITUDE}-n{_OPERATIONS}",
        interpolation="bilinear",
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    return (mixup(images, labels) for images, labels in _in_torch(folder, transform, workers))


def _in_torch(folder: pathlib.Path, transform: Callable, workers: int) -> Iterator:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    files = ImageFolder(str(folder), transform)
    loader = DataLoader(files, BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=True)
    return itertools.chain.from_iterable(loader for _ in itertools.count())


_PLAIN = (keras_vit_folder, keras_vit_tfrecord, minimal_loop)
_AUGMENTED = (keras_vit, keras_layers, keras_cv, torchvision, timm)
PEERS = {peer.__name__: peer for peer in (*_PLAIN, *_AUGMENTED)}


def measurements(peer: Callable[[pathlib.Path, int], Iterator], case: Case, requests: Iterable[str]) -> Iterator[dict]:
    """Yield the seconds of some batches for each request, a JSON object with their folder and number."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case.threads])  # the workers inherit it
    yield {}
    for request in map(json.loads, requests):
        batches = peer(pathlib.Path(request["folder"]), case.threads)
        _take(batches, _WARM_UP)
        yield {"seconds": timed(functools.partial(_take, batches, request["batches"]))[0]}
        del batches  # an open pipeline would go on while the next one is timed
        gc.collect()
    yield {}
    os._exit(0)  # worker processes of the pipelines wait for more


def _take(batches: Iterator, count: int) -> None:
    for _ in itertools.islice(batches, count):
        pass


def main(arguments: Sequence[str]) -> None:
    """`--rounds --batches --images --augmentation`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks.input", about=__doc__)
    cli.require_tensorflow()
    peers = [peer.__name__ for peer in (_AUGMENTED if parsed.augmentation else _PLAIN)]
    print(f"{processor()}, {_CORES} cores, {parsed.rounds} rounds of {parsed.batches} batches of {BATCH} images\n")
    print(compare(peers, parsed.rounds, parsed.batches, parsed.images))


if __name__ == "__main__":
    cli.run(main)

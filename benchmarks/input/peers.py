"""Input pipelines of training: this project's, and those of other libraries on the same files.

All read JPEG files of 500x375, take a random window of 5 to 100% of the area, resize it to 224x224, flip it, scale the
pixels to [-1, 1] and make batches of 64. With augmentation they also apply RandAugment with two operations, and mix the
images by MixUp with alpha 0.2. Pipelines of tf.data decode only the window; the others decode with Pillow in one worker
process for each core.

`python -m benchmarks.input.peers PEER CASE` runs one of them: for each line of standard input, a JSON object with the
folder and the number of batches, it writes the seconds that these batches took.
"""

import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

from benchmarks.case import Case
from benchmarks.peer_process import answers, timed

BATCH, SIZE = 64, 224
_SMALLEST_AREA, _MIXUP = 0.05, 0.2
_OPERATIONS, _MAGNITUDE = 2, 10
# Batches before the timed ones.
_WARM_UP = 3


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

    recipe = Recipe(
        image_size=(SIZE, SIZE), batch_size=BATCH, learning_rate=1.0, epochs=1, inception_crop=True, flip=True
    )
    recipe, split = dataclasses.replace(recipe, **augmentation), open_source(DataOptions(data)).train
    return iter(training_batches(split, recipe, Preprocessing((SIZE, SIZE)), num_classes=2, seed=0, first_step=0))


def minimal_loop(folder: pathlib.Path, workers: int) -> Iterator:
    """As few operations of tf.data as possible: no labels, no seeds, no order that can resume."""
    import tensorflow as tf

    def batch(images: tf.Tensor) -> tf.Tensor:
        return (tf.cast(images, tf.float32) - 127.5) / 127.5

    files = tf.data.Dataset.from_tensor_slices([str(path) for path in folder.rglob("*.jpg")]).repeat()
    images = files.map(lambda path: _window(tf.io.read_file(path)), num_parallel_calls=tf.data.AUTOTUNE)
    return iter(images.batch(BATCH, drop_remainder=True).map(batch).prefetch(tf.data.AUTOTUNE))


def _window(data):
    """Bytes of a JPEG -> a random window of it, flipped or not, with as few operations as possible."""
    import tensorflow as tf

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
        return {"images": _window(tf.io.read_file(path)), "labels": tf.stack([label, 1.0 - label])}

    def batch(examples: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        mixed = mixup({**examples, "images": augment(examples["images"])})
        return (mixed["images"] - 127.5) / 127.5, mixed["labels"]

    data = files.map(example, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH, drop_remainder=True)
    return iter(data.map(batch, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))


def torchvision(folder: pathlib.Path, workers: int) -> Iterator:
    """Torchvision's transforms v2 on Pillow images in a DataLoader of torch."""
    import torch
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, scale=(_SMALLEST_AREA, 1.0)),
            v2.RandomHorizontalFlip(),
            v2.RandAugment(_OPERATIONS, _MAGNITUDE),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    mixup = v2.MixUp(alpha=_MIXUP, num_classes=2)
    return (mixup(images, labels) for images, labels in _in_torch(folder, transform, workers))


def timm(folder: pathlib.Path, workers: int) -> Iterator:
    """Timm's transforms on Pillow images in a DataLoader of torch."""
    from timm.data import Mixup

    mixup = Mixup(mixup_alpha=_MIXUP, num_classes=2)
    return (mixup(images, labels) for images, labels in _in_torch(folder, _timm_transform(), workers))


def _timm_transform() -> Callable:
    from timm.data import create_transform

    return create_transform(
        SIZE,
        is_training=True,
        scale=(_SMALLEST_AREA, 1.0),
        color_jitter=None,
        auto_augment=f"rand-m{_MAGNITUDE}-n{_OPERATIONS}",
        interpolation="bilinear",
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )


def _in_torch(folder: pathlib.Path, transform: Callable, workers: int) -> Iterator:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    files = ImageFolder(str(folder), transform)
    loader = DataLoader(files, BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=True)
    return itertools.chain.from_iterable(loader for _ in itertools.count())


def grain(folder: pathlib.Path, workers: int) -> Iterator:
    """Grain's workers with the transforms of timm; it has none of its own."""
    import numpy as np
    import torch
    from absl import flags
    from grain import MapDataset, MultiprocessingOptions
    from PIL import Image
    from timm.data import Mixup

    flags.FLAGS.mark_as_parsed()  # Grain reads its options from the flags of a program of absl
    paths, transform, mixup = sorted(folder.rglob("*.jpg")), _timm_transform(), Mixup(_MIXUP, num_classes=2)

    def example(path: pathlib.Path) -> tuple:
        with Image.open(path) as image:
            return transform(image.convert("RGB")).numpy(), np.int64(path.parent.name == paths[0].parent.name)

    data = MapDataset.source(paths).seed(0).shuffle().repeat().map(example).batch(BATCH, drop_remainder=True)
    batches = data.to_iter_dataset().mp_prefetch(MultiprocessingOptions(num_workers=workers))
    return (mixup(torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in batches)


PLAIN = (keras_vit_folder, keras_vit_tfrecord, minimal_loop)
AUGMENTED = (keras_vit, keras_layers, keras_cv, torchvision, timm, grain)
PEERS = {peer.__name__: peer for peer in (*PLAIN, *AUGMENTED)}


def main(arguments: list[str]) -> None:
    """`PEER CASE`, the case as JSON; only its threads count."""
    workers = Case(**json.loads(arguments[1])).threads
    with answers() as answer:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:workers])  # the workers inherit it
        answer(prepare=0.0)
        for line in sys.stdin:
            request = json.loads(line)
            batches = PEERS[arguments[0]](pathlib.Path(request["folder"]), workers)
            _take(batches, _WARM_UP)
            seconds, _ = timed(functools.partial(_take, batches, request["batches"]))
            del batches  # an open pipeline would go on while the next one is timed
            gc.collect()
            answer(seconds=seconds)
        answer()
        os._exit(0)  # worker processes of the pipelines wait for more


def _take(batches: Iterator, count: int) -> None:
    for _ in itertools.islice(batches, count):
        pass


if __name__ == "__main__":
    main(sys.argv[1:])

"""Input pipelines of training with augmentation: this project's, and those of other libraries on the same files.

All read JPEG files of 500x375, take a random window of 5 to 100 % of the area, resize it to 224x224, flip it, apply
RandAugment with two operations, scale the pixels to [-1, 1], make batches of 64, and mix them by MixUp with alpha 0.2.
Pipelines of tf.data decode only the window; the others decode with Pillow in one worker process for each core.
"""

import itertools
import pathlib
from collections.abc import Callable, Iterator

BATCH, SIZE = 64, 224
_SMALLEST_AREA, _MIXUP = 0.05, 0.2
_OPERATIONS, _MAGNITUDE = 2, 10


def keras_vit(folder: pathlib.Path, workers: int) -> Iterator:
    """The pipeline of `training.pretrain`, with Inception crop."""
    from benchmarks.input.loops import full
    from training.input.sources import open_source
    from training.options.common import DataOptions

    split = open_source(DataOptions(f"folder:{folder}")).train
    augmentation = {"randaugment_layers": _OPERATIONS, "randaugment_magnitude": _MAGNITUDE, "mixup": _MIXUP}
    return iter(full(split, **augmentation))


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

    from benchmarks.input.loops import window

    paths = sorted(folder.rglob("*.jpg"))
    labels = [float(path.parent.name == paths[0].parent.name) for path in paths]
    files = tf.data.Dataset.from_tensor_slices(([str(path) for path in paths], labels)).shuffle(len(paths)).repeat()

    def example(path: tf.Tensor, label: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"images": window(tf.io.read_file(path)), "labels": tf.stack([label, 1.0 - label])}

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
    from grain import MapDataset, MultiprocessingOptions
    from PIL import Image
    from timm.data import Mixup

    paths, transform, mixup = sorted(folder.rglob("*.jpg")), _timm_transform(), Mixup(_MIXUP, num_classes=2)

    def example(path: pathlib.Path) -> tuple:
        with Image.open(path) as image:
            return transform(image.convert("RGB")).numpy(), np.int64(path.parent.name == paths[0].parent.name)

    data = MapDataset.source(paths).seed(0).shuffle().repeat().map(example).batch(BATCH, drop_remainder=True)
    batches = data.to_iter_dataset().mp_prefetch(MultiprocessingOptions(num_workers=workers))
    return (mixup(torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in batches)


PEERS = {peer.__name__: peer for peer in (keras_vit, keras_layers, keras_cv, torchvision, timm, grain)}

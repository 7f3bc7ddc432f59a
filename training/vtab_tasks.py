"""The 19 tasks of VTAB-1k: data sets, splits, label rules, and what augmentation would destroy.

"A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark" (arXiv 1910.04867); splits
and label rules of its code, google-research/task_adaptation `data/`. What is not augmented: "Big Transfer" (1912.11370)
appendix F.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from training.examples import Source, Split
from training.records import Records

Group = Literal["natural", "specialized", "structured"]
Part = Literal["train800", "val200", "train800val200", "test"]

_TRAIN, _VAL = 800, 200  # images


@dataclasses.dataclass(frozen=True)
class LabelRule:
    """How a class is made of an example's other features."""

    features: dict
    """Those read, in the form of tfds.decode.PartialDecoding."""
    label: Callable[[dict], tf.Tensor]
    """Decoded features -> integer."""
    names: tuple[str, ...]
    """Of the classes."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One task."""

    name: str
    group: Group
    dataset: str
    """In TFDS: NAME or NAME/CONFIG."""
    validation: str | int
    """The split whose first 200 images are val200; or after how many per cent of train these begin."""
    test: str = "test"
    """In TFDS."""
    rule: LabelRule | None = None
    """Where the label is not stored as `label`."""
    binary: bool = False
    """Whether pixels are stored as 0 and 1."""
    flip: bool = True
    """False where mirroring changes the class."""
    crop: bool = True
    """False where a random window changes the class."""

    def split(self, part: Part, num_train: int) -> str:
        """A part's split in TFDS, for a training split of so many images."""
        train, validation = f"train[:{_TRAIN}]", f"{self.validation}[:{_VAL}]"
        if isinstance(self.validation, int):
            begin = self.validation * num_train // 100
            validation = f"train[{begin}:{begin + _VAL}]"
        parts = {"train800": train, "val200": validation, "train800val200": f"{train}+{validation}", "test": self.test}
        return parts[part]


def _bin(value: tf.Tensor, thresholds: tuple[float, ...]) -> tf.Tensor:
    """The number of the last threshold below a value."""
    return tf.reduce_sum(tf.cast(tf.constant(thresholds) < value, tf.int32)) - 1


def _count(example: dict) -> tf.Tensor:
    return tf.size(example["objects"]["size"]) - 3


def _closest_object(example: dict) -> tf.Tensor:
    return _bin(tf.reduce_min(example["objects"]["pixel_coords"][:, 2]), (0.0, 8.0, 8.5, 9.0, 9.5, 10.0))


def _closest_vehicle(example: dict) -> tf.Tensor:
    """Of cars, vans and trucks, the first three types; the last class is none."""
    distances = example["objects"]["location"][:, 2]  # metres
    vehicles = tf.boolean_mask(distances, example["objects"]["type"] < 3)
    return _bin(tf.reduce_min(tf.concat([vehicles, [1000.0]], axis=0)), (-100.0, 8.0, 20.0, 999.0))


def _stored(key: str, num_stored: int, num_classes: int) -> LabelRule:
    """A stored number, of which neighbours share a class where there are fewer classes."""

    def label(example: dict) -> tf.Tensor:
        return tf.cast(tf.cast(example[key], tf.float32) // (num_stored / num_classes), tf.int32)

    return LabelRule({key: True}, label, tuple(str(k) for k in range(num_classes)))


_CLEVR_COUNT = LabelRule({"objects": {"size"}}, _count, tuple(f"{n} objects" for n in range(3, 11)))
_CLEVR_DISTANCE = LabelRule(
    {"objects": {"pixel_coords"}}, _closest_object, ("to 8", "to 8.5", "to 9", "to 9.5", "to 10", "farther")
)
_KITTI = LabelRule({"objects": {"location", "type"}}, _closest_vehicle, ("to 8 m", "to 20 m", "farther", "no vehicle"))

TASKS = (
    Task("caltech101", "natural", "caltech101", 90),
    Task("cifar100", "natural", "cifar100", 90),
    Task("dtd", "natural", "dtd", "validation"),
    Task("oxford_flowers102", "natural", "oxford_flowers102", "validation"),
    Task("oxford_iiit_pet", "natural", "oxford_iiit_pet", 80),
    Task("sun397", "natural", "sun397/tfds", "validation"),
    Task("svhn", "natural", "svhn_cropped", 90),
    Task("patch_camelyon", "specialized", "patch_camelyon", "validation"),
    Task("eurosat", "specialized", "eurosat/rgb", 60, "train[80%:]"),
    Task("resisc45", "specialized", "resisc45", 60, "train[80%:]"),
    Task("diabetic_retinopathy", "specialized", "diabetic_retinopathy_detection/btgraham-300", "validation"),
    Task("clevr-count", "structured", "clevr", 90, "validation", _CLEVR_COUNT, crop=False),
    Task("clevr-distance", "structured", "clevr", 90, "validation", _CLEVR_DISTANCE, crop=False),
    Task("dmlab", "structured", "dmlab", "validation", crop=False),
    Task(
        "dsprites-location", "structured", "dsprites", 80, "train[90%:]", _stored("label_x_position", 32, 16),
        binary=True, flip=False, crop=False,
    ),
    Task(
        "dsprites-orientation", "structured", "dsprites", 80, "train[90%:]", _stored("label_orientation", 40, 16),
        binary=True, flip=False,
    ),
    Task("kitti-distance", "structured", "kitti", "validation", rule=_KITTI, crop=False),
    Task("smallnorb-azimuth", "structured", "smallnorb", "test", "test[50%:]", _stored("label_azimuth", 18, 18),
         flip=False),
    Task("smallnorb-elevation", "structured", "smallnorb", "test", "test[50%:]", _stored("label_elevation", 9, 9)),
)  # fmt: skip


def open_builder(task: Task, data_dir: str | None):
    """The TFDS builder of a task, prepared or not."""
    import tensorflow_datasets as tfds

    return tfds.builder(task.dataset, data_dir=data_dir)


def task_source(task: Task, builder, train: Part, evaluation: Part) -> Source:
    """Two parts of a prepared task, to train and to evaluate on."""
    names = task.rule.names if task.rule else tuple(builder.info.features["label"].names)
    return Source(names, *(_part(task, builder, part) for part in (train, evaluation)))


def _part(task: Task, builder, part: Part) -> Split:
    import tensorflow_datasets as tfds

    read_features = {"image": True, **(task.rule.features if task.rule else {"label": True})}
    decoders = {} if task.binary else {"image": tfds.decode.SkipDecoding()}
    features = tfds.decode.PartialDecoding(read_features).extract_features(builder.info.features)
    info = builder.info.splits[task.split(part, builder.info.splits["train"].num_examples)]
    records = Records([(file.filename, file.skip, file.take) for file in info.file_instructions])
    wanted = {"train800": _TRAIN, "val200": _VAL, "train800val200": _TRAIN + _VAL}
    if len(records) != wanted.get(part, len(records)):
        raise UserError(
            f"{part} of {task.name} should be {wanted[part]} images, but there are {len(records)} in "
            f"{builder.data_dir}; prepare the data set again."
        )

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = features.deserialize_example(records.read(index), decoders=decoders)
        image = example["image"] * np.uint8(255) if task.binary else example["image"]
        return image, tf.cast(task.rule.label(example) if task.rule else example["label"], tf.int32)

    return Split(len(records), read, records.name)

"""The tasks of VTAB-1k as sources: which examples, and how a class is made of what TFDS stores.

The label rules are those of google-research/task_adaptation `data/`.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from training.data.dataset import DataSet, Split
from training.data.tfrecord import TFRecords
from training.recipes.vtab_tasks import NUM_TRAIN, NUM_VAL, Part, VtabTask


@dataclasses.dataclass(frozen=True)
class LabelRule:
    """How a class is made of an example's other features."""

    features: dict
    """Those read, in the form of tfds.decode.PartialDecoding."""
    label: Callable[[dict], tf.Tensor]
    """Decoded features -> integer."""
    names: tuple[str, ...]
    """Of the classes."""


def _bin(value: tf.Tensor, thresholds: tuple[float, ...]) -> tf.Tensor:
    """The number of the last threshold below a value."""
    return tf.reduce_sum(tf.cast(tf.constant(thresholds) < value, tf.int32)) - 1


def _count(example: dict) -> tf.Tensor:
    return tf.size(example["objects"]["size"]) - 3


def _closest_object(example: dict) -> tf.Tensor:
    return _bin(tf.reduce_min(example["objects"]["pixel_coords"][:, 2]), (0.0, 8.0, 8.5, 9.0, 9.5, 10.0))


def _closest_vehicle(example: dict) -> tf.Tensor:
    """Return the class of the closest car, van or truck, the first three types; the last class is none."""
    distances = example["objects"]["location"][:, 2]  # meters
    vehicles = tf.boolean_mask(distances, example["objects"]["type"] < 3)
    return _bin(tf.reduce_min(tf.concat([vehicles, [1000.0]], axis=0)), (-100.0, 8.0, 20.0, 999.0))


def _stored(key: str, num_stored: int, num_classes: int) -> LabelRule:
    """A stored number, of which neighbors share a class where there are fewer classes."""

    def label(example: dict) -> tf.Tensor:
        return tf.cast(tf.cast(example[key], tf.float32) // (num_stored / num_classes), tf.int32)

    return LabelRule({key: True}, label, tuple(str(k) for k in range(num_classes)))


# By task, where the label is not stored as `label`.
RULES = {
    "clevr-count": LabelRule({"objects": {"size"}}, _count, tuple(f"{n} objects" for n in range(3, 11))),
    "clevr-distance": LabelRule(
        {"objects": {"pixel_coords"}}, _closest_object, ("to 8", "to 8.5", "to 9", "to 9.5", "to 10", "farther")
    ),
    "dsprites-location": _stored("label_x_position", 32, 16),
    "dsprites-orientation": _stored("label_orientation", 40, 16),
    "kitti-distance": LabelRule(
        {"objects": {"location", "type"}}, _closest_vehicle, ("to 8 m", "to 20 m", "farther", "no vehicle")
    ),
    "smallnorb-azimuth": _stored("label_azimuth", 18, 18),
    "smallnorb-elevation": _stored("label_elevation", 9, 9),
}


def open_builder(task: VtabTask, data_dir: str | None):
    """The TFDS builder of a task, prepared or not."""
    import tensorflow_datasets as tfds

    return tfds.builder(task.dataset, data_dir=data_dir)


def task_source(task: VtabTask, builder, train: Part, evaluation: Part) -> DataSet:
    """Two parts of a prepared task, to train and to evaluate on."""
    rule = RULES.get(task.name)
    names = rule.names if rule else tuple(builder.info.features["label"].names)
    return DataSet(names, _part(task, builder, train), _part(task, builder, evaluation))


def _part(task: VtabTask, builder, part: Part) -> Split:
    import tensorflow_datasets as tfds

    rule = RULES.get(task.name)
    read_features = {"image": True, **(rule.features if rule else {"label": True})}
    decoders = {} if task.binary else {"image": tfds.decode.SkipDecoding()}
    features = tfds.decode.PartialDecoding(read_features).extract_features(builder.info.features)
    info = builder.info.splits[task.split(part, builder.info.splits["train"].num_examples)]
    records = TFRecords([(file.filename, file.skip, file.take) for file in info.file_instructions])
    wanted = {"train800": NUM_TRAIN, "val200": NUM_VAL, "train800val200": NUM_TRAIN + NUM_VAL}
    if len(records) != wanted.get(part, len(records)):
        raise UserError(
            f"{part} of {task.name} should be {wanted[part]} images, but there are {len(records)} in "
            f"{builder.data_dir}; prepare the data set again."
        )

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = features.deserialize_example(records.read(index), decoders=decoders)
        image = example["image"] * np.uint8(255) if task.binary else example["image"]
        return image, tf.cast(rule.label(example) if rule else example["label"], tf.int32)

    return Split(len(records), read, records.name)

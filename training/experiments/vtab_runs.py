"""VTAB-1k: its tasks as data sets, their runs, setting by setting, and the table of their accuracies.

The label rules, how a class is made of what TFDS stores, are those of google-research/task_adaptation `data/`.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from keras_vit import UserError
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.errors import check_known
from keras_vit.files.atomic import write_text
from keras_vit.files.remote import to_path
from keras_vit.files.tables import markdown_table
from training.data.dataset import DataSet, Split
from training.data.tfrecord import TFRecords
from training.loop.devices.strategies import open_strategy
from training.loop.finetune import finetune
from training.loop.plan import Setup
from training.options.common import DataOptions
from training.options.train import FinetuneOptions, VtabOptions
from training.recipes.finetune import NUM_TRAIN, NUM_VAL, RECIPE_NAME, TASKS, Part, VtabTask
from training.recipes.recipe import Recipe

_GROUPS = ("natural", "specialized", "structured")


def vtab(options: VtabOptions) -> dict:
    """Run what is prepared, write vtab.json and vtab.md after every task, and return the numbers.

    Every run has the recipe with one of the learning rates, one of the numbers of steps, and the augmentation that does
    not change the classes of its task.
    """
    by_name = {task.name: task for task in TASKS}
    for name in options.tasks:
        check_known("task of VTAB", name, by_name)
    checkpoint, data_dir = options.checkpoint, options.data_dir
    file, recipe = find_checkpoint(checkpoint), options.recipe()
    builders = {name: tfds.builder(by_name[name].dataset, data_dir=data_dir) for name in options.tasks}
    missing = _not_prepared(builders, by_name, data_dir)
    folder, strategy = to_path(options.workdir), open_strategy(options.devices)

    def train(task: VtabTask, source: DataSet, rate: float, num_steps: int, name: str) -> float:
        """Return the accuracy on the evaluation images of a run, trained now or before."""
        print(f"\n{task.name}, {name}: learning rate {rate:g}, {num_steps} steps")
        own = task_recipe(task, recipe, rate, num_steps)
        fine_tuning = FinetuneOptions(
            source=DataOptions(f"tfds:{task.dataset.replace('/', ':')}", data_dir),
            workdir=str(folder / task.name / name),
            recipe=own,
            checkpoint=str(file),
            num_heads=options.num_heads,
            seed=options.seed,
            devices=options.devices,
            execution=options.execution,
        )
        source = dataclasses.replace(source, train=repeated(source.train, num_steps * own.batch_size))
        return finetune(fine_tuning, RECIPE_NAME, Setup(source, strategy)).metrics()[-1]["val_accuracy"]

    results = {}
    for name, builder in builders.items():
        if name not in missing:
            settings, task = list(itertools.product(options.learning_rates, options.steps)), by_name[name]
            results[name] = _measured(task, builder, settings, functools.partial(train, task))
            summary = summarize(results, missing)
            write_text(folder / "vtab.json", json.dumps({"checkpoint": checkpoint, **summary}, indent=2) + "\n")
            write_text(folder / "vtab.md", _page(checkpoint, summary))
    print(f"{_table(summary)}\nReport in {folder / 'vtab.md'}.")
    return summary


def _not_prepared(builders: Mapping[str, Any], by_name: Mapping[str, VtabTask], data_dir: str | None) -> dict[str, str]:
    """Return how to prepare the tasks that are not, and print it. Raises UserError if none is prepared."""
    missing = {}
    for task, builder in builders.items():
        if not builder.is_prepared():
            name, _, config = by_name[task].dataset.partition("/")
            command = f"tfds build {name}" + (f" --config {config}" if config else "")
            command += f" --data_dir {data_dir}" if data_dir else ""
            by_hand = bool(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)
            missing[task] = command + f" (fetch the images by hand first: see tfds' page of {name})" * by_hand
            print(f"{task} is not prepared: {missing[task]}")
    if len(missing) == len(builders):
        raise UserError(
            f"None of the {len(builders)} tasks is prepared in {data_dir or 'the directory of TFDS'}; prepare "
            "some by the commands above, or give --data-dir."
        )
    return missing


def _measured(
    task: VtabTask, builder, settings: Sequence[tuple[float, int]], train: Callable[[DataSet, float, int, str], float]
) -> dict:
    """Return the accuracy on the test split of the setting that is best on val200, and of every setting there."""
    tried: list[dict] = []
    rate, steps = settings[0]
    if len(settings) > 1:
        source = task_source(task, builder, "train800", "val200")
        for rate, steps in settings:
            accuracy = train(source, rate, steps, f"lr{rate:g}-steps{steps}")
            tried.append({"learning_rate": rate, "steps": steps, "val200_accuracy": accuracy})
        best = max(tried, key=lambda row: row["val200_accuracy"])
        rate, steps = best["learning_rate"], best["steps"]
    source = task_source(task, builder, "train800val200", "test")
    accuracy = train(source, rate, steps, "final")
    return {"group": task.group, "accuracy": accuracy, "learning_rate": rate, "steps": steps, "tried": tried}


def task_recipe(task: VtabTask, recipe: Recipe, rate: float, steps: int) -> Recipe:
    """Return the recipe without what would change the task's classes."""
    return dataclasses.replace(recipe, learning_rate=rate, steps=steps, flip=task.flip, inception_crop=task.crop)


def repeated(split: Split, num_examples: int) -> Split:
    """Repeat a split to at least `num_examples`, so that the run is one epoch and is evaluated only at its end.

    VTAB's code also repeats before shuffling.
    """
    times = -(-num_examples // split.num_examples)

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return split.read(index % split.num_examples)

    return Split(times * split.num_examples, read, lambda index: split.name(index % split.num_examples))


def summarize(results: Mapping[str, dict], missing: Mapping[str, str]) -> dict:
    """Return the accuracies and their means by group and over all; `complete` if all 19 tasks were run."""
    groups = {group: [row["accuracy"] for row in results.values() if row["group"] == group] for group in _GROUPS}
    return {
        "complete": len(results) == len(TASKS),
        "mean": float(np.mean([row["accuracy"] for row in results.values()])),
        "groups": {
            group: {"num_tasks": len(rows), "mean": float(np.mean(rows))} for group, rows in groups.items() if rows
        },
        "tasks": results,
        "missing": missing,
    }


def _table(summary: dict) -> str:
    rows = [
        (name, row["group"], f"{row['learning_rate']:g}", str(row["steps"]), f"{row['accuracy']:.1%}")
        for name, row in summary["tasks"].items()
    ]
    sizes = {group: sum(task.group == group for task in TASKS) for group in _GROUPS}
    for group, row in summary["groups"].items():
        rows.append((f"mean of {row['num_tasks']} of {sizes[group]}", group, "", "", f"{row['mean']:.1%}"))
    rows.append((f"mean of {len(summary['tasks'])} of {len(TASKS)}", "all", "", "", f"{summary['mean']:.1%}"))
    return markdown_table(("task", "group", "learning rate", "steps", "test accuracy"), rows, num_text_columns=2)


def _page(checkpoint: str, summary: dict) -> str:
    lines = [f"# VTAB-1k: {checkpoint}", "", _table(summary), ""]
    if not summary["complete"]:
        lines += ["Not all tasks were run, so that the mean is not comparable with a VTAB score.", ""]
    if summary["missing"]:
        lines += ["Not prepared:", "", *(f"- {name}: `{how}`" for name, how in summary["missing"].items()), ""]
    return "\n".join(lines)


# The tasks


@dataclasses.dataclass(frozen=True)
class LabelRule:
    """How a class is made of an example's other features."""

    features: dict
    """Those read, in the form of tfds.decode.PartialDecoding."""
    label: Callable[[dict], tf.Tensor]
    """Decoded features -> integer."""
    names: tuple[str, ...]


def _bin(value: tf.Tensor, thresholds: tuple[float, ...]) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(tf.constant(thresholds) < value, tf.int32)) - 1


def _closest_object(example: dict) -> tf.Tensor:
    return _bin(tf.reduce_min(example["objects"]["pixel_coords"][:, 2]), (0.0, 8.0, 8.5, 9.0, 9.5, 10.0))


def _closest_vehicle(example: dict) -> tf.Tensor:
    """Return the class of the closest car, van or truck, the first three types; the last class is none."""
    distances = example["objects"]["location"][:, 2]  # meters
    vehicles = tf.boolean_mask(distances, example["objects"]["type"] < 3)
    return _bin(tf.reduce_min(tf.concat([vehicles, [1000.0]], axis=0)), (-100.0, 8.0, 20.0, 999.0))


def _stored(key: str, num_stored: int, num_classes: int) -> LabelRule:
    """Return the rule of a stored number, of which neighbors share a class where there are fewer classes."""

    def label(example: dict) -> tf.Tensor:
        return tf.cast(tf.cast(example[key], tf.float32) // (num_stored / num_classes), tf.int32)

    return LabelRule({key: True}, label, tuple(str(k) for k in range(num_classes)))


# By task, where the label is not stored as `label`.
RULES = {
    "clevr-count": LabelRule(
        {"objects": {"size"}},
        lambda example: tf.size(example["objects"]["size"]) - 3,
        tuple(f"{count} objects" for count in range(3, 11)),
    ),
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


def task_source(task: VtabTask, builder, train: Part, evaluation: Part) -> DataSet:
    """Return two parts of a prepared task, to train and to evaluate on."""
    rule = RULES.get(task.name)
    names = rule.names if rule else tuple(builder.info.features["label"].names)
    return DataSet(names, _part(task, builder, train), _part(task, builder, evaluation))


def _part(task: VtabTask, builder, part: Part) -> Split:
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

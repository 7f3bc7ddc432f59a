"""The runs of VTAB-1k, task by task and setting by setting, and the table of their accuracies."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.checkpoints.find import find_checkpoint
from keras_vit.errors import check_known
from keras_vit.files.atomic import write_text
from keras_vit.files.remote import to_path
from keras_vit.files.tables import markdown_table
from training.data.sources import DataSet, Split
from training.experiments.vtab_sources import open_builder, task_source
from training.loop.devices.strategies import open_strategy
from training.loop.finetune import finetune
from training.loop.setup import Setup
from training.options.common import DataOptions
from training.options.train import FinetuneOptions, VtabOptions
from training.recipes.recipe import Recipe
from training.recipes.vtab_tasks import RECIPE_NAME, TASKS, VtabTask

_GROUPS = ("natural", "specialized", "structured")


def vtab(options: VtabOptions) -> dict:
    """Run what is prepared, write vtab.json and vtab.md after every task, and return the numbers.

    Every run has the recipe with one of the learning rates, one of the numbers of steps, and the augmentation that does
    not change the classes of its task.
    """
    chosen, checkpoint, data_dir = _chosen(options.tasks), options.checkpoint, options.data_dir
    file, recipe = find_checkpoint(checkpoint), options.recipe()
    builders = {task.name: open_builder(task, data_dir) for task in chosen}
    missing = {
        task.name: _how_to_prepare(task, builders[task.name], data_dir)
        for task in chosen
        if not builders[task.name].is_prepared()
    }
    for name, command in missing.items():
        print(f"{name} is not prepared: {command}")
    if len(missing) == len(chosen):
        raise UserError(
            f"None of the {len(chosen)} tasks is prepared in {data_dir or 'the directory of TFDS'}; prepare "
            "some by the commands above, or give --data-dir."
        )
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

    found = {}
    for task in chosen:
        if task.name not in missing:
            settings = list(itertools.product(options.learning_rates, options.steps))
            found[task.name] = _measured(task, builders[task.name], settings, functools.partial(train, task))
            summary = summarize(found, missing)
            write_text(folder / "vtab.json", json.dumps({"checkpoint": checkpoint, **summary}, indent=2) + "\n")
            write_text(folder / "vtab.md", _page(checkpoint, summary))
    print(f"{_table(summary)}\nReport in {folder / 'vtab.md'}.")
    return summary


def _chosen(tasks: Sequence[str]) -> list[VtabTask]:
    by_name = {task.name: task for task in TASKS}
    for name in tasks:
        check_known("task of VTAB", name, by_name)
    return [by_name[name] for name in dict.fromkeys(tasks)]


def _how_to_prepare(task: VtabTask, builder, data_dir: str | None) -> str:
    """The command, and a word where the images must be fetched by hand before."""
    name, _, config = task.dataset.partition("/")
    command = f"tfds build {name}" + (f" --config {config}" if config else "")
    command += f" --data_dir {data_dir}" if data_dir else ""
    by_hand = bool(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)
    return command + (f" (fetch the images by hand first: see tfds' page of {name})" if by_hand else "")


def _measured(
    task: VtabTask,
    builder,
    settings: Sequence[tuple[float, int]],
    train: Callable[[DataSet, float, int, str], float],
) -> dict:
    """The accuracy on the test split of the setting that is best on val200, and that of every setting there."""
    tried: list[dict] = []
    if len(settings) > 1:
        source = task_source(task, builder, "train800", "val200")
        for rate, steps in settings:
            name = f"lr{rate:g}-steps{steps}"
            accuracy = train(source, rate, steps, name)
            tried.append({"learning_rate": rate, "steps": steps, "val200_accuracy": accuracy})
        best = max(tried, key=lambda row: row["val200_accuracy"])
        settings = [(best["learning_rate"], best["steps"])]
    source = task_source(task, builder, "train800val200", "test")
    rate, steps = settings[0]
    accuracy = train(source, rate, steps, "final")
    return {"group": task.group, "accuracy": accuracy, "learning_rate": rate, "steps": steps, "tried": tried}


def task_recipe(task: VtabTask, recipe: Recipe, rate: float, steps: int) -> Recipe:
    """The recipe without what would change the task's classes."""
    return dataclasses.replace(recipe, learning_rate=rate, steps=steps, flip=task.flip, inception_crop=task.crop)


def repeated(split: Split, num_examples: int) -> Split:
    """Repeat a split to at least `num_examples`, so that the run is one epoch and is evaluated only at its end.

    VTAB's code also repeats before shuffling.
    """
    times = -(-num_examples // split.num_examples)

    def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return split.read(index % split.num_examples)

    return Split(times * split.num_examples, read, lambda index: split.name(index % split.num_examples))


def summarize(found: dict[str, dict], missing: dict[str, str]) -> dict:
    """The accuracies and their means by group and over all that were run; `complete` if these are all 19 tasks."""
    groups = {group: [row["accuracy"] for row in found.values() if row["group"] == group] for group in _GROUPS}
    return {
        "complete": len(found) == len(TASKS),
        "mean": float(np.mean([row["accuracy"] for row in found.values()])),
        "groups": {
            group: {"num_tasks": len(rows), "mean": float(np.mean(rows))} for group, rows in groups.items() if rows
        },
        "tasks": found,
        "missing": missing,
    }


def _table(summary: dict) -> str:
    rows = [
        (name, row["group"], f"{row['learning_rate']:g}", str(row["steps"]), f"{row['accuracy']:.4f}")
        for name, row in summary["tasks"].items()
    ]
    sizes = {group: sum(task.group == group for task in TASKS) for group in _GROUPS}
    for group, row in summary["groups"].items():
        rows.append((f"mean of {row['num_tasks']} of {sizes[group]}", group, "", "", f"{row['mean']:.4f}"))
    rows.append((f"mean of {len(summary['tasks'])} of {len(TASKS)}", "all", "", "", f"{summary['mean']:.4f}"))
    return markdown_table(("task", "group", "learning rate", "steps", "test accuracy"), rows, num_text_columns=2)


def _page(checkpoint: str, summary: dict) -> str:
    lines = [f"# VTAB-1k: {checkpoint}", "", _table(summary), ""]
    if not summary["complete"]:
        lines += ["Not all tasks were run, so that the mean is not comparable with a VTAB score.", ""]
    if summary["missing"]:
        lines += ["Not prepared:", "", *(f"- {name}: `{how}`" for name, how in summary["missing"].items()), ""]
    return "\n".join(lines)

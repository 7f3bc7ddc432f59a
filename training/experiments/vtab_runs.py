"""The runs of VTAB-1k, task by task and setting by setting, and the table of their accuracies."""

import dataclasses
import itertools
import json
import pathlib

import numpy as np
import tensorflow as tf

from keras_vit import UserError
from keras_vit.checkpoints.download import find_checkpoint
from keras_vit.errors import nearest
from keras_vit.files.atomic import write_text
from keras_vit.files.remote import to_path
from keras_vit.files.tables import markdown_table
from training.devices.strategies import open_strategy
from training.experiments.vtab_sources import open_builder, task_source
from training.input.sources import Source, Split
from training.loop.finetune import finetune
from training.loop.setup import Setup
from training.options.common import DataOptions
from training.options.experiments import VtabOptions
from training.options.train import FinetuneOptions
from training.recipes.finetune import FINETUNE_RECIPES
from training.recipes.recipe import Recipe
from training.recipes.vtab_tasks import TASKS, Task

_RECIPE = "vit-finetune-vtab"
_GROUPS = ("natural", "specialized", "structured")


def vtab(arguments: VtabOptions) -> dict:
    """Run what is prepared, write vtab.json and vtab.md after every task, and return the numbers."""
    tasks = _chosen(arguments)
    checkpoint = find_checkpoint(arguments.checkpoint)
    builders = {task.name: open_builder(task, arguments.data_dir) for task in tasks}
    missing = {
        task.name: _how_to_prepare(task, builders[task.name], arguments.data_dir)
        for task in tasks
        if not builders[task.name].is_prepared()
    }
    for name, command in missing.items():
        print(f"{name} is not prepared: {command}")
    if len(missing) == len(tasks):
        raise UserError(
            f"None of the {len(tasks)} tasks is prepared in {arguments.data_dir or 'the directory of TFDS'}; prepare "
            "some by the commands above, or give --data-dir."
        )
    strategy = open_strategy(arguments.devices)
    found = {}
    for task in tasks:
        if task.name not in missing:
            found[task.name] = _measured(task, builders[task.name], arguments, checkpoint, strategy)
            summary = summarize(found, missing)
            workdir = to_path(arguments.workdir)
            write_text(
                workdir / "vtab.json", json.dumps({"checkpoint": arguments.checkpoint, **summary}, indent=2) + "\n"
            )
            write_text(workdir / "vtab.md", _page(arguments, summary))
    print(f"{_table(summary)}\nReport in {workdir / 'vtab.md'}.")
    return summary


def _chosen(arguments: VtabOptions) -> list[Task]:
    by_name = {task.name: task for task in TASKS}
    for name in arguments.tasks:
        if name not in by_name:
            raise UserError(f"VTAB has no task {name!r}; the nearest names are {nearest(name, by_name)}.")
    if not (arguments.tasks and arguments.learning_rates and arguments.steps):
        raise UserError("--tasks, --learning-rates and --steps take at least one each.")
    return [by_name[name] for name in dict.fromkeys(arguments.tasks)]


def _how_to_prepare(task: Task, builder, data_dir: str | None) -> str:
    """The command, and a word where the images must be fetched by hand before."""
    name, _, config = task.dataset.partition("/")
    command = f"tfds build {name}" + (f" --config {config}" if config else "")
    command += f" --data_dir {data_dir}" if data_dir else ""
    by_hand = bool(builder.MANUAL_DOWNLOAD_INSTRUCTIONS)
    return command + (f" (fetch the images by hand first: see tfds' page of {name})" if by_hand else "")


def _measured(task: Task, builder, arguments: VtabOptions, checkpoint: pathlib.Path, strategy) -> dict:
    """The accuracy on the test split of the setting that is best on val200, and that of every setting there."""
    settings = list(itertools.product(arguments.learning_rates, arguments.steps))
    tried: list[dict] = []
    if len(settings) > 1:
        source = task_source(task, builder, "train800", "val200")
        for rate, steps in settings:
            name = f"lr{rate:g}-steps{steps}"
            accuracy = _trained(task, source, arguments, checkpoint, strategy, rate, steps, name)
            tried.append({"learning_rate": rate, "steps": steps, "val200_accuracy": accuracy})
        best = max(tried, key=lambda row: row["val200_accuracy"])
        settings = [(best["learning_rate"], best["steps"])]
    source = task_source(task, builder, "train800val200", "test")
    rate, steps = settings[0]
    accuracy = _trained(task, source, arguments, checkpoint, strategy, rate, steps, "final")
    return {"group": task.group, "accuracy": accuracy, "learning_rate": rate, "steps": steps, "tried": tried}


def _trained(
    task: Task,
    source: Source,
    arguments: VtabOptions,
    checkpoint: pathlib.Path,
    strategy: tf.distribute.Strategy,
    rate: float,
    steps: int,
    name: str,
) -> float:
    """Accuracy on the source's evaluation images of a run, trained now or before."""
    recipe = task_recipe(task, arguments, rate, steps)
    print(f"\n{task.name}, {name}: learning rate {rate:g}, {steps} steps")
    source = dataclasses.replace(source, train=repeated(source.train, steps * recipe.batch_size))
    run = finetune(
        FinetuneOptions(
            source=DataOptions(f"tfds:{task.dataset.replace('/', ':')}", arguments.data_dir),
            workdir=str(to_path(arguments.workdir) / task.name / name),
            recipe=recipe,
            checkpoint=str(checkpoint),
            num_heads=arguments.num_heads,
            seed=arguments.seed,
            devices=arguments.devices,
            execution=arguments.execution,
        ),
        _RECIPE,
        Setup(source, strategy),
    )
    return run.metrics()[-1]["val_accuracy"]


def task_recipe(task: Task, arguments: VtabOptions, rate: float, steps: int) -> Recipe:
    """Table 4's, without what would change the task's classes."""
    recipe = FINETUNE_RECIPES[_RECIPE]
    return dataclasses.replace(
        recipe,
        image_size=arguments.image_size,
        batch_size=arguments.batch_size,
        learning_rate=rate,
        steps=steps,
        schedule=dataclasses.replace(recipe.schedule, warmup_steps=arguments.warmup_steps),
        flip=task.flip,
        inception_crop=task.crop,
    )


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


def _page(arguments: VtabOptions, summary: dict) -> str:
    lines = [f"# VTAB-1k: {arguments.checkpoint}", "", _table(summary), ""]
    if not summary["complete"]:
        lines += ["Not all tasks were run, so that the mean is not comparable with a VTAB score.", ""]
    if summary["missing"]:
        lines += ["Not prepared:", "", *(f"- {name}: `{how}`" for name, how in summary["missing"].items()), ""]
    return "\n".join(lines)

"""The runs of a study, several at a time, and its report: table, figure and numbers."""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib

import numpy as np
import tensorflow as tf
import tqdm
from scipy import stats

from keras_vit import UserError
from keras_vit.files.atomic import atomic_write, write_text
from keras_vit.files.lock import locked
from keras_vit.files.remote import local_path, output_folder
from keras_vit.files.tables import markdown_table, short_name
from keras_vit.models.complexity import costs
from training.data.sources import open_source
from training.experiments.figures import draw
from training.experiments.grids import BY_SIZE, STUDIES, Point, check_base
from training.experiments.trial import Trial, labels_of, run_trial
from training.loop.signals import TrainingInterrupted
from training.options.train import StudyOptions
from training.probes.least_squares import check_shots
from training.recipes.recipe import PretrainRecipe

# Processes at most unless --jobs says more: each takes most of a gigabyte.
_MOST_JOBS = 8


def study(name: str, options: StudyOptions) -> list[dict]:
    """Run what is missing, write results.json, results.md and figure.png, and return the rows."""
    recipe, data, seeds, shots = options.recipe, options.source, options.seeds, options.shots
    train_images = options.train_images
    check_base(recipe)
    if train_images is not None and name not in BY_SIZE:
        raise UserError(f"--train-images does not apply to the study {name}; leave it out.")
    folder = output_folder(local_path(options.workdir, "workdir"))
    source = open_source(data)
    check_shots(labels_of(source.train), source.labels, [shots])
    num_examples = source.train.num_examples
    if train_images is None:
        points = STUDIES[name].grid(recipe, num_examples)
    else:
        points = BY_SIZE[name](recipe, num_examples, sorted(set(train_images)))
    trials = [
        Trial(point, seed, data, shots, folder / "runs" / f"{point.name}-seed{seed}")
        for point in points
        for seed in range(seeds)
    ]
    with locked(folder):
        measured = _measured(trials, options.jobs)
        rows = [
            _row(point, len(source.labels), measured[i * seeds : (i + 1) * seeds]) for i, point in enumerate(points)
        ]
        _report(name, recipe, data.data, seeds, shots, rows, folder)
    return rows


def _measured(trials: list[Trial], jobs: int | None) -> list[dict]:
    """Return the measurements of every trial, made before or now."""
    known = {trial.folder: found for trial in trials if (found := trial.measured())}
    missing = [trial for trial in trials if trial.folder not in known]
    if known:
        print(f"{len(known)} of {len(trials)} runs are finished already.")
    if missing:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if jobs is None:
            jobs = 1 if tf.config.list_physical_devices("GPU") else min(cores, _MOST_JOBS)
        jobs = min(jobs, len(missing))
        known |= _run_all(missing, jobs, max(cores // jobs, 1))
    return [known[trial.folder] for trial in trials]


def _run_all(trials: list[Trial], jobs: int, threads: int) -> dict[pathlib.Path, dict]:
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    found = {}
    try:
        running = {pool.submit(_in_own_process, trial, threads): trial for trial in trials}
        progress = tqdm.tqdm(concurrent.futures.as_completed(running), "Runs", len(running), unit="run", disable=None)
        for done in progress:
            trial = running[done]
            found[trial.folder] = result = _result(done, trial)
            progress.write(
                f"{trial.folder.name}: accuracy {result['accuracy']:.4f}, {trial.shots}-shot {result['few_shot']:.4f}, "
                f"{result['seconds']:.0f} s"
            )
    except KeyboardInterrupt:  # the runs have had it, too, and save their states
        raise TrainingInterrupted from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found


def _in_own_process(trial: Trial, threads: int) -> dict:
    """A fresh process for each: TensorFlow gives no memory back, and threads are set once."""
    # max_tasks_per_child of one pool for all needs Python 3.11.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(run_trial, trial, threads).result()


def _result(done: concurrent.futures.Future, trial: Trial) -> dict:
    log = trial.folder.with_suffix(".log")
    try:
        return done.result()
    except concurrent.futures.BrokenExecutor:
        raise UserError(
            f"The process of {trial.folder.name} was killed, perhaps because memory ran out; its "
            f"log is {log}: repeat the command to continue, with fewer --jobs."
        ) from None
    except UserError as mistake:
        raise UserError(f"{trial.folder.name}: {mistake}") from mistake


def _row(point: Point, num_classes: int, measured: list[dict]) -> dict:
    """A point of the table: means and 95 % intervals over the seeds, in which Student's t makes up for few of them."""
    recipe = point.recipe
    cost = costs(recipe.model, recipe.image_size, num_classes=num_classes, channels=recipe.channels)
    curves = np.array([found["curve"] for found in measured])  # (seeds, evaluations, 2)
    return {
        "name": point.name,
        "line": point.line,
        "setting": point.setting,
        "train_images": point.train_images,
        "parameters": cost.parameters,
        "forward_flops": cost.flops,
        "training_flops": 3 * cost.flops * recipe.num_steps(point.train_images) * recipe.batch_size,
        "accuracy": mean_and_interval([found["accuracy"] for found in measured]),
        "few_shot": mean_and_interval([found["few_shot"] for found in measured]),
        "curve": [[int(step), float(value)] for step, value in curves.mean(axis=0)],
    }


def mean_and_interval(values: list[float]) -> dict:
    """The values of several seeds, their mean, and its 95 % interval by Student's t; None for that of a single one."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return {"values": values, "mean": mean, "interval": None}
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return {"values": values, "mean": mean, "interval": [mean - float(half), mean + float(half)]}


def _report(
    name: str, recipe: PretrainRecipe, data: str, seeds: int, shots: int, rows: list[dict], workdir: pathlib.Path
) -> None:
    definition = STUDIES[name]
    results = {"study": name, "data": data, "recipe": dataclasses.asdict(recipe), "rows": rows}
    write_text(workdir / "results.json", json.dumps(results, indent=2) + "\n")
    with atomic_write(workdir / "figure.png") as temporary:
        draw(name, definition.title, short_name(data), shots, rows, temporary)
    header = ("", "setting", "parameters", "forward FLOPs", "accuracy, %", f"{shots}-shot, %")
    cells = [
        (
            row["line"],
            row["setting"],
            f"{row['parameters']:,}",
            f"{row['forward_flops']:,}",
            _percent(row["accuracy"]),
            _percent(row["few_shot"]),
        )
        for row in rows
    ]
    table = markdown_table(header, cells)
    page = (
        f"# {definition.title}\n\nAfter {definition.source}, on {short_name(data)}: every "
        f"model from scratch, {recipe.steps:,} steps of {recipe.batch_size} images, {seeds} seeds. Accuracy "
        f"on all evaluation images, and of least squares on the frozen features of {shots} training images of each "
        "class; means"
        + (" and 95 % intervals over the seeds" if seeds > 1 else "")
        + f".\n\n{table}\n\n![{definition.title}](figure.png)\n"
    )
    write_text(workdir / "results.md", page)
    print(f"{table}\nReport in {workdir / 'results.md'}.")


def _percent(summary: dict) -> str:
    if summary["interval"] is None:
        return f"{100 * summary['mean']:.2f}"
    return f"{100 * summary['mean']:.2f} ± {100 * (summary['interval'][1] - summary['mean']):.2f}"

"""The runs of a study, several at a time, each in a process of its own, and its report: table, figure and numbers."""

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
import tqdm

from keras_vit import UserError
from keras_vit.errors import reading, refuse_without_effect
from keras_vit.files.atomic import atomic_write, locked, write_text
from keras_vit.files.remote import local_path, output_folder
from keras_vit.files.tables import markdown_table, short_name
from keras_vit.models.complexity import costs
from keras_vit.run import Run, differences
from training.data.dataset import DataSet, Split, random_subset
from training.data.sources import open_source
from training.evaluation.intervals import of_mean
from training.experiments.study_figures import draw
from training.experiments.study_grids import STUDIES, Point, check_base
from training.features.linear_models import LeastSquares, shots_of, shots_that_fit
from training.features.probe import computed_features
from training.loop.callbacks import TrainingInterrupted
from training.loop.devices.strategies import open_strategy
from training.loop.plan import Setup
from training.loop.pretrain import pretrain
from training.options.common import DataOptions, Execution, StrategyOptions
from training.options.train import PretrainOptions, StudyOptions

# Processes at most unless --jobs says more: each takes most of a gigabyte.
_MOST_JOBS = 8
_MEASURED = "trial.json"
# big_vision's penalty, and how many random choices of the shots one accuracy is a mean over.
_L2, _CHOICES = 1024.0, 3
_BATCH = 500


def study(name: str, options: StudyOptions) -> list[dict]:
    """Run what is missing, write results.json, results.md and figure.png, and return the rows."""
    recipe, seeds, definition = options.recipe, options.seeds, STUDIES[name]
    check_base(recipe)
    refuse_without_effect(options, [(("train_images",), definition.takes_sizes, "studies of the number of images")])
    folder = output_folder(local_path(options.workdir, "workdir"))
    source = open_source(options.source)
    shots_that_fit(_labels_of(source.train), source.labels, [options.shots])
    sizes = () if options.train_images is None else (sorted(set(options.train_images)),)
    points = definition.grid(recipe, source.train.num_examples, *sizes)
    trials = [
        Trial(point, seed, options.source, options.shots, folder / "runs" / f"{point.name}-seed{seed}")
        for point in points
        for seed in range(seeds)
    ]
    with locked(folder):
        measured = _measured(trials, options.jobs)
        of_point = {point.name: [measured[each.folder] for each in trials if each.point is point] for point in points}
        rows = [_row(point, len(source.labels), of_point[point.name]) for point in points]
        _report(name, options, rows, folder)
    return rows


# One run


@dataclasses.dataclass(frozen=True)
class Trial:
    """A point of a study for one seed."""

    point: Point
    seed: int
    data: DataOptions
    shots: int
    folder: pathlib.Path

    @property
    def settings(self) -> dict:
        """Return the settings that decide its numbers, as read from JSON."""
        settings = dataclasses.asdict(self) | {"data": self.data.settings()}
        del settings["folder"]
        return json.loads(json.dumps(settings))

    @property
    def log(self) -> pathlib.Path:
        return self.folder.with_suffix(".log")

    def measured(self) -> dict | None:
        """Return the measurements, or None where there are none yet. Raises UserError for those of another trial."""
        file = self.folder / _MEASURED
        if not file.is_file():
            return None
        with reading(file, "a trial", KeyError, TypeError, advice=f"remove {self.folder} to have it made again"):
            there = json.loads(file.read_text(encoding="utf-8"))
            settings, measured = there["settings"], there["measured"]
        if settings != self.settings:
            raise UserError(
                f"{self.folder} is a run of another study, which differs in "
                f"{differences(settings, self.settings)}; choose another --workdir, or delete it."
            )
        return measured

    def run(self, threads: int) -> dict:
        """Train and measure, in a process that ends with its parent; what is printed goes to the log.

        Return the "accuracy" on the evaluation split, its "curve" [[step, accuracy], …], "few_shot" and "seconds".
        """
        threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with _printed_to(self.log):
            begin = time.monotonic()
            measured = self._trained() | {"seconds": round(time.monotonic() - begin, 1)}
        content = {"settings": self.settings, "measured": measured}
        write_text(self.folder / _MEASURED, json.dumps(content, indent=2) + "\n")
        return measured

    def _trained(self) -> dict:
        strategy, source = open_strategy(StrategyOptions("single")), open_source(self.data)
        subset = random_subset(source.train, self.point.train_images, self.seed)
        assert self.point.recipe.steps is not None  # see check_base
        every = -(-self.point.recipe.steps // self.point.evaluations)
        options = PretrainOptions(
            source=self.data,
            workdir=str(self.folder),
            recipe=self.point.recipe,
            seed=self.seed,
            execution=Execution(deterministic=True, evaluate_every=every),
        )
        run = pretrain(options, self.point.name, Setup(dataclasses.replace(source, train=subset), strategy))
        curve = [[record["step"], record["val_accuracy"]] for record in run.metrics()]
        few_shot = few_shot_accuracy(Run.open_directory(run.path).model, source, self.shots)
        return {"accuracy": curve[-1][1], "curve": curve, "few_shot": few_shot}


def few_shot_accuracy(model: keras.Model, source: DataSet, shots: int) -> float:
    """Return the mean over three choices of `shots` training images of each class.

    Features of no other image are computed.
    """
    labels, classes = _labels_of(source.train), len(source.labels)
    chosen = [shots_of(labels, classes, shots, seed) for seed in range(_CHOICES)]
    needed = np.unique(np.concatenate(chosen))
    train, evaluation = (
        computed_features(model, split, classes, _BATCH) for split in (source.train.take(needed), source.evaluation)
    )
    solved = [LeastSquares(train.take(np.searchsorted(needed, indices)), classes) for indices in chosen]
    return float(np.mean([solution.accuracy(evaluation, _L2) for solution in solved]))


def _labels_of(split: Split) -> np.ndarray:
    data = tf.data.Dataset.range(split.num_examples).map(lambda index: split.read(index)[1])
    return np.concatenate([batch.numpy() for batch in data.batch(1024)]).astype(np.int64)


@contextlib.contextmanager
def _printed_to(file: pathlib.Path) -> Iterator[None]:
    """Write to a file all that this process prints, TensorFlow's C++ too."""
    sys.stdout.flush()
    with open(file, "ab") as log:
        before = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, old in zip((1, 2), before, strict=True):
            os.dup2(old, number)
            os.close(old)


def _die_with(parent: int) -> None:
    """End with a study that was killed: no run would go on beside its successor."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


# All runs


def _measured(trials: Sequence[Trial], jobs: int | None) -> dict[pathlib.Path, dict]:
    """Return the measurements of every trial by its folder, made before or now."""
    known = {trial.folder: measured for trial in trials if (measured := trial.measured())}
    missing = [trial for trial in trials if trial.folder not in known]
    if known:
        print(f"{len(known)} of {len(trials)} runs are finished already.")
    if missing:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if jobs is None:
            jobs = 1 if tf.config.list_physical_devices("GPU") else min(cores, _MOST_JOBS)
        jobs = min(jobs, len(missing))
        known |= _run_all(missing, jobs, max(cores // jobs, 1))
    return known


def _run_all(trials: Sequence[Trial], jobs: int, threads: int) -> dict[pathlib.Path, dict]:
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    measured = {}
    try:
        running = {pool.submit(_in_own_process, trial, threads): trial for trial in trials}
        progress = tqdm.tqdm(concurrent.futures.as_completed(running), "Runs", len(running), unit="run", disable=None)
        for done in progress:
            trial = running[done]
            measured[trial.folder] = result = done.result()
            progress.write(
                f"{trial.folder.name}: accuracy {result['accuracy']:.1%}, {trial.shots}-shot {result['few_shot']:.1%}, "
                f"{result['seconds']:.0f} s"
            )
    except KeyboardInterrupt:  # the runs have had it, too, and save their states
        raise TrainingInterrupted from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return measured


def _in_own_process(trial: Trial, threads: int) -> dict:
    """Run a trial in a fresh process: TensorFlow gives no memory back, and threads are set once."""
    # max_tasks_per_child of one pool for all needs Python 3.11.
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(trial.run, threads).result()
    except (concurrent.futures.BrokenExecutor, UserError) as problem:
        why = f"the process was killed, perhaps because memory ran out; its log is {trial.log}: repeat the command to "
        why = str(problem) if isinstance(problem, UserError) else f"{why}continue, with fewer --jobs."
        raise UserError(f"{trial.folder.name}: {why}") from problem


# The report


def _row(point: Point, num_classes: int, measured: Sequence[dict]) -> dict:
    """Return a point of the table: means and 95% intervals over the seeds."""
    recipe = point.recipe
    cost = costs(recipe.model, recipe.image_size, num_classes=num_classes, channels=recipe.channels)
    curves = np.array([each["curve"] for each in measured])  # (seeds, evaluations, 2)
    return {
        "name": point.name,
        "line": point.line,
        "setting": point.setting,
        "train_images": point.train_images,
        "parameters": cost.parameters,
        "forward_flops": cost.flops,
        "training_flops": 3 * cost.flops * recipe.num_steps(point.train_images) * recipe.batch_size,
        "accuracy": mean_and_interval([each["accuracy"] for each in measured]),
        "few_shot": mean_and_interval([each["few_shot"] for each in measured]),
        "curve": [[int(step), float(value)] for step, value in curves.mean(axis=0)],
    }


def mean_and_interval(values: Sequence[float]) -> dict:
    """Return the values of several seeds, their mean, and its 95% interval by Student's t; None of a single one."""
    return {"values": values, "mean": float(np.mean(values)), "interval": of_mean(values) if len(values) > 1 else None}


def _report(name: str, options: StudyOptions, rows: Sequence[dict], folder: pathlib.Path) -> None:
    definition, recipe, data = STUDIES[name], options.recipe, options.source.data
    results = {"study": name, "data": data, "recipe": dataclasses.asdict(recipe), "rows": rows}
    write_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    with atomic_write(folder / "figure.png") as temporary:
        draw(name, definition.title, short_name(data), options.shots, rows, temporary)
    header = ("", "setting", "parameters", "forward FLOPs", "accuracy, %", f"{options.shots}-shot, %")
    cells = []
    for row in rows:
        counts = (f"{row[measure]:,}" for measure in ("parameters", "forward_flops"))
        scores = (_percent(row[measure]) for measure in ("accuracy", "few_shot"))
        cells.append((row["line"], row["setting"], *counts, *scores))
    table = markdown_table(header, cells)
    page = (
        f"# {definition.title}\n\nAfter {definition.source}, on {short_name(data)}: every "
        f"model from scratch, {recipe.steps:,} steps of {recipe.batch_size} images, {options.seeds} seeds. Accuracy "
        f"on all evaluation images, and of least squares on the frozen features of {options.shots} training images of "
        f"each class; means{' and 95% intervals over the seeds' if options.seeds > 1 else ''}.\n\n{table}\n\n"
        f"![{definition.title}](figure.png)\n"
    )
    write_text(folder / "results.md", page)
    print(f"{table}\nReport in {folder / 'results.md'}.")


def _percent(summary: dict) -> str:
    if summary["interval"] is None:
        return f"{100 * summary['mean']:.2f}"
    return f"{100 * summary['mean']:.2f} ± {100 * (summary['interval'][1] - summary['mean']):.2f}"

"""One run of a study, in a process of its own: trained, or found trained, and measured."""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf

from keras_vit import UserError, preprocessing_of
from keras_vit.errors import reading
from keras_vit.files.atomic import write_text
from keras_vit.run import Run, differences
from training.data.dataset import DataSet, Split, random_subset
from training.data.sources import open_source
from training.evaluation.predictors import outputs
from training.experiments.grids import Point
from training.features.extractors import feature_extractor
from training.loop.devices.strategies import open_strategy
from training.loop.pretrain import pretrain
from training.loop.setup import Setup
from training.options.common import DataOptions, Execution, StrategyOptions
from training.options.train import PretrainOptions
from training.probes.features import Features
from training.probes.least_squares import LeastSquares, shots_of

MEASURED = "trial.json"
# big_vision's penalty, and how many random choices of the shots one accuracy is a mean over.
_L2, _CHOICES = 1024.0, 3
_BATCH = 500


@dataclasses.dataclass(frozen=True)
class Trial:
    """A point of a study for one seed."""

    point: Point
    seed: int
    data: DataOptions
    shots: int
    folder: pathlib.Path
    """The run directory."""

    @property
    def settings(self) -> dict:
        """Return the settings that decide its numbers, as read from JSON."""
        settings = {name: value for name, value in dataclasses.asdict(self).items() if name != "folder"}
        return json.loads(json.dumps(settings | {"data": self.data.settings()}))

    def measured(self) -> dict | None:
        """Return the measurements, or None where there are none yet. Raises UserError for those of another trial."""
        file = self.folder / MEASURED
        if not file.is_file():
            return None
        with reading(file, "a trial", KeyError, TypeError, advice=f"remove {self.folder} to have it made again"):
            there = json.loads(file.read_text(encoding="utf-8"))
            settings, found = there["settings"], there["measured"]
        if settings != self.settings:
            raise UserError(
                f"{self.folder} is a run of another study, which differs in "
                f"{differences(settings, self.settings)}; choose another --workdir, or delete it."
            )
        return found


def run_trial(trial: Trial, threads: int) -> dict:
    """Train and measure, in a process that ends with its parent; what is printed goes to a .log beside the directory.

    Args:
        threads: of TensorFlow's operators.

    Returns:
        "accuracy" on the evaluation split, "curve" [[step, accuracy], …], "few_shot" accuracy, "seconds".
    """
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    trial.folder.parent.mkdir(parents=True, exist_ok=True)
    with _printed_to(trial.folder.with_suffix(".log")):
        begin = time.monotonic()
        found = _trained(trial) | {"seconds": round(time.monotonic() - begin, 1)}
    write_text(trial.folder / MEASURED, json.dumps({"settings": trial.settings, "measured": found}, indent=2) + "\n")
    return found


def _trained(trial: Trial) -> dict:
    recipe, point = trial.point.recipe, trial.point
    strategy = open_strategy(StrategyOptions("single"))
    source = open_source(trial.data)
    subset = random_subset(source.train, point.train_images, trial.seed)
    assert recipe.steps is not None  # see check_base
    arguments = PretrainOptions(
        source=trial.data,
        workdir=str(trial.folder),
        recipe=recipe,
        seed=trial.seed,
        execution=Execution(deterministic=True, evaluate_every=-(-recipe.steps // point.evaluations)),
    )
    setting = Setup(dataclasses.replace(source, train=subset), strategy)
    run = pretrain(arguments, point.name, setting)
    curve = [[record["step"], record["val_accuracy"]] for record in run.metrics()]
    few_shot = few_shot_accuracy(Run.open_directory(run.path).model, source, trial.shots)
    return {"accuracy": curve[-1][1], "curve": curve, "few_shot": few_shot}


def few_shot_accuracy(model: keras.Model, source: DataSet, shots: int) -> float:
    """Mean over three choices of `shots` training images of each class; features of no other image are computed."""
    labels = labels_of(source.train)
    classes = len(source.labels)
    chosen = [shots_of(labels, classes, shots, seed) for seed in range(_CHOICES)]
    needed = np.unique(np.concatenate(chosen))
    extractor, preprocessing = feature_extractor(model), preprocessing_of(model)
    train, evaluation = (
        Features(*outputs(extractor.predict_on_batch, split, preprocessing, num_classes=classes, batch_size=_BATCH))
        for split in (source.train.take(needed), source.evaluation)
    )
    accuracies = []
    for indices in chosen:
        rows = np.searchsorted(needed, indices)
        squares = LeastSquares(train.values[rows], train.labels[rows], classes)
        accuracies.append(squares.accuracy(evaluation, _L2))
    return float(np.mean(accuracies))


def labels_of(split: Split) -> np.ndarray:
    """The label of every example, (n,) int64."""
    data = tf.data.Dataset.range(split.num_examples).map(lambda index: split.read(index)[1])
    return np.concatenate([batch.numpy() for batch in data.batch(1024)]).astype(np.int64)


@contextlib.contextmanager
def _printed_to(file: pathlib.Path):
    """All that this process prints, TensorFlow's C++ too."""
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
    """A study that was killed leaves no run behind that would go on beside its successor."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)

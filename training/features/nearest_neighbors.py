"""The vote of the nearest neighbors among features, for `keras-vit knn` and while a model trains without labels.

`training/knn.py` has its sources.
"""

import json
import math
from collections.abc import Sequence

import keras
import numpy as np
import sklearn.neighbors

from keras_vit.files.atomic import write_text
from keras_vit.files.npz import read_npz, write_npz
from keras_vit.run import Run
from training.data.dataset import check_several_classes, random_subset
from training.data.sources import DataSet
from training.features.probe import Features, computed_features, open_features, write_report
from training.loop.build import trained_model
from training.options.features import KnnOptions

# Training and evaluation images that are compared during a training, at most, and images per forward pass.
_MOST_IMAGES, _BATCH = (5_000, 2_000), 256
_NEIGHBORS = 20
_WORSE = 2.0  # standard errors below the best measurement from which on features count as worse


def knn(run: Run, source: DataSet, options: KnnOptions) -> list[dict]:
    """Evaluate, write knn.json and knn.md, and return the rows."""
    features = open_features(run, source, options)
    count = len(features.train.labels)
    fitting = [number for number in options.neighbors if number <= count] or [count]
    if left_out := [str(number) for number in options.neighbors if number > count]:
        print(f"Left out: {' and '.join(left_out)} neighbors, because there are only {count:,} training images.")
    rows = nearest_neighbors(
        features.train, features.evaluation, len(features.names), neighbors=fitting, temperature=options.temperature
    )
    table = [{"neighbors": str(row["neighbors"]), "accuracy": f"{row['accuracy']:.1%}"} for row in rows]
    numbers = {"temperature": options.temperature, "results": rows}
    write_report("knn", "Nearest neighbors", options, features, table, numbers)
    return rows


def nearest_neighbors(
    train: Features, evaluation: Features, num_classes: int, *, neighbors: Sequence[int], temperature: float = 0.07
) -> list[dict]:
    """Return the accuracy on the evaluation features for each number of neighbors: `neighbors`, `accuracy`."""
    index = sklearn.neighbors.NearestNeighbors(n_neighbors=max(neighbors), metric="cosine").fit(train.values)
    distances, rows = index.kneighbors(evaluation.values)  # (n, most neighbors), the nearest first
    # The nearest has weight 1: exp(1 / temperature) itself may overflow.
    votes = np.exp((distances[:, :1] - distances) / temperature)
    results = []
    for number in neighbors:
        scores = np.zeros((len(rows), num_classes))
        np.add.at(scores, (np.arange(len(rows))[:, None], train.labels[rows[:, :number]]), votes[:, :number])
        results.append({"neighbors": number, "accuracy": float(np.mean(scores.argmax(-1) == evaluation.labels))})
    return results


class WatchFeatures(keras.callbacks.Callback):
    """Measures the features by nearest neighbors before the first step, every few epochs, and after the last step.

    Writes all measurements to knn.json of the run directory. When one lies more than two standard errors below the
    best, training stops, and the weights become those of the best, which best_features.npz keeps until then. Both files
    are continued when an interrupted run is, so it stops at the same step. Of large splits a random part is measured.
    """

    def __init__(self, source: DataSet, run: Run, every: int | None):
        super().__init__()
        check_several_classes(source)
        self._classes, self._every = len(source.labels), every
        self._splits = [
            random_subset(split, min(split.num_examples, most), seed=0)
            for split, most in zip((source.train, source.evaluation), _MOST_IMAGES, strict=True)
        ]
        self._file, self._best_file = run.path / "knn.json", run.path / "best_features.npz"
        self._measurements: list[dict] = []

    def on_train_begin(self, logs=None):
        if self._file.is_file():  # what was measured behind the checkpoint is measured again
            self._measurements = [row for row in json.loads(self._file.read_text()) if row["step"] <= self._step]
        if not self._measurements:
            self._measure("before training")

    def on_epoch_end(self, epoch, logs=None):
        if self._every is not None and (epoch + 1) % self._every == 0:
            self._measure(f"epoch {epoch + 1}")
            if self._is_worse():
                print("The features got worse, so the run stops here and keeps the best weights.")
                self.model.stop_training = True

    def on_train_end(self, logs=None):
        if self._measurements[-1]["step"] != self._step:
            self._measure("after training")
        before, last = self._measurements[0], self._measurements[-1]
        if self._is_worse():
            best = self._best()
            if self._best_file.is_file():
                for variable, value in zip(self._variables(), read_npz(self._best_file).values(), strict=True):
                    variable.assign(value)
            print(f"Kept the best weights ({best['when']}): {best['accuracy']:.1%}.")
        self._best_file.unlink(missing_ok=True)
        print(
            f"Accuracy of {_NEIGHBORS} nearest neighbors: {before['accuracy']:.1%} before, {last['accuracy']:.1%} now."
        )

    @property
    def _step(self) -> int:
        return int(np.array(self.model.step))

    def _measure(self, when: str) -> None:
        model = trained_model(self.model)
        train, evaluation = (computed_features(model, split, self._classes, _BATCH) for split in self._splits)
        (row,) = nearest_neighbors(train, evaluation, self._classes, neighbors=[min(_NEIGHBORS, len(train.labels))])
        row |= {"step": self._step, "when": when}
        self._measurements.append(row)
        print(f"Accuracy of {row['neighbors']} nearest neighbors, {when}: {row['accuracy']:.1%}.")
        if self._best() is row:
            write_npz(self._best_file, {f"{i:05d}": np.array(v) for i, v in enumerate(self._variables())})
        write_text(self._file, json.dumps(self._measurements, indent=2) + "\n")

    def _best(self) -> dict:
        return max(self._measurements, key=lambda row: row["accuracy"])

    def _is_worse(self) -> bool:
        best, last = self._best()["accuracy"], self._measurements[-1]["accuracy"]
        return best - last > _WORSE * math.sqrt(best * (1.0 - best) / self._splits[1].num_examples)

    def _variables(self) -> list[keras.Variable]:
        """Return the variables that `trained_model` saves: the weights, and their averages if there are some."""
        return [*self.model.network.trainable_variables, *self.model.ema]

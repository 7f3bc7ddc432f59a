"""Regularized least squares in closed form on features of a few images of each class; see training/fewshot.py."""

import contextlib
from collections.abc import Sequence

import numpy as np

from keras_vit import UserError
from keras_vit.run import Run
from training.data.sources import DataSet
from training.evaluation.metrics import fit_temperature
from training.features.probe import Features, FeatureSet, open_features, save_linear_model, write_report
from training.options.features import FewshotOptions

# So large that the bias is almost unregularized (big_vision).
_BIAS_FEATURE = 100.0
_STD_FLOOR = 1e-5
USUAL_SHOTS = (1, 5, 10, 25)
# What scenic and uncertainty-baselines sweep.
SWEPT = tuple(2.0**power for power in range(-10, 20))
# Images at most on which a swept strength is chosen.
_SELECTION = 10_000


class LeastSquares:
    """Ridge regression from features (n, D), standardized, to targets -1 and 1, for any strength of the penalty.

    The eigenvectors of X'X (D + 1 <= n) or XX' are computed once; a strength then costs one matrix product.
    """

    def __init__(self, train: Features, num_classes: int) -> None:
        values = train.values.astype(np.float64)
        self._mean = values.mean(axis=0)
        self._scale = values.std(axis=0) + _STD_FLOOR
        x = self._design(values)  # (n, D + 1)
        targets = 2.0 * np.eye(num_classes)[train.labels] - 1.0  # (n, K)
        if len(x) >= x.shape[1]:
            self._eigenvalues, vectors = np.linalg.eigh(x.T @ x)
            self._left, self._right = vectors, vectors.T @ (x.T @ targets)
        else:
            self._eigenvalues, vectors = np.linalg.eigh(x @ x.T)
            self._left, self._right = x.T @ vectors, vectors.T @ targets

    def weights(self, l2: float) -> np.ndarray:
        """Return (D + 1, K) float64; the last row belongs to the constant feature."""
        return (self._left / (self._eigenvalues + l2)) @ self._right

    def scores(self, features: np.ndarray, l2: float) -> np.ndarray:
        """Return (n, K) float64 of features (n, D), near 1 for the class and near -1 for the others."""
        return self._design(features.astype(np.float64)) @ self.weights(l2)

    def accuracy(self, features: Features, l2: float) -> float:
        """Return share of the images whose highest score is that of their label."""
        return float(np.mean(np.argmax(self.scores(features.values, l2), axis=-1) == features.labels))

    def linear_head(self, l2: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the kernel (D, K) and bias (K,), float32, that compute the scores from the features."""
        weights = self.weights(l2)
        kernel = weights[:-1] / self._scale[:, None]
        bias = _BIAS_FEATURE * weights[-1] - self._mean @ kernel
        return kernel.astype(np.float32), bias.astype(np.float32)

    def _design(self, features: np.ndarray) -> np.ndarray:
        standardized = (features - self._mean) / self._scale
        return np.pad(standardized, ((0, 0), (0, 1)), constant_values=_BIAS_FEATURE)


def shots_of(labels: np.ndarray, num_classes: int, shots: int, seed: int) -> np.ndarray:
    """Return numbers of the images to learn from: the first `shots` of a random order of each class (big_vision's)."""
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(np.flatnonzero(labels == k)) for k in range(num_classes)]
    return np.concatenate([order[:shots] for order in orders])


def few_shot(
    train: Features,
    evaluation: Features,
    num_classes: int,
    *,
    shots: Sequence[int] = USUAL_SHOTS,
    seeds: int = 3,
    strengths: Sequence[float] = (1024.0,),
) -> list[dict]:
    """Return for each number of shots the accuracy on the evaluation features: `shots`, `l2`, `accuracies` by seed,
    `mean`, `std`.

    Of several strengths the one of the best mean accuracy over the seeds, on training images that are not among the
    shots, is taken for each number of shots.
    """
    results = []
    for number in shots:
        chosen = [shots_of(train.labels, num_classes, number, seed) for seed in range(seeds)]
        solved = [LeastSquares(train.take(rows), num_classes) for rows in chosen]
        l2 = strengths[0]
        if len(strengths) > 1:
            held_out = [_held_out(train, rows, seed) for seed, rows in enumerate(chosen)]
            pairs = list(zip(solved, held_out, strict=True))
            means = [np.mean([each.accuracy(rest, strength) for each, rest in pairs]) for strength in strengths]
            l2 = strengths[int(np.argmax(means))]
        accuracies = [solution.accuracy(evaluation, l2) for solution in solved]
        mean, deviation = float(np.mean(accuracies)), float(np.std(accuracies))
        results.append({"shots": number, "l2": l2, "accuracies": accuracies, "mean": mean, "std": deviation})
    return results


def shots_that_fit(labels: np.ndarray, names: Sequence[str], shots: Sequence[int] | None = None) -> Sequence[int]:
    """Return numbers of shots that every class has: those given, else the usual ones, and print which are left out.

    Raises UserError for a class with fewer training images than the shots given, or with none.
    """
    counts = np.bincount(labels, minlength=len(names))
    rarest = int(np.argmin(counts))
    fitting = [number for number in shots or USUAL_SHOTS if number <= counts[rarest]]
    left_out = " or ".join(str(number) for number in shots or USUAL_SHOTS if number > counts[rarest])
    if left_out and (shots or not fitting):
        enough = f"--shots {' '.join(map(str, fitting))}, or more images" if fitting else "it more images"
        raise UserError(
            f"The class {names[rarest]!r} has {counts[rarest]} training images, fewer than the {left_out} shots; give "
            f"{enough}."
        )
    if left_out:
        print(f"No {left_out} shots: the class {names[rarest]!r} has {counts[rarest]} training images.")
    return fitting


def _held_out(train: Features, rows: np.ndarray, seed: int) -> Features:
    """Return training images that are not among the shots."""
    rest = np.setdiff1d(np.arange(len(train.labels)), rows)
    if not len(rest):
        raise UserError("All training images are among the shots, so none is left to choose a strength on; give --l2.")
    if len(rest) > _SELECTION:
        rest = np.sort(np.random.default_rng(seed).choice(rest, _SELECTION, replace=False))
    return train.take(rest)


def fewshot(run: Run, source: DataSet, options: FewshotOptions) -> list[dict]:
    """Evaluate, write fewshot.json and fewshot.md, with a workdir also the run, and return the rows."""
    features = open_features(run, source, options)
    rows = few_shot(
        features.train,
        features.evaluation,
        len(features.names),
        shots=shots_that_fit(features.train.labels, features.names, options.shots),
        seeds=options.seeds,
        strengths=SWEPT if options.sweep else (options.l2,),
    )
    table = [
        {"shots": str(row["shots"])}
        | {f"seed {seed}": f"{value:.4f}" for seed, value in enumerate(row["accuracies"])}
        | {"mean": f"{row['mean']:.4f}", "std": f"{row['std']:.4f}", "L2": f"{row['l2']:g}"}
        for row in rows
    ]
    if options.workdir is not None:
        _save(run, source, options, features, rows[-1])
    write_report("fewshot", "Few-shot linear accuracy", options, features, table, {"results": rows})
    return rows


def _save(run: Run, source: DataSet, options: FewshotOptions, features: FeatureSet, row: dict) -> None:
    """Write the run directory of a row's model: the backbone with the solution of the first seed as its head.

    Its scores are near 1 and -1, so that their softmax would say little; they are divided by the temperature that fits
    the training images outside the shots.
    """
    train = features.train
    rows = shots_of(train.labels, len(features.names), row["shots"], seed=0)
    solution = LeastSquares(train.take(rows), len(features.names))
    kernel, bias = solution.linear_head(row["l2"])
    rest = np.setdiff1d(np.arange(len(train.labels)), rows)
    temperature = 1.0
    with contextlib.suppress(UserError):  # none left, or no mistake among them
        temperature = fit_temperature(solution.scores(train.values[rest], row["l2"]), train.labels[rest])
    save_linear_model(run, source, options, (kernel / temperature, bias / temperature), row["accuracies"][0])
    print(f"{options.directory} holds the model of {row['shots']} shots and the first seed.")

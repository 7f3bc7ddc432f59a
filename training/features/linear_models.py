"""Linear models on frozen features: least squares on a few images of each class, and logistic regression.

`training/fewshot.py` and `training/linear_probe.py` have their sources.
"""

import concurrent.futures
import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import sklearn.exceptions
import sklearn.linear_model
import sklearn.model_selection
import sklearn.pipeline
import sklearn.preprocessing
import threadpoolctl

from keras_vit import UserError
from keras_vit.errors import explained
from keras_vit.files.atomic import write_text
from keras_vit.run import SPLIT, Run
from training.data.sources import DataSet
from training.evaluation.intervals import of_mean, of_share
from training.evaluation.metrics import fit_temperature
from training.features.attentive import attentive_accuracy
from training.features.extraction import open_extractor
from training.features.probe import (
    Features,
    FeatureSet,
    cached_features,
    measured_model,
    open_features,
    save_linear_model,
    write_report,
)
from training.options.features import FewshotOptions, LinearProbeOptions

_BIAS_FEATURE = 100.0  # so large that the bias is almost unregularized (big_vision)
_STD_FLOOR = 1e-5
USUAL_SHOTS = (1, 5, 10, 25)
SWEPT = tuple(2.0**power for power in range(-10, 20))  # what scenic and uncertainty-baselines sweep
_SELECTION = 10_000  # images at most on which a swept strength of least squares is chosen
_HELD_OUT = 0.1  # share of the images on which a strength of logistic regression is chosen
# A tenth of few images is a matter of luck, so several are drawn, but no more than that many images are fitted to.
_MOST_REPEATS, _MOST_FITTED = 10, 10_000
_FOLDS = 5  # of the probabilities out of fold, and of the comparison with a split image by image
_MOST_COMPARED, _C = 2000, 0.1  # of that comparison: images at most, and the inverse strength of the penalty


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
        print(f"Left out: {left_out} shots, because {names[rarest]!r} has only {counts[rarest]} training images.")
    return fitting


def _held_out(train: Features, rows: np.ndarray, seed: int) -> Features:
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
        | {f"seed {seed}": f"{value:.1%}" for seed, value in enumerate(row["accuracies"])}
        | {"mean": f"{row['mean']:.1%}", "std": f"{row['std']:.2%}", "L2": f"{row['l2']:g}"}
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
    print(f"{options.directory} contains the model that {row['shots']} shots with the first seed gave.")


# Logistic regression


def new_probe(c: float, max_iterations: int = 1000) -> sklearn.pipeline.Pipeline:
    """Return standardization with logistic regression, to be fitted. c: inverse strength of the penalty."""
    return sklearn.pipeline.make_pipeline(
        sklearn.preprocessing.StandardScaler(), sklearn.linear_model.LogisticRegression(C=c, max_iter=max_iterations)
    )


def one_thread() -> threadpoolctl.threadpool_limits:
    """Return a context in which a probe is fitted by one thread of BLAS.

    Several wait for each other in every one of many small products, ten times as long as these take.
    """
    return threadpoolctl.threadpool_limits(1, user_api="blas")


@contextlib.contextmanager
def quiet_fits() -> Iterator[None]:
    """Fit with one thread, and without warnings of fits that end early and of classes that some folds do not have."""
    with warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        warnings.filterwarnings("ignore", "The least populated class")
        yield


def fit_probe(
    train: Features, strengths: Sequence[float], max_iterations: int = 1000
) -> tuple[sklearn.pipeline.Pipeline, dict]:
    """Return the probe fitted on all training features, and `c`, `iterations`, `converged`, and what was `tried`.

    Of several strengths that with the best held-out accuracy is taken; the middle one of too few images.
    """
    tried = []
    if len(strengths) > 1:
        labels = train.labels
        repeats = max(min(_MOST_REPEATS, _MOST_FITTED // len(train.labels)), 1)
        splits = sklearn.model_selection.StratifiedShuffleSplit(repeats, test_size=_HELD_OUT, random_state=0)
        try:
            parts = list(splits.split(train.values, labels))
        except ValueError:  # a class has one image, or a tenth has not one of each: leave out any, of classes that stay
            drawn = sklearn.model_selection.ShuffleSplit(repeats, test_size=_HELD_OUT, random_state=0).split(labels)
            parts = [(rows, held_out[np.isin(labels[held_out], labels[rows])]) for rows, held_out in drawn]
            parts = [part for part in parts if len(part[1]) and len(np.unique(labels[part[0]])) > 1]
        for c in strengths if parts else ():
            scores = []
            for rows, held_out in parts:
                fitted, _ = _fitted(train.take(rows), c, max_iterations)
                scores.append(fitted.score(train.values[held_out], labels[held_out]))
            tried.append({"c": c, "held_out_accuracy": float(np.mean(scores))})
    best = max(tried, key=lambda row: row["held_out_accuracy"])["c"] if tried else strengths[len(strengths) // 2]
    fitted, converged = _fitted(train, best, max_iterations)
    iterations = int(max(fitted[-1].n_iter_))
    return fitted, {"c": best, "iterations": iterations, "converged": converged, "tried": tried}


def _fitted(train: Features, c: float, max_iterations: int) -> tuple[sklearn.pipeline.Pipeline, bool]:
    new = new_probe(c, max_iterations)
    with warnings.catch_warnings(record=True) as caught, one_thread():
        warnings.simplefilter("always", sklearn.exceptions.ConvergenceWarning)
        new.fit(train.values.astype(np.float64), train.labels)
    return new, not any(issubclass(warning.category, sklearn.exceptions.ConvergenceWarning) for warning in caught)


def cross_validated(features: Features, c: float, folds: int, groups: np.ndarray) -> dict:
    """Return the accuracy in folds of all images: `mean`, its `standard_error`, 95% `interval`, and `folds`.

    c: inverse strength of the penalty. groups: (n,); images of one group are in one fold.
    """
    values, labels = features.values.astype(np.float64), features.labels
    splits = sklearn.model_selection.StratifiedGroupKFold(folds, shuffle=True, random_state=0)
    sentence = "--folds {} cannot be made of these images ({}); give fewer, or images of more groups."
    with quiet_fits(), explained(lambda why: sentence.format(folds, why), ValueError):
        scores = sklearn.model_selection.cross_val_score(
            new_probe(c), values, labels, groups=groups, cv=splits, error_score="raise"
        )
    mean, error = float(scores.mean()), float(scores.std(ddof=1) / folds**0.5)
    interval = np.clip(of_mean(scores), 0.0, 1.0).tolist()
    if np.ptp(scores) == 0.0:  # then Student's interval is a point
        interval = of_share(round(mean * len(labels)), len(labels))
    return {"mean": mean, "standard_error": error, "interval": interval, "folds": folds}


def note_split(run: Run | None, source: DataSet, backbone: Run, features: Features | None = None) -> None:
    """Print what the groups of the data change, and write it into the run, if there is one, for its report.

    Nothing where each image is alone, where the model has no features, and where there are too few images. The frozen
    features of the backbone are given, of the training and then the evaluation images, or computed for some images.
    """
    if source.groups is None or source.multi_label:
        return
    numbers, groups = np.unique(source.groups, return_inverse=True)
    order = np.random.default_rng(0).permutation(len(numbers))[groups]
    rows = np.sort(np.argsort(order, kind="stable")[:_MOST_COMPARED])  # of whole groups, but for the last
    try:
        some = _features_of(backbone, source, rows) if features is None else features.take(rows)
        folds = groups[rows], np.arange(len(rows))
        grouped, by_image = (cross_validated(some, _C, _FOLDS, of_image)["mean"] for of_image in folds)
    except UserError:
        return
    sentence = (
        f"{len(groups):,} images in {len(numbers):,} groups: a linear head on frozen features has an accuracy of "
        f"{grouped:.1%} grouped; {by_image:.1%} if drawn image by image."
    )
    print(sentence)
    facts = {"groups": len(numbers), "measured": len(rows), "grouped": grouped, "by_image": by_image}
    if run is not None:
        write_text(run.path / SPLIT, json.dumps({**facts, "sentence": sentence}, indent=2) + "\n")


def _features_of(backbone: Run, source: DataSet, rows: np.ndarray) -> Features:
    extractor, begin = open_extractor(backbone.model, backbone.preprocessing), source.train.num_examples
    parts = source.train.take(rows[rows < begin]), source.evaluation.take(rows[rows >= begin] - begin)
    return Features.of_all([cached_features(extractor, part) for part in parts if part.num_examples])


def out_of_fold_probabilities(
    values: np.ndarray, labels: np.ndarray, groups: np.ndarray, num_classes: int, c: float
) -> np.ndarray | None:
    """Return the probabilities (n, K) of each image by a head that was fitted to the others, in five folds.

    groups: (n,) numbers; images of one group, such as copies, are in one fold. c: inverse strength of the penalty.
    Returns None for images of which a fold would be empty, or all others of one class.
    """
    sizes = np.unique(labels, return_counts=True)[1]
    if len(sizes) < 2 or min(sizes.max(), len(np.unique(groups))) < _FOLDS:
        return None
    folds = sklearn.model_selection.StratifiedGroupKFold(_FOLDS, shuffle=True, random_state=0)
    with quiet_fits():
        splits = [*folds.split(values, labels, groups)]
    if any(len(np.unique(labels[rows])) < 2 or not len(held_out) for rows, held_out in splits):
        return None
    probabilities = np.zeros((len(labels), num_classes), np.float32)

    def fit(split: tuple[np.ndarray, np.ndarray]) -> None:
        rows, held_out = split
        head = new_probe(c, max_iterations=200).fit(values[rows], labels[rows])
        probabilities[np.ix_(held_out, head.classes_)] = head.predict_proba(values[held_out])

    with quiet_fits(), concurrent.futures.ThreadPoolExecutor(min(_FOLDS, os.cpu_count() or 1)) as pool:
        list(pool.map(fit, splits))
    return probabilities


def linear_head(probe: sklearn.pipeline.Pipeline) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel (D, K) and bias (K,), float32, that compute the logits of a fitted probe from the features.

    The probe computes ((x - mean) / scale) coef.T + intercept. Of two classes, scikit-learn has the logit of the second
    one alone; that of the first is 0.
    """
    scaler, regression = probe
    kernel = (regression.coef_ / scaler.scale_).T
    bias = regression.intercept_ - scaler.mean_ @ kernel
    if kernel.shape[1] == 1:
        kernel, bias = (np.concatenate([np.zeros_like(part), part], axis=-1) for part in (kernel, bias))
    return kernel.astype(np.float32), bias.astype(np.float32)


def probe(run: Run, source: DataSet, options: LinearProbeOptions) -> dict:
    """Evaluate, write linear_probe.json and linear_probe.md, with a workdir also the run, and return the results."""
    features = open_features(run, source, options)
    fitted, how = fit_probe(features.train, options.c, options.max_iterations)
    results = {"accuracy": float(fitted.score(features.evaluation.values, features.evaluation.labels)), **how}
    if options.workdir is not None:
        counts = np.bincount(features.train.labels, minlength=len(source.labels))
        if not counts.all():  # the probe would have no logit for it
            missing = source.labels[int(np.argmin(counts))]
            raise UserError(
                f"The class {missing!r} has no training image; give it more images, or remove it from the data."
            )
        save_linear_model(run, source, options, linear_head(fitted), results["accuracy"])
    every = Features.of_all([features.train, features.evaluation])
    if options.folds is not None:
        results["cross_validation"] = cross_validated(every, how["c"], options.folds, _copies(source))
    if options.attentive is not None:
        results["attentive"] = attentive_accuracy(measured_model(run, options), source, options)
    row = {
        "accuracy": f"{results['accuracy']:.1%}",
        "C": f"{results['c']:g}",
        "iterations": str(results["iterations"]),
        "converged": str(results["converged"]).lower(),
    }
    row |= {} if options.attentive is None else {"attentive probe": f"{results['attentive']:.1%}"}
    sentences = []
    if options.folds is not None:
        measured = results["cross_validation"]
        mean, (low, high) = measured["mean"], measured["interval"]
        interval = f"95% interval {100 * low:.1f} to {high:.1%}"
        sentences = [f"{options.folds}-fold cross-validation on all images: accuracy {mean:.1%} ({interval})."]
    write_report("linear_probe", "Logistic regression", options, features, [row], {"results": results}, sentences)
    if options.workdir is not None or options.folds is not None:
        note_split(None if options.workdir is None else Run.at(options.workdir), source, run, every)
    return results


def _copies(source: DataSet) -> np.ndarray:
    """Return numbers (n,) of the images of both splits, the same for those that belong together, or are copies."""
    if source.groups is not None:
        return source.groups
    if source.train.digests is not None and source.evaluation.digests is not None:
        return np.concatenate([source.train.digests, source.evaluation.digests])
    return np.arange(source.train.num_examples + source.evaluation.num_examples)

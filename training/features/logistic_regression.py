"""Logistic regression on features: a probe with a strength of the penalty that was chosen, and what heads that were
fitted to other images say of an image.
"""

import concurrent.futures
import os
import warnings
from collections.abc import Sequence

import numpy as np
import sklearn.exceptions
import sklearn.linear_model
import sklearn.model_selection
import sklearn.pipeline
import sklearn.preprocessing
import threadpoolctl
from scipy import stats

from keras_vit import UserError
from keras_vit.errors import explained
from keras_vit.run import Run
from training.data.sources import DataSet
from training.features.probe import Features, FeatureSet, open_features, save_linear_model, write_report
from training.options.features import LinearProbeOptions

_HELD_OUT = 0.1
# A tenth of few images is a matter of luck, so several are drawn, but no more than that many images are fitted to.
_MOST_REPEATS, _MOST_FITTED = 10, 10_000
# Of the probabilities out of fold.
_FOLDS = 5


def new_probe(c: float, max_iterations: int = 1000) -> sklearn.pipeline.Pipeline:
    """Return standardization with logistic regression, to be fitted. c: inverse strength of the penalty."""
    return sklearn.pipeline.make_pipeline(
        sklearn.preprocessing.StandardScaler(),
        sklearn.linear_model.LogisticRegression(C=c, max_iter=max_iterations),
    )


def one_thread() -> threadpoolctl.threadpool_limits:
    """Return a context in which a probe is fitted by one thread of BLAS.

    Several wait for each other in every one of many small products, ten times as long as these take.
    """
    return threadpoolctl.threadpool_limits(1, user_api="blas")


def fit_probe(
    train: Features, strengths: Sequence[float], max_iterations: int = 1000
) -> tuple[sklearn.pipeline.Pipeline, dict]:
    """Return the probe fitted on all training features, and `c`, `iterations`, `converged`, and what was `tried`.

    Of several strengths that with the best held-out accuracy is taken.
    """
    tried = []
    if len(strengths) > 1:
        repeats = max(min(_MOST_REPEATS, _MOST_FITTED // len(train.labels)), 1)
        splits = sklearn.model_selection.StratifiedShuffleSplit(repeats, test_size=_HELD_OUT, random_state=0)
        too_few = "The training images are too few to choose --c on a tenth of them ({}); give one --c."
        with explained(too_few.format, ValueError):
            parts = list(splits.split(train.values, train.labels))
        for c in strengths:
            scores = []
            for rows, held_out in parts:
                fitted, _ = _fitted(train.take(rows), c, max_iterations)
                scores.append(fitted.score(train.values[held_out], train.labels[held_out]))
            tried.append({"c": c, "held_out_accuracy": float(np.mean(scores))})
    best = max(tried, key=lambda row: row["held_out_accuracy"])["c"] if tried else strengths[0]
    fitted, converged = _fitted(train, best, max_iterations)
    iterations = int(max(fitted[-1].n_iter_))
    return fitted, {"c": best, "iterations": iterations, "converged": converged, "tried": tried}


def _fitted(train: Features, c: float, max_iterations: int) -> tuple[sklearn.pipeline.Pipeline, bool]:
    """Return a fitted probe, and whether its solver converged."""
    new = new_probe(c, max_iterations)
    with warnings.catch_warnings(record=True) as caught, one_thread():
        warnings.simplefilter("always", sklearn.exceptions.ConvergenceWarning)
        new.fit(train.values.astype(np.float64), train.labels)
    return new, not any(issubclass(warning.category, sklearn.exceptions.ConvergenceWarning) for warning in caught)


def cross_validated(features: FeatureSet, c: float, folds: int, groups: np.ndarray) -> dict:
    """Return the accuracy in folds of all images: `mean`, its `standard_error`, 95 % `interval`, and `folds`.

    c: inverse strength of the penalty. groups: (n,), of the training and then the evaluation images; those of one group
    are in one fold.
    """
    parts = features.train, features.evaluation
    values = np.concatenate([part.values for part in parts]).astype(np.float64)
    labels = np.concatenate([part.labels for part in parts])
    splits = sklearn.model_selection.StratifiedGroupKFold(folds, shuffle=True, random_state=0)
    sentence = "--folds {} cannot be made of these images ({}); give fewer."
    with warnings.catch_warnings(), one_thread(), explained(lambda why: sentence.format(folds, why), ValueError):
        # Of a class with fewer images than folds, some folds have none.
        warnings.filterwarnings("ignore", "The least populated class")
        scores = sklearn.model_selection.cross_val_score(new_probe(c), values, labels, groups=groups, cv=splits)
    mean, error = float(scores.mean()), float(scores.std(ddof=1) / folds**0.5)
    low, high = mean + error * stats.t.ppf([0.025, 0.975], folds - 1)
    interval = [max(float(low), 0.0), min(float(high), 1.0)]
    return {"mean": mean, "standard_error": error, "interval": interval, "folds": folds}


def out_of_fold_probabilities(
    values: np.ndarray, labels: np.ndarray, groups: np.ndarray, num_classes: int, c: float
) -> np.ndarray:
    """Return the probabilities (n, K) of each picture by a head that was fitted to the others, in five folds.

    groups: (n,) numbers; pictures of one group, such as copies, are in one fold. c: inverse strength of the penalty.
    """
    folds = sklearn.model_selection.StratifiedGroupKFold(_FOLDS, shuffle=True, random_state=0)
    probabilities = np.zeros((len(labels), num_classes), np.float32)

    def fit(split: tuple[np.ndarray, np.ndarray]) -> None:
        rows, held_out = split
        head = new_probe(c, max_iterations=200).fit(values[rows], labels[rows])
        probabilities[np.ix_(held_out, head.classes_)] = head.predict_proba(values[held_out])

    with warnings.catch_warnings(), one_thread():
        warnings.filterwarnings("ignore", "The least populated class")
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        with concurrent.futures.ThreadPoolExecutor(min(_FOLDS, os.cpu_count() or 1)) as pool:
            list(pool.map(fit, folds.split(values, labels, groups)))
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
    if options.folds is not None:
        results["cross_validation"] = cross_validated(features, how["c"], options.folds, _copies(source))
    row = {
        "accuracy": f"{results['accuracy']:.4f}",
        "C": f"{results['c']:g}",
        "iterations": str(results["iterations"]),
        "converged": str(results["converged"]).lower(),
    }
    write_report("linear_probe", "Logistic regression", options, features, [row], {"results": results})
    if options.folds is not None:
        mean, (low, high) = results["cross_validation"]["mean"], results["cross_validation"]["interval"]
        print(f"All images in {options.folds} folds: accuracy {mean:.1%}, 95 % interval {low:.1%} to {high:.1%}.")
    return results


def _copies(source: DataSet) -> np.ndarray:
    """Return numbers (n,) of the images of both splits, the same for copies of one file."""
    train, evaluation = source.train.digests, source.evaluation.digests
    if train is None or evaluation is None:
        return np.arange(source.train.num_examples + source.evaluation.num_examples)
    return np.concatenate([train, evaluation])

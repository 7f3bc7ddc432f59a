"""scikit-learn's logistic regression on features, with a strength of the penalty that was chosen."""

import warnings
from collections.abc import Sequence

import numpy as np
import sklearn.exceptions
import sklearn.model_selection
import sklearn.pipeline
import sklearn.preprocessing
from scipy import stats

from keras_vit import UserError
from keras_vit.run import Run
from training.data.sources import DataSet
from training.features.linear_head import new_probe, one_thread
from training.options.features import LinearProbeOptions
from training.probes.features import Features, FeatureSet, open_features, write_report
from training.probes.linear_model import linear_head, save_linear_model

_HELD_OUT = 0.1
# A tenth of few images is a matter of luck, so several are drawn, but no more than that many images are fitted to.
_MOST_REPEATS, _MOST_FITTED = 10, 10_000


def linear_probe(
    train: Features, evaluation: Features, strengths: Sequence[float], *, max_iterations: int = 1000
) -> dict:
    """`accuracy` on the evaluation features, the `c` taken, `iterations`, `converged`, and what was `tried`."""
    probe, found = fit_probe(train, strengths, max_iterations)
    return {"accuracy": float(probe.score(evaluation.values, evaluation.labels)), **found}


def fit_probe(
    train: Features, strengths: Sequence[float], max_iterations: int = 1000
) -> tuple[sklearn.pipeline.Pipeline, dict]:
    """The probe fitted on all training features, and how; of several strengths that with the best held-out accuracy."""
    tried = []
    if len(strengths) > 1:
        counts = np.bincount(train.labels)
        if min(counts[counts > 0]) < 2 or len(train.labels) * _HELD_OUT < np.count_nonzero(counts):
            raise UserError(
                f"The {len(train.labels)} training images are too few to hold a tenth of them out in every class, on "
                "which --c is chosen; give one --c."
            )
        repeats = max(min(_MOST_REPEATS, _MOST_FITTED // len(train.labels)), 1)
        splits = sklearn.model_selection.StratifiedShuffleSplit(repeats, test_size=_HELD_OUT, random_state=0)
        for c in strengths:
            scores = []
            for rows, held_out in splits.split(train.values, train.labels):
                probe, _ = _fitted(train.values[rows], train.labels[rows], c, max_iterations)
                scores.append(probe.score(train.values[held_out], train.labels[held_out]))
            tried.append({"c": c, "held_out_accuracy": float(np.mean(scores))})
    best = max(tried, key=lambda row: row["held_out_accuracy"])["c"] if tried else strengths[0]
    probe, converged = _fitted(train.values, train.labels, best, max_iterations)
    iterations = int(max(probe[-1].n_iter_))
    return probe, {"c": best, "iterations": iterations, "converged": converged, "tried": tried}


def cross_validated(features: FeatureSet, c: float, folds: int, groups: np.ndarray) -> dict:
    """Accuracy in stratified folds of all images: `mean`, its `standard_error`, 95 % `interval`, and `folds`.

    Args:
        features: of both splits.
        c: inverse strength of the penalty.
        folds: their number.
        groups: (n,), of the training and then the evaluation images; those of one group are in one fold.
    """
    parts = features.train, features.evaluation
    values = np.concatenate([part.values for part in parts]).astype(np.float64)
    labels = np.concatenate([part.labels for part in parts])
    largest = int(np.bincount(labels).max())
    if largest < folds:
        raise UserError(f"No class has {folds} images, as --folds {folds} needs; give --folds {largest} or fewer.")
    splits = sklearn.model_selection.StratifiedGroupKFold(folds, shuffle=True, random_state=0)
    with warnings.catch_warnings(), one_thread():
        # Of a class with fewer images than folds, some folds have none.
        warnings.filterwarnings("ignore", "The least populated class")
        scores = sklearn.model_selection.cross_val_score(new_probe(c), values, labels, groups=groups, cv=splits)
    mean, error = float(scores.mean()), float(scores.std(ddof=1) / folds**0.5)
    low, high = mean + error * stats.t.ppf([0.025, 0.975], folds - 1)
    interval = [max(float(low), 0.0), min(float(high), 1.0)]
    return {"mean": mean, "standard_error": error, "interval": interval, "folds": folds}


def _fitted(
    values: np.ndarray, labels: np.ndarray, c: float, max_iterations: int
) -> tuple[sklearn.pipeline.Pipeline, bool]:
    """Return standardization with logistic regression, fitted, and whether its solver converged."""
    probe = new_probe(c, max_iterations)
    with warnings.catch_warnings(record=True) as caught, one_thread():
        warnings.simplefilter("always", sklearn.exceptions.ConvergenceWarning)
        probe.fit(values.astype(np.float64), labels)
    return probe, not any(issubclass(warning.category, sklearn.exceptions.ConvergenceWarning) for warning in caught)


def probe(run: Run, source: DataSet, options: LinearProbeOptions) -> dict:
    """Evaluate, write linear_probe.json and linear_probe.md, with a workdir also the run, and return the results."""
    features = open_features(run, source, options)
    fitted, how = fit_probe(features.train, options.c, options.max_iterations)
    results = {"accuracy": float(fitted.score(features.evaluation.values, features.evaluation.labels)), **how}
    if options.workdir is not None:
        _check_all_classes(features.train, source)
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
    """Numbers (n,) of the images of both splits, the same for copies of one file."""
    numbers = np.arange(source.train.num_examples + source.evaluation.num_examples)
    digests = [split.digests for split in (source.train, source.evaluation) if split.digests is not None]
    return np.concatenate(digests) if len(digests) == 2 else numbers


def _check_all_classes(train: Features, source: DataSet) -> None:
    """Raise UserError if a class has no training image: the probe would have no logit for it."""
    counts = np.bincount(train.labels, minlength=len(source.labels))
    if not counts.all():
        missing = source.labels[int(np.argmin(counts))]
        raise UserError(
            f"The class {missing!r} has no training image; give it more images, or remove it from the data."
        )

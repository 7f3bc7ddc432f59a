"""scikit-learn's logistic regression on features, with a strength of the penalty that was chosen."""

import warnings
from collections.abc import Sequence

import numpy as np
import sklearn.exceptions
import sklearn.linear_model
import sklearn.model_selection
import sklearn.pipeline
import sklearn.preprocessing

from keras_vit import UserError
from keras_vit.files.remote import to_path
from keras_vit.runs import Run
from training.input.sources import Source
from training.options.probes import LinearProbeOptions
from training.probes.classifier import linear_head, save_probe, with_linear_head
from training.probes.features import Features, open_features, preprocessing_for
from training.probes.report import write_report

_HELD_OUT = 0.1


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
        rows, held_out = sklearn.model_selection.train_test_split(
            np.arange(len(train.labels)), test_size=_HELD_OUT, stratify=train.labels, random_state=0
        )
        for c in strengths:
            probe, _ = _fitted(train.values[rows], train.labels[rows], c, max_iterations)
            accuracy = probe.score(train.values[held_out], train.labels[held_out])
            tried.append({"c": c, "held_out_accuracy": float(accuracy)})
    best = max(tried, key=lambda row: row["held_out_accuracy"])["c"] if tried else strengths[0]
    probe, converged = _fitted(train.values, train.labels, best, max_iterations)
    iterations = int(max(probe[-1].n_iter_))
    return probe, {"c": best, "iterations": iterations, "converged": converged, "tried": tried}


def new_probe(c: float, max_iterations: int = 1000) -> sklearn.pipeline.Pipeline:
    """Standardization with logistic regression, to be fitted."""
    return sklearn.pipeline.make_pipeline(
        sklearn.preprocessing.StandardScaler(),
        sklearn.linear_model.LogisticRegression(C=c, max_iter=max_iterations),
    )


def _fitted(
    values: np.ndarray, labels: np.ndarray, c: float, max_iterations: int
) -> tuple[sklearn.pipeline.Pipeline, bool]:
    """Return standardization with logistic regression, fitted, and whether its solver converged."""
    probe = new_probe(c, max_iterations)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", sklearn.exceptions.ConvergenceWarning)
        probe.fit(values.astype(np.float64), labels)
    return probe, not any(issubclass(warning.category, sklearn.exceptions.ConvergenceWarning) for warning in caught)


def probe(run: Run, source: Source, options: LinearProbeOptions) -> dict:
    """Evaluate, write linear_probe.json and linear_probe.md, with a workdir also the run, and return the results."""
    new_run = to_path(options.workdir) if options.workdir is not None and options.output is None else None
    features = open_features(run, source, options, new_run)
    fitted, how = fit_probe(features.train, options.c, options.max_iterations)
    found = {"accuracy": float(fitted.score(features.evaluation.values, features.evaluation.labels)), **how}
    if options.workdir is not None:
        _check_all_classes(features.train, source)
        preprocessing = preprocessing_for(run.preprocessing, options)
        model = with_linear_head(run.model, options.features, preprocessing, *linear_head(fitted))
        save_probe(run, model, source, options, {"val_accuracy": found["accuracy"]})
    header = ("accuracy", "C", "iterations", "converged")
    row = (f"{found['accuracy']:.4f}", f"{found['c']:g}", str(found["iterations"]), str(found["converged"]).lower())
    write_report("linear_probe", "Logistic regression", options, features, header, [row], {"results": found})
    return found


def _check_all_classes(train: Features, source: Source) -> None:
    """Raise UserError if a class has no training image: the probe would have no logit for it."""
    counts = np.bincount(train.labels, minlength=len(source.labels))
    if not counts.all():
        missing = source.labels[int(np.argmin(counts))]
        raise UserError(
            f"The class {missing!r} has no training image; give it more images, or remove it from the data."
        )

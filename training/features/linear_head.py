"""A linear classifier on frozen features, and what it says of pictures that it was not fitted to."""

import concurrent.futures
import os
import warnings

import numpy as np
import sklearn.exceptions
import sklearn.linear_model
import sklearn.model_selection
import sklearn.pipeline
import sklearn.preprocessing
import threadpoolctl

_FOLDS = 5


def new_probe(c: float, max_iterations: int = 1000) -> sklearn.pipeline.Pipeline:
    """Standardization with logistic regression, to be fitted. c: inverse strength of the penalty."""
    return sklearn.pipeline.make_pipeline(
        sklearn.preprocessing.StandardScaler(),
        sklearn.linear_model.LogisticRegression(C=c, max_iter=max_iterations),
    )


def one_thread() -> threadpoolctl.threadpool_limits:
    """A context in which a probe is fitted by one thread of BLAS.

    Several wait for each other in every one of many small products, ten times as long as these take.
    """
    return threadpoolctl.threadpool_limits(1, user_api="blas")


def out_of_fold_probabilities(
    values: np.ndarray, labels: np.ndarray, groups: np.ndarray, num_classes: int, c: float
) -> np.ndarray:
    """The probabilities (n, K) of each picture by a head that was fitted to the others, in five stratified folds.

    Args:
        values: features (n, D) float32.
        labels: (n,), 0 to K - 1.
        groups: (n,) numbers; pictures of one group, such as copies, are in one fold.
        num_classes: K.
        c: inverse strength of the penalty.
    """
    folds = sklearn.model_selection.StratifiedGroupKFold(_FOLDS, shuffle=True, random_state=0)
    found = np.zeros((len(labels), num_classes), np.float32)

    def fit(split: tuple[np.ndarray, np.ndarray]) -> None:
        rows, held_out = split
        head = new_probe(c, max_iterations=200).fit(values[rows], labels[rows])
        found[np.ix_(held_out, head.classes_)] = head.predict_proba(values[held_out])

    with warnings.catch_warnings(), one_thread():
        warnings.filterwarnings("ignore", "The least populated class")
        warnings.simplefilter("ignore", sklearn.exceptions.ConvergenceWarning)
        with concurrent.futures.ThreadPoolExecutor(min(_FOLDS, os.cpu_count() or 1)) as pool:
            list(pool.map(fit, folds.split(values, labels, groups)))
    return found

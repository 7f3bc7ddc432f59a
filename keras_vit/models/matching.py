"""Bipartite matching of predictions and targets, as in DETR (arXiv 2005.12872): on the host, with SciPy."""

import numpy as np
from scipy.optimize import linear_sum_assignment


def matched_queries(costs: np.ndarray, present: np.ndarray) -> np.ndarray:
    """The query of each target, so that the sum of the costs is least; each query has at most one target.

    Args:
        costs: (B, Q, T), of every query for every target. A cost that is not finite is chosen last.
        present: (B, T), whether there is such a target, or it only fills the batch.

    Returns:
        (B, T) int32: the number of the query; -1 for a target that is not present, or for which no query is left.
    """
    costs, present = np.asarray(costs, np.float64), np.asarray(present, bool)
    worst = float(np.finfo(np.float32).max)
    matched = np.full(present.shape, -1, np.int32)
    for cost, targets, found in zip(costs, present, matched, strict=True):
        numbers = np.flatnonzero(targets)
        queries, columns = linear_sum_assignment(np.nan_to_num(cost[:, numbers], nan=worst, posinf=worst, neginf=worst))
        found[numbers[columns]] = queries
    return matched

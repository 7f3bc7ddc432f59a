"""95% intervals: Wilson's of shares, Student's t of means, and percentiles of draws with replacement of all else."""

from collections.abc import Iterator, Sequence

import numpy as np
import scipy.stats

_ENDS = (0.025, 0.975)


def of_share(count: int, total: int) -> list[float]:
    """Return the interval [low, high] of a share by Wilson's score, which is no point where all are right."""
    return list(map(float, scipy.stats.binomtest(count, total).proportion_ci(_ENDS[1] - _ENDS[0], "wilson")))


def of_f1(count: int, said: int, there: int) -> list[float] | None:
    """Return the interval [low, high] of the F1 of a class: of what is `said` and `there`, `count` is both.

    F1 is 2 s / (1 + s), where s is the share of both in what is said or there, which has Wilson's interval
    (arXiv 2309.14621). None if there is nothing.
    """
    total = said + there - count
    return [2.0 * end / (1.0 + end) for end in of_share(count, total)] if total else None


def of_mean(values: Sequence[float]) -> list[float]:
    """Return the interval [low, high] of the mean of two values or more by Student's t."""
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return (np.mean(values) + error * scipy.stats.t.ppf(_ENDS, len(values) - 1)).tolist()


def of_draws(values: Sequence[float | None] | np.ndarray) -> list[float] | None:
    """Return the interval [low, high] of what draws gave. None and nan are unknown; None where all are."""
    numbers = np.asarray(values, np.float64)
    known = numbers[~np.isnan(numbers)]
    return np.quantile(known, _ENDS).tolist() if known.size else None


def draws(count: int, number: int) -> Iterator[np.ndarray]:
    """Yield the rows (count,) of so many draws with replacement, the same in every call."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        yield rng.integers(0, count, count)

"""Estimates over a few seeds with bootstrap confidence intervals, as in rliable.

Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.training.evaluation.t_distribution import NORMAL, t_quantile

Array = NDArray[np.float64]

Estimator = Callable[[Array], Array]  # reduces the first axis, the runs

RESAMPLES = 2000

AT_ONCE = 4_000_000  # resampled values in memory at a time

CONFIDENCE = 0.95
TAILS = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2


class Interval(NamedTuple):
    """A 95 % confidence interval, of a value or of each point of a curve."""

    low: Array
    high: Array


def mean(values: Array) -> Array:
    """Return the mean over runs [R, …]."""
    result: Array = values.mean(axis=0)
    return result


def interquartile_mean(values: Array) -> Array:
    """Return the interquartile mean over runs [R, …]: R // 4 runs are dropped at each end."""
    cut = len(values) // 4
    result: Array = np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)
    return result


def interval(values: Array, estimator: Estimator) -> Interval:
    """Return the percentile bootstrap interval over runs [R, …], widened for few runs.

    Resampling R runs has only (R − 1)/R of their variance, and normal tails instead of Student's:
    with three seeds a nominal 95 % interval would cover 73 %. One run has no interval.
    """
    runs, shape = len(values), values.shape[1:]
    estimate = estimator(values)
    if runs == 1:
        return Interval(estimate, estimate)
    chosen = np.random.default_rng(0).integers(0, runs, (RESAMPLES, runs))
    flat = values.reshape(runs, -1)  # [R, S]
    width = max(1, AT_ONCE // (RESAMPLES * runs))
    ends = [
        # Runs first, for the estimator: [R, B, S'].
        np.quantile(estimator(flat[:, first : first + width][chosen.T]), TAILS, axis=0)
        for first in range(0, flat.shape[1], width)
    ]
    low, high = np.concatenate(ends, axis=1).reshape(2, *shape)
    factor = widening(runs)
    return Interval(estimate - factor * (estimate - low), estimate + factor * (high - estimate))


def widening(runs: int) -> float:
    """Return the factor by which a bootstrap interval over that few runs has to be widened."""
    freedom = runs - 1
    return t_quantile(freedom) / NORMAL * math.sqrt(runs / freedom)


def probability_of_improvement(ours: Array, theirs: Array) -> tuple[float, Interval]:
    """Return P(a run of ours [R] beats one of theirs [S]) and its bootstrap interval.

    Ties count half. Both sides are resampled independently. The interval covers less than 95 %:
    with three runs 80 % at P = 0.5, and 40 % at P = 0.92.
    """
    beats = np.sign(ours[:, None] - theirs[None, :]) / 2 + 0.5  # [R, S]
    random = np.random.default_rng(0)
    rows = random.integers(0, len(ours), (RESAMPLES, len(ours)))
    columns = random.integers(0, len(theirs), (RESAMPLES, len(theirs)))
    resampled = [beats[np.ix_(r, c)].mean() for r, c in zip(rows, columns, strict=True)]
    return float(beats.mean()), Interval(*np.quantile(resampled, TAILS))

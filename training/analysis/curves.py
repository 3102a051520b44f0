"""Learning curves of several runs on a common grid, with confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadyrl.training.analysis.estimates import Estimator, interval, mean
from steadyrl.training.analysis.groups import Group, names
from steadyrl.training.analysis.past_runs import Series

# A run shorter than this fraction of the longest is left out, else the curve would end with it.
SHORTEST = 0.5

Points = NDArray[np.float64]


class Curve(NamedTuple):
    """Estimate and confidence interval, where all runs have data."""

    x: Points  # [S] steps or seconds
    centre: Points  # [S]
    low: Points  # [S]
    high: Points  # [S]
    runs: int
    left_out: list[str]  # what was left out, for the user


def aggregate(
    runs: Mapping[str, Series], estimator: Estimator = mean, *, over: str = "steps"
) -> Curve:
    """Return the estimate and its interval over runs, interpolated to a common grid."""
    left_out: list[str] = []
    if over == "steps":
        runs = _long_enough(runs, left_out)
        grid = _shared_steps(runs, left_out)
    else:  # wall time: a slower machine is no reason to leave a run out
        grid = _even(runs, left_out)
    values = np.array([np.interp(grid, list(run), list(run.values())) for run in runs.values()])
    low, high = interval(values, estimator)
    return Curve(grid, estimator(values), low, high, len(runs), left_out)


def curve_of(group: Group, tag: str, over: str, estimator: Estimator = mean) -> Curve | None:
    """Return a group's curve of one tag; None if no run has logged it."""
    series: dict[str, Series] = {}
    left_out = []
    for name, run in zip(names(group.runs), group.runs, strict=True):
        found = run.metrics.get(tag, {})
        if over == "seconds":
            found = {run.seconds[step]: v for step, v in found.items() if step in run.seconds}
            found = dict(sorted(found.items()))
        if found:
            series[name] = found
        else:
            left_out.append(f"{name}, which has no {tag}")
    if not series:
        return None
    curve = aggregate(series, estimator, over=over)
    return curve._replace(left_out=left_out + curve.left_out)


def limits(curves: Sequence[Curve], least: float) -> tuple[float, float]:
    """Return the range of the y axis; the bands of few seeds may be far wider than the lines."""
    lines = np.concatenate([curve.centre for curve in curves])
    span = max(float(np.ptp(lines)), float(np.abs(lines).max()) / 10, 1e-9)
    low = max(min(float(c.low.min()) for c in curves), float(lines.min()) - span, least)
    high = min(max(float(c.high.max()) for c in curves), float(lines.max()) + span)
    return low - span / 20, high + span / 20


def _long_enough(runs: Mapping[str, Series], left_out: list[str]) -> dict[str, Series]:
    end = max(max(run) for run in runs.values())
    long_enough = {}
    for name, run in runs.items():
        if max(run) < SHORTEST * end:
            left_out.append(f"{name}, which ends at step {max(run):,} of {end:,}")
        else:
            long_enough[name] = run
    return long_enough


def _shared_steps(runs: Mapping[str, Series], left_out: list[str]) -> Points:
    """Return the steps that all runs cover; nearby steps of different runs are merged.

    With several environments, seeds log at 5,001, 5,002, …. Steps closer than half the median
    spacing become one point, at the last of them, unless a run has both: the curve ends with the
    last value of every run. Runs without a step in common have one point, where the last of them
    begins.
    """
    spacing = np.concatenate([np.diff(list(run), prepend=0) for run in runs.values()])
    near = float(np.median(spacing)) / 2
    logged = sorted((step, name) for name, run in runs.items() for step in run)
    points: list[dict[str, float]] = []
    for step, name in logged:
        if not points or name in points[-1] or step - min(points[-1].values()) > near:
            points.append({})
        points[-1][name] = step
    steps = np.array([max(point.values()) for point in points], float)
    begin, end = _covered(runs, near, left_out)
    shared = steps[(begin - near <= steps) & (steps <= end + near)]
    return shared if len(shared) else np.array([begin])


def _covered(
    runs: Mapping[str, Series], near: float, left_out: list[str], unit: str = "step"
) -> tuple[float, float]:
    """Return the last start and the first end of the runs; append to `left_out` what is outside."""
    late, early = max(runs, key=lambda name: min(runs[name])), min(runs, key=lambda n: max(runs[n]))
    begin, end = min(runs[late]), max(runs[early])
    for outside, where in (
        (
            [name for name, run in runs.items() for x in run if x < begin - near],
            f"before {unit} {begin:,.0f}, where {late} begins",
        ),
        (
            [name for name, run in runs.items() for x in run if x > end + near],
            f"after {unit} {end:,.0f}, where {early} ends",
        ),
    ):
        if outside:
            left_out.append(f"{len(outside)} points of {len(set(outside))} runs {where}")
    return begin, end


def _even(runs: Mapping[str, Series], left_out: list[str]) -> Points:
    """Return evenly spaced seconds that all runs cover, as many as the longest run has points."""
    begin, end = _covered(runs, 0.0, left_out, "second")
    return np.linspace(begin, max(begin, end), max(len(run) for run in runs.values()))

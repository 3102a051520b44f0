"""Score, speed and memory of a past run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from steadyrl.training.analysis.groups import SCORES, Group
from steadyrl.training.analysis.past_runs import PastRun

TREE, RSS, SPEED = "memory/tree_pss_mb", "memory/rss_mb", "time/steps_per_second"


def score_tags(groups: Iterable[Group]) -> dict[str, str]:
    """Return the tag by which the runs of each environment are compared.

    It is that of evaluations if any run has one, else that of training returns.
    """
    logged: dict[str, set[str]] = {}
    for group in groups:
        logged.setdefault(group.env, set()).update(*(run.metrics for run in group.runs))
    return {
        env: next((tag for tag in SCORES if tag in tags), SCORES[0]) for env, tags in logged.items()
    }


def score(run: PastRun, tag: str) -> float | None:
    """Return the last value of the tag that the runs are compared by; None if it has none."""
    series = run.metrics.get(tag)
    return None if series is None else series[max(series)]


def speed(run: PastRun) -> float | None:
    """Return the run's steps per second; without a final summary, from what it has logged."""
    whole = run.summary.get("steps_per_second")
    if isinstance(whole, float) and not run.is_running:
        return whole
    logged = {step: rate for step, rate in run.metrics.get(SPEED, {}).items() if rate > 0}
    if not logged:
        return None
    ends, rates = np.array(sorted(logged.items())).T
    return float(ends[-1] / (np.diff(ends, prepend=0) / rates).sum())


def peak(run: PastRun) -> float | None:
    """Return the peak memory of a run in MB, workers included."""
    seen = [value for tag in (TREE, RSS) for value in run.metrics.get(tag, {}).values()]
    whole = (run.summary.get(key) for key in ("tree_mb_peak", "rss_mb_peak"))
    seen += [value for value in whole if isinstance(value, float)]
    return max(seen, default=None)

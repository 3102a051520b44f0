"""Score, speed and memory of a past run."""

from __future__ import annotations

import numpy as np

from steadyrl.training.analysis.groups import SCORES
from steadyrl.training.analysis.past_runs import PastRun

TREE, RSS, SPEED = "memory/tree_pss_mb", "memory/rss_mb", "time/steps_per_second"


def score(run: PastRun) -> float | None:
    """Return the last evaluation's mean return; without evaluations the last training return."""
    series = next((run.metrics[tag] for tag in SCORES if tag in run.metrics), None)
    return None if series is None else series[max(series)]


def speed(run: PastRun) -> float | None:
    """Return the run's steps per second; while it is running, the median it has logged."""
    whole = run.summary.get("steps_per_second")
    if isinstance(whole, float) and not run.is_running:
        return whole
    logged = run.metrics.get(SPEED)
    return float(np.median(list(logged.values()))) if logged else None


def peak(run: PastRun) -> float | None:
    """Return the peak memory of a run in MB, workers included."""
    seen = [value for tag in (TREE, RSS) for value in run.metrics.get(tag, {}).values()]
    whole = (run.summary.get(key) for key in ("tree_mb_peak", "rss_mb_peak"))
    seen += [value for value in whole if isinstance(value, float)]
    return max(seen, default=None)

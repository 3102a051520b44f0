"""Judge a soak: what must be flat, and was it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from memory.growth import theil_sen
from scripts.soaking.sampling import Sample, Soak


class Limits(NamedTuple):
    """What a run may do and still be called steady."""

    slope_mb: float  # of the memory that is the run's own, per million steps
    speed_change: float  # last tenth against first tenth after the warm-up
    warmup: float  # share of the run that is not judged
    shared_machine: bool  # judge the speed by CPU seconds, for others take the seconds between


class Check(NamedTuple):
    """One number against its limit."""

    name: str
    value: str
    limit: str
    passed: bool


def judge(soak: Soak, limits: Limits) -> list[Check]:
    """Return every check, passed or not."""
    last = int(soak.logged[-1]["step"]) if soak.logged else 0
    warm = [sample for sample in soak.samples if sample.step >= limits.warmup * last]
    checks = [Check("exit code", str(soak.exit_code), "0", soak.exit_code == 0)]
    if len(warm) < 10:
        return [*checks, Check("samples after the warm-up", str(len(warm)), "≥ 10", False)]
    slope = own_slope(warm)
    checks.append(
        Check("Σ PSS without mapped files, MB per million steps", f"{slope:+.2f}",
              f"≤ {limits.slope_mb:g}", slope <= limits.slope_mb)
    )  # fmt: skip
    if limits.shared_machine:
        name, change = "steps per CPU second", cpu_speed_change(warm)
    else:
        name, change = "steps/s", speed_change(soak.logged, limits.warmup)
    checks.append(
        Check(f"{name}, last tenth against first", f"{change:+.1%}",
              f"±{limits.speed_change:.0%}", abs(change) <= limits.speed_change)
    )  # fmt: skip
    for field in ("open_files", "threads", "children"):
        first, now = ends([getattr(sample, field) for sample in warm])
        checks.append(
            Check(field.replace("_", " "), f"{first:g} → {now:g}", "no more", now <= first)
        )
    return checks


def own_slope(samples: Sequence[Sample]) -> float:
    """Return the robust slope of Σ PSS without mapped files, in MB per million steps.

    A library's pages are shared with every program that uses it: their part of Σ PSS moves
    whenever another one starts or ends.
    """
    points = np.array([(sample.step, sample.own) for sample in samples], dtype=np.float64)
    # Every so many of them: the slope looks at all pairs.
    points = points[:: 1 + len(points) // 1000]
    return theil_sen(points[:, 0], points[:, 1])  # bytes per step are MB per million steps


def cpu_speed_change(samples: Sequence[Sample]) -> float:
    """Return the relative change of steps per CPU second, from the first tenth to the last."""
    tenth = max(2, len(samples) // 10)
    first, now = (
        (part[-1].step - part[0].step) / max(part[-1].cpu_seconds - part[0].cpu_seconds, 1e-9)
        for part in (samples[:tenth], samples[-tenth:])
    )
    return now / max(first, 1e-9) - 1


def speed_change(logged: Sequence[dict[str, float]], warmup: float) -> float:
    """Return the relative change of steps/s from the first tenth after the warm-up to the last."""
    last = logged[-1]["step"]
    speeds = [
        line["time/steps_per_second"]
        for line in logged
        if line["step"] >= warmup * last and "time/steps_per_second" in line
    ]
    first, now = ends(speeds)
    return now / first - 1


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and of the last tenth."""
    tenth = max(1, len(values) // 10)
    return median(values[:tenth]), median(values[-tenth:])

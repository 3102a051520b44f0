"""Checks of a soak test: memory, speed and handles must be constant after the warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from scripts.soaking.sampling import Sample, Soak
from steadyrl.memory.leak import theil_sen
from steadyrl.memory.process import MB

SPEED = "time/steps_per_second"  # without evaluations
_SAMPLES = 10  # minimum for tenths and slopes to be meaningful
_SETTLED = 0.15  # relative distance to the last value of a settled series (fill varies by 10 %)
# Memory access and work per step depend on these.
_SETTLING = ("memory/replay_fill", "train/epsilon")


class Limits(NamedTuple):
    """Limits of a steady run."""

    slope_mb: float  # MB of own memory per million steps
    growth_mb: float  # MB of own memory, last tenth against first
    speed_change: float  # relative, last tenth against first after the warm-up
    warmup: float  # minimum fraction of the run that is not checked
    shared_machine: bool  # check speed by CPU seconds
    evaluations: int = 5  # minimum number, so that their leaks would show
    restarts: int = 0  # likewise, of rebuilt environments


class Check(NamedTuple):
    """A measured value and its limit."""

    name: str
    value: str
    limit: str
    passed: bool


class LogInterval(NamedTuple):
    """Training between two log lines."""

    end: int  # step
    steps: int
    seconds: float  # without evaluations


def judge(soak: Soak, limits: Limits) -> list[Check]:
    """Return all checks, passed or not."""
    last = int(soak.logged[-1]["step"]) if soak.logged else 0
    begin = settled_step(soak.logged, limits.warmup)
    # After the last log line the run only shuts down.
    samples = [sample for sample in soak.samples if begin <= sample.step < last]
    parts = [part for part in log_intervals(soak.logged) if part.end > begin]
    evaluations = sum("eval/return_mean" in line for line in soak.logged)
    checks = [
        Check("exit code", str(soak.exit_code), "0", soak.exit_code == 0),
        _at_least("evaluations", evaluations, limits.evaluations),
        Check("checked from step", f"{begin:,}", f"≤ half of {last:,}", 2 * begin <= last),
    ]
    if limits.restarts:
        checks.append(_at_least("environments rebuilt", soak.restarts, limits.restarts))
    enough = [
        _at_least("samples after the warm-up", len(samples), _SAMPLES),
        _at_least("log lines after the warm-up", len(parts), _SAMPLES),
    ]
    if not all(check.passed for check in enough):
        return [*checks, *enough]
    return [*checks, *_flat(samples, parts, limits)]


def settled_step(logged: Sequence[dict[str, float]], warmup: float) -> int:
    """Return the first step after the warm-up: fraction over, replay full, ε constant."""
    last = logged[-1]["step"] if logged else 0
    steps = [warmup * last]
    for tag in _SETTLING:
        series = [(line["step"], line[tag]) for line in logged if tag in line]
        if series:
            final = series[-1][1]
            steps += [s for s, value in series if abs(value - final) > _SETTLED * abs(final)][-1:]
    return int(max(steps))


def _at_least(name: str, count: int, limit: int) -> Check:
    return Check(name, str(count), f"≥ {limit}", count >= limit)


def _flat(samples: Sequence[Sample], parts: Sequence[LogInterval], limits: Limits) -> list[Check]:
    slope, growth = own_slope(samples), own_growth(samples)
    if limits.shared_machine:
        speed, change = "steps per CPU second", cpu_speed_change(parts, samples)
    else:
        speed, change = "steps/s", speed_change(parts)
    checks = [
        Check("Σ PSS without mapped files, MB per million steps", f"{slope:+.2f}",
              f"≤ {limits.slope_mb:g}", slope <= limits.slope_mb),
        Check("Σ PSS without mapped files, last tenth against first, MB", f"{growth:+.2f}",
              f"≤ {limits.growth_mb:g}", growth <= limits.growth_mb),
        Check(f"{speed}, last tenth against first", f"{change:+.1%}",
              f"±{limits.speed_change:.0%}", abs(change) <= limits.speed_change),
    ]  # fmt: skip
    for field in ("open_files", "threads", "children"):
        first, now = most([getattr(sample, field) for sample in samples])
        words = field.replace("_", " ")
        checks.append(Check(words, f"{first} → {now}", "no more", now <= first))
    return checks


def own_slope(samples: Sequence[Sample]) -> float:
    """Return the robust slope of Σ PSS without mapped files, in MB per million steps.

    Pages of a shared library count 1/k for k programs, so they vary when another program starts or
    ends.
    """
    points = np.array([(sample.step, sample.own) for sample in samples], dtype=np.float64)
    # Subsampled: the slope uses all pairs.
    points = points[:: 1 + len(points) // 1000]
    return theil_sen(points[:, 0], points[:, 1])  # bytes per step are MB per million steps


def own_growth(samples: Sequence[Sample]) -> float:
    """Return the growth of own memory in MB; the median slope misses late growth."""
    first, now = ends([sample.own for sample in samples])
    return (now - first) / MB


def most(values: Sequence[int]) -> tuple[int, int]:
    """Return the maxima of the first and last tenth, since being replaced lowers a count."""
    tenth = max(1, len(values) // 10)
    return max(values[:tenth]), max(values[-tenth:])


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and last tenth."""
    tenth = max(1, len(values) // 10)
    return median(values[:tenth]), median(values[-tenth:])


def log_intervals(logged: Sequence[dict[str, float]]) -> list[LogInterval]:
    """Return the intervals between log lines that have a speed."""
    timed = [line for line in logged if line.get(SPEED, 0.0) > 0]
    found, before = [], 0
    for line in timed:
        end = int(line["step"])
        found.append(LogInterval(end, end - before, (end - before) / line[SPEED]))
        before = end
    return found


def speed_change(parts: Sequence[LogInterval]) -> float:
    """Return the relative change of steps/s from the first tenth to the last.

    Each tenth is summed: if updates come in bursts longer than a log interval, the median interval
    has none, and would not show their cost.
    """
    tenth = max(1, len(parts) // 10)
    return _speed(parts[-tenth:]) / _speed(parts[:tenth]) - 1


def cpu_speed_change(parts: Sequence[LogInterval], samples: Sequence[Sample]) -> float:
    """Return the relative change of steps per CPU second from the first tenth to the last.

    CPU usage is of the whole process, seconds are of training only, because evaluations take longer
    as the policy improves.
    """
    tenth = max(2, len(samples) // 10)
    first, now = (
        _speed(_between(parts, window)) / max(_cpu_share(window), 1e-9)
        for window in (samples[:tenth], samples[-tenth:])
    )
    return now / max(first, 1e-9) - 1


def _between(parts: Sequence[LogInterval], window: Sequence[Sample]) -> list[LogInterval]:
    return [part for part in parts if window[0].step < part.end <= window[-1].step]


def _speed(parts: Sequence[LogInterval]) -> float:
    return sum(part.steps for part in parts) / max(sum(part.seconds for part in parts), 1e-9)


def _cpu_share(window: Sequence[Sample]) -> float:
    first, last = window[0], window[-1]
    return (last.cpu_seconds - first.cpu_seconds) / max(last.seconds - first.seconds, 1e-9)

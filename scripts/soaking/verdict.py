"""Judge a soak: what must be flat, and was it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from scripts.soaking.sampling import Sample, Soak
from steadyrl.memory.leak import theil_sen
from steadyrl.memory.process import MB

SPEED = "time/steps_per_second"  # evaluations are not in it
_SAMPLES = 10  # below that, tenths and slopes say nothing
_SETTLED = 0.15  # how near its last value a number is when it has settled; fill varies by a tenth
# What a run's memory access and its work per step depend on.
_SETTLING = ("memory/replay_fill", "train/epsilon")


class Limits(NamedTuple):
    """What a run may do and still be called steady."""

    slope_mb: float  # of the memory that is the run's own, per million steps
    growth_mb: float  # of it, from the first tenth to the last, whatever its shape
    speed_change: float  # last tenth against first tenth after the warm-up
    warmup: float  # share of the run that is not judged, at least
    shared_machine: bool  # judge the speed by CPU seconds, for others take the seconds between
    evaluations: int = 5  # that there must have been, so that what they leave is seen
    restarts: int = 0  # likewise


class Check(NamedTuple):
    """One number against its limit."""

    name: str
    value: str
    limit: str
    passed: bool


class Stretch(NamedTuple):
    """The training between two lines of the log."""

    end: int  # step
    steps: int
    seconds: float  # evaluations left out


def judge(soak: Soak, limits: Limits) -> list[Check]:
    """Return every check, passed or not."""
    last = int(soak.logged[-1]["step"]) if soak.logged else 0
    begin = settled_step(soak.logged, limits.warmup)
    # With the last line training is over: what is seen then is how the run ends.
    samples = [sample for sample in soak.samples if begin <= sample.step < last]
    parts = [part for part in stretches(soak.logged) if part.end > begin]
    evaluations = sum("eval/return_mean" in line for line in soak.logged)
    checks = [
        Check("exit code", str(soak.exit_code), "0", soak.exit_code == 0),
        _at_least("evaluations", evaluations, limits.evaluations),
        Check("judged from step", f"{begin:,}", f"≤ half of {last:,}", 2 * begin <= last),
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
    """Return the step where the warm-up ends: its share is over, replay full, ε at its end."""
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


def _flat(samples: Sequence[Sample], parts: Sequence[Stretch], limits: Limits) -> list[Check]:
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

    A library's pages are shared with every program that uses it: their part of Σ PSS moves
    whenever another one starts or ends.
    """
    points = np.array([(sample.step, sample.own) for sample in samples], dtype=np.float64)
    # Every so many of them: the slope looks at all pairs.
    points = points[:: 1 + len(points) // 1000]
    return theil_sen(points[:, 0], points[:, 1])  # bytes per step are MB per million steps


def own_growth(samples: Sequence[Sample]) -> float:
    """Return what it has grown by, in MB: a median slope does not see what begins late."""
    first, now = ends([sample.own for sample in samples])
    return (now - first) / MB


def most(values: Sequence[int]) -> tuple[int, int]:
    """Return the largest of the first and of the last tenth: processes being replaced are few."""
    tenth = max(1, len(values) // 10)
    return max(values[:tenth]), max(values[-tenth:])


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the first and of the last tenth."""
    tenth = max(1, len(values) // 10)
    return median(values[:tenth]), median(values[-tenth:])


def stretches(logged: Sequence[dict[str, float]]) -> list[Stretch]:
    """Return what lies between lines that say how fast it went."""
    timed = [line for line in logged if line.get(SPEED, 0.0) > 0]
    found, before = [], 0
    for line in timed:
        end = int(line["step"])
        found.append(Stretch(end, end - before, (end - before) / line[SPEED]))
        before = end
    return found


def speed_change(parts: Sequence[Stretch]) -> float:
    """Return the relative change of steps/s from the first tenth to the last.

    Each tenth is taken as a whole: where learning comes in bursts longer than a log interval,
    most intervals have none, and their median would not notice how long it takes.
    """
    tenth = max(1, len(parts) // 10)
    return _speed(parts[-tenth:]) / _speed(parts[:tenth]) - 1


def cpu_speed_change(parts: Sequence[Stretch], samples: Sequence[Sample]) -> float:
    """Return the relative change of steps per CPU second from the first tenth to the last.

    The CPU's share of the time is that of all the process did meanwhile, the seconds are those of
    training alone: evaluations grow longer as the policy becomes better.
    """
    tenth = max(2, len(samples) // 10)
    first, now = (
        _speed(_between(parts, window)) / max(_cpu_share(window), 1e-9)
        for window in (samples[:tenth], samples[-tenth:])
    )
    return now / max(first, 1e-9) - 1


def _between(parts: Sequence[Stretch], window: Sequence[Sample]) -> list[Stretch]:
    return [part for part in parts if window[0].step < part.end <= window[-1].step]


def _speed(parts: Sequence[Stretch]) -> float:
    return sum(part.steps for part in parts) / max(sum(part.seconds for part in parts), 1e-9)


def _cpu_share(window: Sequence[Sample]) -> float:
    first, last = window[0], window[-1]
    return (last.cpu_seconds - first.cpu_seconds) / max(last.seconds - first.seconds, 1e-9)

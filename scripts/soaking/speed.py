"""How fast a run was, from its log and from what the system says of its CPU time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scripts.soaking.sampling import Sample

SPEED = "time/steps_per_second"  # evaluations are not in it


class Stretch(NamedTuple):
    """The training between two lines of the log."""

    end: int  # step
    steps: int
    seconds: float  # evaluations left out


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

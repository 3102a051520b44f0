"""Schedules over valid environment steps: the same for any number of environments."""

from __future__ import annotations


def linear(start: float, end: float, steps: float, now: int) -> float:
    """Return start + (end − start)·min(1, now / steps); exactly `end` from `steps` on."""
    if now >= steps:
        return end
    return start + (end - start) * (now / steps)


def crossings(before: int, after: int, every: int) -> int:
    """Count the multiples of `every` in (before, after]; none when `every` is 0.

    Vector environments advance several steps at once, so `step % every` would miss some.
    """
    return after // every - before // every if every else 0

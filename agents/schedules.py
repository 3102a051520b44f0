"""Schedules over valid environment steps: the same for any number of environments."""

from __future__ import annotations


def linear(start: float, end: float, steps: float, now: int) -> float:
    """Return start + (end − start)·min(1, now / steps); exactly `end` from `steps` on."""
    if now >= steps:
        return end
    return start + (end - start) * (now / steps)

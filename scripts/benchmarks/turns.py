"""Time contestants in turns, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median


def take_turns(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Return seconds per call of every contestant, one number a round; the first is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, call in contestants.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds[name].append((time.perf_counter() - start) / calls)
    return {name: times[1:] for name, times in seconds.items()}


def median_ratio(theirs: list[float], ours: list[float]) -> float:
    """Return the median over rounds of how many times longer they took than we did."""
    return median(one / two for one, two in zip(theirs, ours, strict=True))

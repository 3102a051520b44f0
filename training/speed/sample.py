"""What a step of training took, averaged over some steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

PARTS = ("environment", "act", "update", "callbacks", "other")


class Sample(NamedTuple):
    """Means over some steps; milliseconds per environment step unless noted."""

    step: int  # at the end
    total: float  # without pauses and compilation
    environment: float
    act: float
    update: float
    callbacks: float
    other: float
    updates: float  # gradient steps per environment step
    cpu: float
    waited: float | None  # ready, without a core
    throttled: float | None
    mhz: float | None
    rss_mb: float | None
    length: float | None  # mean length of episodes


def medians(samples: Sequence[Sample]) -> Sample:
    """Return the medians of known values; None where there are none."""
    columns: Iterator[tuple[Any, ...]] = zip(*samples, strict=True)
    known = ([value for value in column if value is not None] for column in columns)
    return Sample(*(median(values) if values else None for values in known))  # type: ignore[arg-type]

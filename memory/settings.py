"""Settings of the memory floor: `memory.*`. Light on purpose: only the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memory.errors import at_least


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """How often what is measured; what costs more is measured more rarely."""

    every_seconds: float
    tree_every_seconds: float
    tensors_every_seconds: float

    def __post_init__(self) -> None:
        at_least(self, 0, "every_seconds", "tree_every_seconds", "tensors_every_seconds")


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """When the cleaner looks (counts, 0 = never) and when it acts (0 MB = always)."""

    every_updates: int
    every_episodes: int
    every_rollouts: int
    min_reclaimable_mb: float

    def __post_init__(self) -> None:
        at_least(self, 0, "every_updates", "every_episodes", "every_rollouts", "min_reclaimable_mb")


@dataclass(frozen=True, kw_only=True)
class LeakSettings:
    """What growth is called a leak, and what happens then."""

    action: Literal["warn", "stop"]
    warmup_samples: int
    window_samples: int
    max_growth_mb: float
    max_growth_mb_per_million_steps: float
    max_extra_handles: int
    tracemalloc: bool

    def __post_init__(self) -> None:
        at_least(self, 1, "warmup_samples")
        at_least(self, 4, "window_samples")
        bounds = ("max_growth_mb", "max_growth_mb_per_million_steps", "max_extra_handles")
        at_least(self, 0, *bounds)


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Bounds of the histories, the hard limit, and the three watchers."""

    history: int
    step_times: int
    collect_times: int
    limit_mb: float | None
    profile: bool
    monitor: MonitorSettings
    cache: CacheSettings
    leak: LeakSettings

    def __post_init__(self) -> None:
        at_least(self, 1, "history", "step_times", "collect_times", "limit_mb")

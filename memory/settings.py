"""Settings `memory.*`. Imports the standard library only: settings are checked first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steadyrl.core.errors import SettingError, validate_at_most

MOST_EPISODES = 100_000  # whose returns and lengths are kept, as numbers of JSON in checkpoints


def _at_least(field: str, value: float, least: float) -> None:
    if not least <= value < float("inf"):
        raise SettingError(field, value, f"must be at least {least} and finite")


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Intervals of memory readings; expensive ones are taken less often."""

    every_seconds: float
    tree_every_seconds: float
    tensors_every_seconds: float

    def __post_init__(self) -> None:
        _at_least("every_seconds", self.every_seconds, 0)
        _at_least("tree_every_seconds", self.tree_every_seconds, 0)
        _at_least("tensors_every_seconds", self.tensors_every_seconds, 0)


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """When caches are checked (counts, 0 = never) and cleaned (0 MB = always)."""

    every_updates: int
    every_episodes: int
    every_rollouts: int
    min_reclaimable_mb: float

    def __post_init__(self) -> None:
        _at_least("every_updates", self.every_updates, 0)
        _at_least("every_episodes", self.every_episodes, 0)
        _at_least("every_rollouts", self.every_rollouts, 0)
        _at_least("min_reclaimable_mb", self.min_reclaimable_mb, 0)


@dataclass(frozen=True, kw_only=True)
class LeakSettings:
    """Which growth counts as a leak, and what happens then."""

    action: Literal["warn", "stop"]
    warmup_samples: int
    window_samples: int
    max_growth_mb: float
    cuda_max_growth_mb: float
    max_growth_mb_per_million_steps: float
    max_extra_handles: int
    tracemalloc: bool

    def __post_init__(self) -> None:
        _at_least("warmup_samples", self.warmup_samples, 1)
        _at_least("window_samples", self.window_samples, 4)
        _at_least("max_growth_mb", self.max_growth_mb, 0)
        _at_least("cuda_max_growth_mb", self.cuda_max_growth_mb, 0)
        _at_least("max_growth_mb_per_million_steps", self.max_growth_mb_per_million_steps, 0)
        _at_least("max_extra_handles", self.max_extra_handles, 0)


@dataclass(frozen=True, kw_only=True)
class SlowdownSettings:
    """Which loss of speed is warned of."""

    max_percent: float
    warmup_samples: int
    window_samples: int

    def __post_init__(self) -> None:
        if not 0 <= self.max_percent < 100:
            raise SettingError("max_percent", self.max_percent, "must be from 0 to below 100")
        _at_least("warmup_samples", self.warmup_samples, 0)
        _at_least("window_samples", self.window_samples, 4)


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Lengths of statistics histories, the memory limit, and the settings of each part."""

    history: int
    mean_window: int
    step_times: int
    collect_times: int
    limit_mb: Literal["auto"] | float | None
    cuda_limit_mb: float | None
    profile: bool
    monitor: MonitorSettings
    cache: CacheSettings
    leak: LeakSettings
    slowdown: SlowdownSettings

    def __post_init__(self) -> None:
        _at_least("history", self.history, 1)
        validate_at_most(self, MOST_EPISODES, "history")
        _at_least("mean_window", self.mean_window, 1)
        if self.mean_window > self.history:
            reason = f"must be at most memory.history, which is {self.history}"
            raise SettingError("mean_window", self.mean_window, reason)
        _at_least("step_times", self.step_times, 1)
        _at_least("collect_times", self.collect_times, 1)
        if self.limit_mb is not None and self.limit_mb != "auto":
            _at_least("limit_mb", self.limit_mb, 1)
        if self.cuda_limit_mb is not None:
            _at_least("cuda_limit_mb", self.cuda_limit_mb, 1)

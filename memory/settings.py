"""Settings `memory.*`. Imports the standard library only: settings are checked first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steadyrl.core.errors import SettingError, validate_at_most

MOST_EPISODES = 100_000  # whose returns and lengths are kept, as numbers of JSON in checkpoints


def _at_least(settings: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not least <= value < float("inf"):
            raise SettingError(name, value, f"must be at least {least} and finite")


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Intervals of memory readings; expensive ones are taken less often."""

    every_seconds: float
    tree_every_seconds: float
    tensors_every_seconds: float

    def __post_init__(self) -> None:
        _at_least(self, 0, "every_seconds", "tree_every_seconds", "tensors_every_seconds")


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """When caches are checked (counts, 0 = never) and cleaned (0 MB = always)."""

    every_updates: int
    every_episodes: int
    every_rollouts: int
    min_reclaimable_mb: float

    def __post_init__(self) -> None:
        _at_least(self, 0, "every_updates", "every_episodes", "every_rollouts")
        _at_least(self, 0, "min_reclaimable_mb")


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
        _at_least(self, 1, "warmup_samples")
        _at_least(self, 4, "window_samples")
        _at_least(self, 0, "max_growth_mb", "cuda_max_growth_mb")
        _at_least(self, 0, "max_growth_mb_per_million_steps", "max_extra_handles")


@dataclass(frozen=True, kw_only=True)
class SlowdownSettings:
    """Which loss of speed is warned of."""

    max_percent: float
    warmup_samples: int
    window_samples: int

    def __post_init__(self) -> None:
        if not 0 <= self.max_percent < 100:
            raise SettingError("max_percent", self.max_percent, "must be from 0 to below 100")
        _at_least(self, 0, "warmup_samples")
        _at_least(self, 4, "window_samples")


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
        _at_least(self, 1, "history", "mean_window", "step_times", "collect_times")
        validate_at_most(self, MOST_EPISODES, "history")
        if self.mean_window > self.history:
            reason = f"must be at most memory.history, which is {self.history}"
            raise SettingError("mean_window", self.mean_window, reason)
        for name in ("limit_mb", "cuda_limit_mb"):
            if getattr(self, name) not in (None, "auto"):
                _at_least(self, 1, name)

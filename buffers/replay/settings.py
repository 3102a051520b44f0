"""Settings of the replay buffer. Imports nothing heavy: settings are checked first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steadyrl.core.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Size, location and sampling of the replay buffer (`agent.replay`)."""

    capacity: int  # transitions; rounded up to a multiple of the number of environments
    prioritized: bool
    alpha: float  # priority exponent: 0 samples uniformly, 1 in proportion to |TD error|
    beta_start: float  # importance-sampling exponent at the first update …
    beta_end: float  # … and at the last
    anneal_beta: Literal["constant", "linear", "cosine"]
    beta_warmup: float
    normalize_weights: Literal["replay", "batch"]
    device: Literal["auto", "cpu", "cuda"]

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise SettingError("capacity", self.capacity, "must be at least 1 transition")
        for field in ("alpha", "beta_start", "beta_end", "beta_warmup"):
            value = getattr(self, field)
            if not 0.0 <= value <= 1.0:
                raise SettingError(field, value, "must lie between 0 and 1")
        if self.beta_warmup == 1:
            raise SettingError("beta_warmup", 1, "must be below 1: nothing would be left")
        if self.anneal_beta == "constant" and self.beta_end != self.beta_start:
            raise SettingError(
                "beta_end",
                self.beta_end,
                f"is never reached from beta_start={self.beta_start:g} with "
                "agent.replay.anneal_beta=constant: make both the same, or anneal",
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise SettingError("device", self.device, "must be one of auto, cpu, cuda")

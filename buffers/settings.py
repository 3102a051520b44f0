"""The replay's settings. Light on purpose: it is imported before anything heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memory.errors import SettingError, at_least, fraction


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """How much experience is kept, where, and how it is drawn."""

    capacity: int  # transitions; rounded up to a multiple of the number of environments
    prioritized: bool
    alpha: float  # 0 draws uniformly, 1 in proportion to the error
    beta_start: float  # importance correction at the first update …
    beta_end: float  # … and at the last
    device: Literal["auto", "cpu", "cuda"]

    def __post_init__(self) -> None:
        at_least(self, 1, "capacity")
        fraction(self, "alpha", "beta_start", "beta_end")
        if self.device not in ("auto", "cpu", "cuda"):
            raise SettingError("device", self.device, "must be one of auto, cpu, cuda")

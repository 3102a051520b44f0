"""Settings of whatever a `Learner` trains. Light on purpose: checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memory.errors import SettingError, at_least, at_most, fraction, positive

WIDEST_LAYER = 1_000_000


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """Keys that algorithms have in common: their network, and the steps it takes."""

    hidden: tuple[int, ...]
    learning_rate: float
    anneal_learning_rate: bool
    gamma: float
    max_grad_norm: float  # 0 clips nothing
    grad_accumulation: int
    compile: Literal["false", "true", "cudagraph", "auto"]

    def __post_init__(self) -> None:
        hidden_layers(self.hidden)
        positive(self, "learning_rate", "grad_accumulation")
        at_least(self, 0, "max_grad_norm")
        fraction(self, "gamma")
        at_most(self, 1_000, "learning_rate")
        at_most(self, 1e6, "grad_accumulation")
        at_most(self, 1e30, "max_grad_norm")


def hidden_layers(sizes: tuple[int, ...]) -> None:
    """Refuse an empty network or a layer without units."""
    if not sizes:
        raise SettingError("hidden", list(sizes), "needs at least one layer, such as [64,64]")
    if min(sizes) <= 0:
        raise SettingError("hidden", list(sizes), "layer sizes must be above 0")
    if max(sizes) > WIDEST_LAYER:
        raise SettingError("hidden", list(sizes), f"layer sizes must be at most {WIDEST_LAYER:,}")

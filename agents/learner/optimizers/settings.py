"""Types and checks of the `agent.optimizer.*` keys; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from steadyrl.core.errors import SettingError, validate_at_most, validate_non_negative

SMALLEST_EPS = 1e-30  # smaller numbers vanish in float32

# Weight decay is part of the gradient for these (L2), and a step of its own for the others.
COUPLED = ("adam", "radam")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimiser of an algorithm's updates."""

    name: Literal["adam", "adamw", "radam", "muon"]
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        if not SMALLEST_EPS <= self.eps <= 1:
            raise SettingError("eps", self.eps, f"must be between {SMALLEST_EPS:g} and 1")
        validate_non_negative(self, "weight_decay")
        validate_at_most(self, 1_000, "weight_decay")

    def validate_rate(self, **rates: float) -> None:
        """Refuse a decay that would change the sign of the weights in one step."""
        for key, rate in rates.items():
            if self.name not in COUPLED and rate * self.weight_decay >= 1:
                reason = f"times agent.{key}={rate:g} must be below 1"
                raise SettingError("optimizer.weight_decay", self.weight_decay, reason)


ADAM = OptimizerSettings(name="adam", eps=1e-8, weight_decay=0.0)

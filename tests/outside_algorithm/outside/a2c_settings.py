"""Settings and registration of A2C; importable without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steadyrl.agents.registry import Algorithm
from steadyrl.core.errors import (
    validate_fraction,
    validate_hidden,
    validate_non_negative,
    validate_positive,
)
from steadyrl.envs.types import EnvSpec


@dataclass(frozen=True, kw_only=True)
class A2CSettings:
    """Advantage actor-critic: one gradient step per rollout."""

    name: Literal["outside.a2c"]
    hidden: tuple[int, ...]
    learning_rate: float
    gamma: float
    gae_lambda: float
    rollout_steps: int
    entropy_coef: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        validate_hidden(self.hidden)
        validate_positive(self, "learning_rate", "rollout_steps")
        validate_fraction(self, "gamma", "gae_lambda")
        validate_non_negative(self, "entropy_coef", "max_grad_norm")

    def validate_fit(self, spec: EnvSpec, total_steps: int) -> None:
        """Check the settings against environment and run length: nothing to check."""


A2C = Algorithm(A2CSettings, "outside.a2c", "A2C", Path(__file__).with_name("a2c.yaml"))

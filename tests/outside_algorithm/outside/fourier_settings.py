"""Settings and registration of PPO on Fourier features; importable without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.agents.registry import Algorithm
from steadyrl.core.errors import SettingError, validate_positive
from steadyrl.envs.types import EnvSpec


@dataclass(frozen=True, kw_only=True)
class FourierPPOSettings(PPOSettings):
    """PPO's settings, and the number of frequencies."""

    name: Literal["outside.fourier"]
    frequencies: int

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_positive(self, "frequencies")
        if self.recurrent.cell != "none":
            raise SettingError(
                "recurrent.cell", self.recurrent.cell, "must be none: no such network"
            )

    def validate_fit(self, spec: EnvSpec, total_steps: int) -> None:
        """Refuse observations other than vectors."""
        super().validate_fit(spec, total_steps)
        if len(spec.unmasked_shape) != 1:
            raise SettingError("agent", self.name, "needs observations that are vectors")


FOURIER_PPO = Algorithm(
    FourierPPOSettings, "outside.fourier", "FourierPPO", Path(__file__).with_name("fourier.yaml")
)

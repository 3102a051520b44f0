"""Types and checks of the `agent.*` keys of DQN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from typing_extensions import override

from steadyrl.agents.settings import (
    EPSILON_KEYS,
    DistillationSettings,
    EpsilonGreedySettings,
    ReplayAgentSettings,
    TeacherSettings,
)
from steadyrl.core.errors import (
    SettingError,
    validate_at_most,
    validate_fraction,
    validate_positive,
)
from steadyrl.envs.types import DiscreteActions, EnvSpec

MUNCHAUSEN_KEYS = ("munchausen.alpha", "munchausen.temperature", "munchausen.log_policy_min")


@dataclass(frozen=True, kw_only=True)
class DistributionSettings:
    """Return distributions: atoms on a fixed support (C51), or quantiles."""

    kind: Literal["none", "c51", "quantile"]
    atoms: int
    v_min: float
    v_max: float

    def __post_init__(self) -> None:
        validate_at_most(self, 10_000, "atoms")
        if self.atoms < 2:
            raise SettingError("atoms", self.atoms, "must be at least 2")
        validate_at_most(self, 1e6, "v_max")
        if not -1e6 <= self.v_min < self.v_max:
            reason = f"must lie below v_max={self.v_max:g}, and be -1e6 at least"
            raise SettingError("v_min", self.v_min, reason)
        apart = (self.v_max - self.v_min) / (self.atoms - 1)
        if apart < max(1e-30, 1e-6 * max(-self.v_min, self.v_max)):  # float32 has 7 digits
            reason = f"is so near to v_max={self.v_max:g} that {self.atoms} atoms between coincide"
            raise SettingError("v_min", self.v_min, reason)


@dataclass(frozen=True, kw_only=True)
class MunchausenSettings:
    """Munchausen DQN: soft maxima, and a part of the scaled log-policy as reward."""

    enabled: bool
    alpha: float
    temperature: float
    log_policy_min: float

    def __post_init__(self) -> None:
        validate_at_most(self, 1e6, "temperature")
        validate_fraction(self, "alpha")
        _validate_temperature(self.temperature)
        if not -1e6 <= self.log_policy_min <= 0:
            reason = "must lie between -1e6 and 0"
            raise SettingError("log_policy_min", self.log_policy_min, reason)


@dataclass(frozen=True, kw_only=True)
class NoisySettings:
    """NoisyNet exploration."""

    enabled: bool
    sigma: float
    epsilon_greedy: bool

    def __post_init__(self) -> None:
        validate_positive(self, "sigma")
        validate_at_most(self, 1_000, "sigma")


@dataclass(frozen=True, kw_only=True)
class DQNTeacherSettings(TeacherSettings):
    """A teacher of Q-values, which are compared as a softmax."""

    temperature: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate_temperature(self.temperature)
        validate_at_most(self, 1_000, "temperature")


def _validate_temperature(value: float) -> None:
    """Refuse temperatures at which a softmax overflows."""
    if not value >= 1e-6:
        raise SettingError("temperature", value, "must be at least 1e-6")


@dataclass(frozen=True, kw_only=True)
class DQNSettings(ReplayAgentSettings, EpsilonGreedySettings, DistillationSettings):
    """Deep Q-learning."""

    name: Literal["dqn"]
    double: bool
    dueling: bool
    loss: Literal["huber", "squared"]
    distribution: DistributionSettings
    munchausen: MunchausenSettings
    noisy: NoisySettings
    teacher: DQNTeacherSettings
    augmentation: Literal["none", "shift"]

    takes_masks = True
    action_kinds = (DiscreteActions,)
    switches = (
        *ReplayAgentSettings.switches,
        ("distribution.kind", ("none",), ("loss",)),
        ("distribution.kind", ("c51",), ("distribution.v_min", "distribution.v_max")),
        ("distribution.kind", ("c51", "quantile"), ("distribution.atoms",)),
        ("munchausen.enabled", (True,), MUNCHAUSEN_KEYS),
        ("noisy.enabled", (True,), ("noisy.sigma", "noisy.epsilon_greedy")),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.validate_epsilon()
        kind = self.distribution.kind
        if kind != "none" and self.loss == "squared":
            reason = f"is not for agent.distribution.kind={kind}, which has a loss of its own"
            raise SettingError("loss", self.loss, reason)

    @property
    def is_epsilon_greedy(self) -> bool:
        """Whether the behaviour policy takes random actions: unless noisy layers explore alone."""
        return self.noisy.epsilon_greedy or not self.noisy.enabled

    @property
    @override
    def unused(self) -> dict[str, str]:
        epsilon = self.unused_epsilon
        if not self.is_epsilon_greedy:
            names = (*EPSILON_KEYS, "anneal_epsilon")
            epsilon = dict.fromkeys(names, "agent.noisy.epsilon_greedy=false")
        return super().unused | self.unused_teacher | epsilon

    @property
    def extensions(self) -> tuple[str, ...]:
        """The extensions that are on besides a teacher."""
        return () if self.augmentation == "none" else ("augmentation",)

    @override
    def of_rank(self, rank: int, size: int) -> Self:
        self.validate_single_process()
        return super().of_rank(rank, size)

    @override
    def validate_fit(self, spec: EnvSpec, total_steps: int) -> None:
        super().validate_fit(spec, total_steps)
        if self.augmentation != "none" and len(spec.observation_shape) != 3:
            reason = f"needs images, but {spec.id} is not observed as images alone"
            raise SettingError("agent.augmentation", self.augmentation, reason)

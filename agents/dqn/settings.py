"""Types and checks of the `agent.*` keys of DQN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, NamedTuple

from steadyrl.agents.learner.optimizers.settings import OptimizerSettings
from steadyrl.agents.learner.schedules import Schedule, Shape, over_the_run, scheduled
from steadyrl.agents.networks.settings import NetworkSettings
from steadyrl.agents.settings import (
    EPSILON,
    DistillationSettings,
    EpsilonGreedySettings,
    TeacherSettings,
)
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.core.errors import (
    SettingError,
    validate_at_most,
    validate_fraction,
    validate_hidden,
    validate_non_negative,
    validate_positive,
)
from steadyrl.envs.types import DiscreteActions, EnvSpec

BETA = ("replay.beta_start", "replay.beta_end", "replay.anneal_beta", "replay.beta_warmup")
SOFT = ("munchausen.alpha", "munchausen.temperature", "munchausen.log_policy_min")
# A key, its values for which others have an effect, and these others.
UNUSED: tuple[tuple[str, tuple[object, ...], tuple[str, ...]], ...] = (
    ("distribution.kind", ("c51",), ("distribution.v_min", "distribution.v_max")),
    ("distribution.kind", ("c51", "quantile"), ("distribution.atoms",)),
    ("replay.prioritized", (True,), ("replay.alpha", *BETA, "replay.normalize_weights")),
    ("munchausen.enabled", (True,), SOFT),
    ("noisy.enabled", (True,), ("noisy.sigma",)),
    ("noisy.enabled", (False,), (*EPSILON, "anneal_epsilon")),
)


class Schedules(NamedTuple):
    """What changes over a run."""

    rate: Schedule
    epsilon: Schedule
    beta: Schedule
    logged: dict[str, Schedule]  # those that have an effect, by their tags


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
class DQNSettings(EpsilonGreedySettings, DistillationSettings):
    """Deep Q-learning; all counts are in valid environment steps."""

    name: Literal["dqn"]
    network: NetworkSettings
    hidden: tuple[int, ...]
    optimizer: OptimizerSettings
    learning_rate: float
    anneal_learning_rate: Shape
    learning_rate_end: float
    learning_rate_warmup: float
    gamma: float
    batch_size: int
    max_grad_norm: float
    grad_accumulation: int
    compile: Literal["false", "true", "cudagraph", "auto"]
    replay: ReplaySettings
    n_step: int
    double: bool
    dueling: bool
    loss: Literal["huber", "squared"]
    distribution: DistributionSettings
    munchausen: MunchausenSettings
    noisy: NoisySettings
    teacher: DQNTeacherSettings
    clip_reward: bool
    augmentation: Literal["none", "shift"]
    learning_starts: int
    train_every: int
    updates_per_train: int
    target_every: int
    target_tau: float

    takes_masks = True
    action_kinds = (DiscreteActions,)

    def __post_init__(self) -> None:
        validate_hidden(self.hidden)
        names = ("learning_rate", "batch_size", "n_step", "train_every", "updates_per_train")
        validate_positive(self, *names, "target_every", "target_tau", "grad_accumulation")
        validate_non_negative(self, "learning_starts", "max_grad_norm")
        validate_fraction(self, "gamma", "target_tau")
        validate_at_most(self, 1_000, "learning_rate", "learning_rate_end")
        self.optimizer.validate_rate(
            learning_rate=self.learning_rate, learning_rate_end=self.learning_rate_end
        )
        scheduled(self, "learning_rate")
        self.validate_epsilon()
        validate_at_most(
            self, 1e6, "n_step", "batch_size", "grad_accumulation", "updates_per_train"
        )
        validate_at_most(self, 1e30, "max_grad_norm")
        if self.replay.capacity < self.batch_size:
            raise SettingError(
                "replay.capacity",
                self.replay.capacity,
                f"must hold at least one batch (batch_size={self.batch_size})",
            )
        kind = self.distribution.kind
        if kind != "none" and self.loss == "squared":
            reason = f"is not for agent.distribution.kind={kind}, which has a loss of its own"
            raise SettingError("loss", self.loss, reason)

    @property
    def extensions(self) -> tuple[str, ...]:
        """The extensions that are on besides a teacher."""
        return () if self.augmentation == "none" else ("augmentation",)

    def learning_rates(self, total_steps: int) -> Schedule:
        """Return the learning rate over a run."""
        end, warmup = self.learning_rate_end, self.learning_rate_warmup
        return over_the_run(self.anneal_learning_rate, self.learning_rate, end, warmup, total_steps)

    def schedules(self, total_steps: int) -> Schedules:
        """Return the schedules of learning rate, ε and β."""
        r = self.replay
        beta = over_the_run(r.anneal_beta, r.beta_start, r.beta_end, r.beta_warmup, total_steps)
        rate, epsilon = self.learning_rates(total_steps), self.epsilons(total_steps)
        logged = {"train/learning_rate": rate}
        if not self.noisy.enabled:
            logged["train/epsilon"] = epsilon
        if r.prioritized:
            logged["train/beta"] = beta
        return Schedules(rate, epsilon, beta, logged)

    @property
    def unused(self) -> dict[str, str]:
        """Keys without effect, and why."""
        found = dict[str, str]()
        for switch, used, names in UNUSED:
            value = attrgetter(switch)(self)
            if value not in used:
                found |= dict.fromkeys(names, f"agent.{switch}={str(value).lower()}")
        return found

    def expected_updates(self, spec: EnvSpec, total_steps: int) -> int:
        """Return how many updates a run has."""
        del spec
        return total_steps // self.train_every * self.updates_per_train

    def update_batch(self, spec: EnvSpec) -> int:
        """Return the observations of one gradient step."""
        del spec
        return self.batch_size

    def of_rank(self, rank: int, size: int) -> DQNSettings:
        """Return one rank's settings: batch and replay are divided among the ranks."""
        self.validate_single_process()
        if self.batch_size < size:
            reason = f"leaves nothing for some of {size} ranks, which it is divided among"
            raise SettingError("agent.batch_size", self.batch_size, reason)
        batch = self.batch_size // size + (rank < self.batch_size % size)
        replay = replace(self.replay, capacity=-(-self.replay.capacity // size))
        return replace(self, batch_size=batch, replay=replay)

    def validate_fit(self, spec: EnvSpec, total_steps: int) -> None:
        """Refuse environments that these settings do not fit."""
        del total_steps
        self.network.validate_fit(spec)
        if self.augmentation != "none" and len(spec.observation_shape) != 3:
            reason = f"needs images, but {spec.id} is not observed as images alone"
            raise SettingError("agent.augmentation", self.augmentation, reason)

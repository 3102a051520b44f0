"""Bases of algorithms' settings, with their checks.

For gradient steps, rollouts, replays, ε-greedy acting and teachers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import fsum
from operator import attrgetter
from typing import Literal, Self

from typing_extensions import override

from steadyrl.agents.learner.optimizers.settings import OptimizerSettings
from steadyrl.agents.learner.schedules import (
    Curve,
    Schedule,
    UpdateClock,
    over_the_run,
    validate_schedules,
)
from steadyrl.agents.networks.settings import NetworkSettings
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.core.errors import (
    SettingError,
    validate_at_most,
    validate_fraction,
    validate_hidden,
    validate_non_negative,
    validate_positive,
)
from steadyrl.envs.types import EnvSpec

LONGEST_GRAPH = 32  # timesteps of a sequence that is compiled: longer ones take minutes

EPSILON_KEYS = (
    "epsilon_start",
    "epsilon_end",
    "epsilon_fraction",
    "epsilon_warmup",
    "epsilon_delay",
)
PRIORITY_KEYS = (
    "replay.alpha", "replay.beta_start", "replay.beta_end", "replay.anneal_beta",
    "replay.beta_warmup", "replay.normalize_weights",
)  # fmt: skip
# A key, its values for which others have an effect, and these others.
Switch = tuple[str, tuple[object, ...], tuple[str, ...]]
SWITCHES: tuple[Switch, ...] = (("replay.prioritized", (True,), PRIORITY_KEYS),)


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """Base of the settings of algorithms: network, optimiser and gradient steps."""

    network: NetworkSettings
    hidden: tuple[int, ...]
    optimizer: OptimizerSettings
    learning_rate: float
    anneal_learning_rate: Curve
    learning_rate_end: float
    learning_rate_warmup: float
    gamma: float
    max_grad_norm: float
    grad_accumulation: int
    compile: Literal["false", "true", "cudagraph", "auto"]

    def __post_init__(self) -> None:
        validate_hidden(self.hidden)
        validate_positive(self, "learning_rate", "grad_accumulation")
        validate_non_negative(self, "max_grad_norm")
        validate_fraction(self, "gamma")
        validate_at_most(self, 1_000, "learning_rate", "learning_rate_end")
        validate_at_most(self, 1e6, "grad_accumulation")
        validate_at_most(self, 1e30, "max_grad_norm")
        self.optimizer.validate_rate(
            learning_rate=self.learning_rate, learning_rate_end=self.learning_rate_end
        )
        validate_schedules(self, "learning_rate")

    def learning_rates(self, total_steps: int) -> Schedule:
        """Return the learning rate over a run."""
        end, warmup = self.learning_rate_end, self.learning_rate_warmup
        return over_the_run(self.anneal_learning_rate, self.learning_rate, end, warmup, total_steps)

    def validate_fit(self, spec: EnvSpec, total_steps: int) -> None:
        """Refuse environments and run lengths that these settings do not fit."""
        del total_steps
        self.network.validate_fit(spec)


@dataclass(frozen=True, kw_only=True)
class RolloutAgentSettings(LearnerSettings):
    """Base of the settings of algorithms that learn from each rollout for several epochs.

    `rollout_steps`: timesteps of all environments.
    """

    rollout_steps: int
    epochs: int
    minibatches: int

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_positive(self, "rollout_steps", "epochs", "minibatches")
        validate_at_most(self, 1_000, "epochs")

    def num_minibatches(self, samples: int) -> int:
        """Return the number of minibatches of a rollout with `samples` samples."""
        del samples
        return self.minibatches

    def largest_minibatch(self, samples: int) -> int:
        """Return the size of the largest minibatch."""
        return -(-samples // self.num_minibatches(samples))

    def expected_updates(self, spec: EnvSpec, total_steps: int) -> int:
        """Return how many updates a run has."""
        samples = self.rollout_steps * spec.num_envs
        return total_steps // samples * self.epochs * self.num_minibatches(samples)

    def update_batch(self, spec: EnvSpec) -> int:
        """Return the observations of one gradient step."""
        return self.largest_minibatch(self.rollout_steps * spec.num_envs)

    @override
    def validate_fit(self, spec: EnvSpec, total_steps: int) -> None:
        super().validate_fit(spec, total_steps)
        samples = self.rollout_steps * spec.num_envs
        if -(-total_steps // spec.num_envs) < self.rollout_steps:
            raise SettingError(
                "total_steps",
                total_steps,
                f"is shorter than one rollout of {samples:,} steps, nothing would be learned: "
                "raise it, or lower agent.rollout_steps or env.num_envs",
            )
        self.validate_minibatches(samples)

    def validate_minibatches(self, samples: int) -> None:
        """Refuse more minibatches than samples."""
        self.validate_at_most_samples("minibatches", samples)

    def validate_at_most_samples(self, name: str, samples: int) -> None:
        """Refuse a value above the number of samples of a rollout."""
        if getattr(self, name) > samples:
            reason = f"a rollout has {samples:,} samples (agent.rollout_steps × env.num_envs)"
            raise SettingError(f"agent.{name}", getattr(self, name), reason)


@dataclass(frozen=True, kw_only=True)
class ReplayAgentSettings(LearnerSettings):
    """Base of the settings of algorithms with a replay; all counts are in valid environment steps.

    `switches`: the keys that decide whether others have an effect. A subclass adds its own.
    """

    batch_size: int
    replay: ReplaySettings
    n_step: int
    clip_reward: bool
    learning_starts: int
    train_every: int
    updates_per_train: int
    target_every: int
    target_tau: float

    switches = SWITCHES

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("batch_size", "n_step", "train_every", "updates_per_train")
        validate_positive(self, *names, "target_every", "target_tau")
        validate_non_negative(self, "learning_starts")
        validate_fraction(self, "target_tau")
        validate_at_most(self, 1e6, "n_step", "batch_size", "updates_per_train")
        if self.replay.capacity < self.batch_size:
            raise SettingError(
                "replay.capacity",
                self.replay.capacity,
                f"must hold at least one batch (batch_size={self.batch_size})",
            )

    def betas(self, total_steps: int) -> Schedule:
        """Return the exponent β of importance weights over a run."""
        r = self.replay
        return over_the_run(r.anneal_beta, r.beta_start, r.beta_end, r.beta_warmup, total_steps)

    def clock(self, total_steps: int) -> UpdateClock:
        """Return the clock of a run's updates."""
        return UpdateClock(
            learning_starts=self.learning_starts,
            train_every=self.train_every,
            updates_per_train=self.updates_per_train,
            target_every=self.target_every,
            total_steps=total_steps,
        )

    @property
    def unused(self) -> dict[str, str]:
        """Keys without effect, and why."""
        found = dict[str, str]()
        for switch, used, names in self.switches:
            value = attrgetter(switch)(self)
            if value not in used:
                found |= dict.fromkeys(names, f"agent.{switch}={str(value).lower()}")
        return found

    def unused_in(self, spec: EnvSpec, total_steps: int) -> dict[str, str]:
        """Return keys without effect in such a run, and why."""
        del spec
        if self.target_every <= total_steps:
            return {}
        why = f"the run ends at step {total_steps:,}, before the target network is updated"
        return dict.fromkeys(("target_every", "target_tau"), why)

    def expected_updates(self, spec: EnvSpec, total_steps: int) -> int:
        """Return how many updates a run has."""
        del spec
        return total_steps // self.train_every * self.updates_per_train

    def update_batch(self, spec: EnvSpec) -> int:
        """Return the observations of one gradient step."""
        del spec
        return self.batch_size

    def of_rank(self, rank: int, size: int) -> Self:
        """Return one rank's settings: batch and replay are divided among the ranks."""
        if self.batch_size < size:
            reason = f"leaves nothing for some of {size} ranks, which it is divided among"
            raise SettingError("agent.batch_size", self.batch_size, reason)
        batch = self.batch_size // size + (rank < self.batch_size % size)
        replay = replace(self.replay, capacity=-(-self.replay.capacity // size))
        return replace(self, batch_size=batch, replay=replay)


@dataclass(frozen=True, kw_only=True)
class EpsilonGreedySettings:
    """Base of the settings of algorithms that act ε-greedily."""

    epsilon_start: float
    epsilon_end: float
    epsilon_fraction: float
    anneal_epsilon: Curve
    epsilon_warmup: float
    epsilon_delay: float

    def validate_epsilon(self) -> None:
        """Check the schedule of ε."""
        validate_fraction(self, *EPSILON_KEYS)
        if fsum((self.epsilon_warmup, self.epsilon_delay, self.epsilon_fraction)) > 1:
            name = "epsilon_delay" if self.epsilon_delay else "epsilon_warmup"
            reason = f"epsilon_fraction={self.epsilon_fraction:g} more are beyond the run's end"
            raise SettingError(name, getattr(self, name), reason)
        if self.anneal_epsilon == "constant" and self.epsilon_end != self.epsilon_start:
            raise SettingError(
                "epsilon_end",
                self.epsilon_end,
                f"is never reached from epsilon_start={self.epsilon_start:g} with "
                "agent.anneal_epsilon=constant: make both the same, or anneal",
            )

    @property
    def unused_epsilon(self) -> dict[str, str]:
        """Keys of ε without effect, and why."""
        if self.anneal_epsilon != "constant":
            return {}
        return dict.fromkeys(("epsilon_fraction", "epsilon_delay"), "agent.anneal_epsilon=constant")

    def epsilons(self, total_steps: int) -> Schedule:
        """Return the probability of a random action over a run."""
        return Schedule(
            self.epsilon_start,
            self.epsilon_end,
            self.anneal_epsilon,
            self.epsilon_fraction * total_steps,
            self.epsilon_warmup * total_steps,
            self.epsilon_delay * total_steps,
        )


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """The teacher's policy, the weight of its loss, and how long it counts and acts."""

    policy: str | None
    coef: float
    fraction: float
    acts: float

    def __post_init__(self) -> None:
        validate_non_negative(self, "coef")
        validate_at_most(self, 1e6, "coef")
        validate_fraction(self, "fraction", "acts")
        if self.policy is not None and not self.policy.strip():
            raise SettingError("policy", self.policy, "name a run, a policy or module:name")

    def coefs(self, total_steps: int) -> Schedule:
        """Return the weight of the teacher's loss over a run."""
        return Schedule(self.coef, 0.0, "linear", self.fraction * total_steps)

    def acting(self, total_steps: int) -> Schedule:
        """Return the probability that the teacher acts, over a run."""
        return Schedule(float(self.acts > 0), 0.0, "linear", self.acts * total_steps)


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """Base of the settings of algorithms that support a teacher."""

    teacher: TeacherSettings

    @property
    def unused_teacher(self) -> dict[str, str]:
        """The teacher's keys without effect, and why."""
        teacher = self.teacher
        names = {each.name for each in fields(teacher)} - {"policy", "acts"}  # of its loss
        if teacher.policy is None:
            return {f"teacher.{name}": "agent.teacher.policy=null" for name in (*names, "acts")}
        off = next((name for name in ("coef", "fraction") if getattr(teacher, name) == 0), None)
        if off is None:
            return {}
        why = f"agent.teacher.{off}=0"
        if teacher.acts == 0:
            return {"teacher.policy": f"{why} and agent.teacher.acts=0"}
        return {f"teacher.{name}": why for name in names - {off}}

    def validate_single_process(self) -> None:
        """Refuse a teacher with several processes."""
        if self.teacher.policy is not None:
            reason = "teaches one process only: start the run without torchrun"
            raise SettingError("agent.teacher.policy", self.teacher.policy, reason)

"""Types and checks of `agent.*` keys of several algorithms: ε-greedy exploration, and teachers."""

from __future__ import annotations

from dataclasses import dataclass

from steadyrl.agents.learner.schedules import Schedule, Shape
from steadyrl.core.errors import (
    SettingError,
    validate_at_most,
    validate_fraction,
    validate_non_negative,
)

EPSILON = ("epsilon_start", "epsilon_end", "epsilon_fraction", "epsilon_warmup", "epsilon_delay")


@dataclass(frozen=True, kw_only=True)
class EpsilonGreedySettings:
    """Base of the settings of algorithms that act ε-greedily."""

    epsilon_start: float
    epsilon_end: float
    epsilon_fraction: float
    anneal_epsilon: Shape
    epsilon_warmup: float
    epsilon_delay: float

    def validate_epsilon(self) -> None:
        """Check the schedule of ε."""
        validate_fraction(self, *EPSILON)
        if self.epsilon_warmup + self.epsilon_delay + self.epsilon_fraction > 1:
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

    def validate_single_process(self) -> None:
        """Refuse a teacher with several processes."""
        if self.teacher.policy is not None:
            reason = "teaches one process only: start the run without torchrun"
            raise SettingError("agent.teacher.policy", self.teacher.policy, reason)

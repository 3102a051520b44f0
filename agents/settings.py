"""Types and checks of the `agent.teacher.*` keys, which PPO and DQN share."""

from __future__ import annotations

from dataclasses import dataclass

from steadyrl.agents.learner.schedules import Schedule
from steadyrl.core.errors import (
    SettingError,
    validate_at_most,
    validate_fraction,
    validate_non_negative,
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

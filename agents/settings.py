"""Types and checks of the `agent.teacher*` keys, which PPO and DQN share."""

from __future__ import annotations

from dataclasses import dataclass

from steadyrl.agents.learner.schedules import Schedule
from steadyrl.core.errors import SettingError, at_most, fraction, zero_or_more


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """Who teaches, how much that counts, and how long."""

    teacher: str | None
    teacher_coef: float
    teacher_fraction: float
    teacher_leads: float

    def teacher_coefs(self, total_steps: int) -> Schedule:
        """Return what the teacher's loss counts for over a run."""
        return Schedule(self.teacher_coef, 0.0, "linear", self.teacher_fraction * total_steps)

    def teacher_shares(self, total_steps: int) -> Schedule:
        """Return the probability that the teacher acts, over a run."""
        return Schedule(
            float(self.teacher_leads > 0), 0.0, "linear", self.teacher_leads * total_steps
        )

    def refuse_odd_teacher(self) -> None:
        """Refuse what no teacher can have."""
        zero_or_more(self, "teacher_coef")
        at_most(self, 1e6, "teacher_coef")
        fraction(self, "teacher_fraction", "teacher_leads")
        if self.teacher is not None and not self.teacher.strip():
            raise SettingError("teacher", self.teacher, "name a run, a policy or module:name")

    def refuse_several_ranks(self) -> None:
        """Refuse to be taught in several processes."""
        if self.teacher is not None:
            reason = "teaches one process only: start the run without torchrun"
            raise SettingError("agent.teacher", self.teacher, reason)

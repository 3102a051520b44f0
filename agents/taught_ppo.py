"""PPO with a teacher: what it says of a rollout is asked once, when that is full."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from typing_extensions import override

from agents.base import Actor, Decision
from agents.ppo import PPO
from agents.ppo_loss import score
from agents.ppo_settings import PPOSettings
from agents.teacher import Teacher
from agents.teaching import Led, Teaching
from buffers.taught_rollout import TaughtRollout
from envs.types import EnvSpec, Rows, RunRows, Step


class TaughtPPO(PPO):
    """PPO whose rows have lessons beside them."""

    state_names: ClassVar[tuple[str, ...]] = (*PPO.state_names, "_teaching")

    def __init__(
        self,
        settings: PPOSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
        teacher: Teacher,
    ) -> None:
        super().__init__(settings, spec, device=device, seed=seed, total_steps=total_steps)
        share = settings.teacher_shares(total_steps)
        self._teaching = Teaching(
            teacher,
            self._head,
            share,
            num_envs=spec.num_envs,
            seed=seed,
            now=lambda: self._steps,
        )

    @property
    def teacher_coef(self) -> float:
        """What the teacher's loss counts for in the update at the end of the rollout under way."""
        return self._now(self._settings.teacher_coefs)

    @property
    @override
    def _numbers(self) -> tuple[float, ...]:
        return self.teacher_coef, *super()._numbers

    @override
    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        actor = super().actor(num_envs, explore=explore)
        if not explore or not self._settings.teacher_leads:
            return actor
        return Led(actor, self._teaching, self._head)

    @property
    def _rows(self) -> TaughtRollout:
        assert isinstance(self._rollout, TaughtRollout)
        return self._rollout

    @property
    def _first(self) -> bool:
        """Whether rows are stored as the normaliser sees them, which is not what a teacher sees."""
        return self._observations is not None and self._begun == 0

    @override
    def observe(self, decision: Decision, step: Step) -> None:
        t, rollout = self._rollout.position, self._rows
        rollout.own[t] = torch.from_numpy(~self._teaching.led).to(self._device)
        if self._first:
            self._teaching.tell_(decision.obs, rollout.lesson[t])
        super().observe(decision, step)

    @override
    def collect(self, decision: Decision, run: RunRows | None, steps: int) -> Rows | None:
        if self._teaching.led.any() or self._teaching.share > 0:
            return None
        return super().collect(decision, run, steps)

    @override
    def _finish_rollout(self) -> None:
        first = self._first
        super()._finish_rollout()
        rollout = self._rows
        if self._actor.complete and not bool(rollout.own.all()):
            # What was said of the student's own action is not about the teacher's.
            with torch.inference_mode():
                score(rollout, self._learner.forward, self._head, self._piece)
        if not first and self.teacher_coef > 0:
            obs, lesson = rollout.obs.flatten(0, 1), rollout.lesson.flatten(0, 1)
            self._teaching.tell_all_(obs, lesson, self._piece)

    @override
    def scalars(self) -> dict[str, Any]:
        numbers = {"train/teacher_coef": self.teacher_coef}
        if self._settings.teacher_leads:
            numbers["train/teacher_share"] = self._teaching.share
        return super().scalars() | numbers

"""DQN with a teacher: what it says is asked for every batch that is drawn."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from agents.base import Actor, Decision
from agents.dqn import DQN
from agents.dqn_settings import DQNSettings
from agents.heads import build_head
from agents.taught_loss import TaughtReplayBatch
from agents.teacher import Teacher
from agents.teaching import Led, Teaching, empty_lesson
from envs.types import EnvSpec, Rows, RunRows


class TaughtDQN(DQN):
    """DQN whose batches have lessons beside them, in memory that is always the same."""

    state_names: ClassVar[tuple[str, ...]] = (*DQN.state_names, "_teaching")

    def __init__(
        self,
        settings: DQNSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
        teacher: Teacher,
    ) -> None:
        super().__init__(settings, spec, device=device, seed=seed, total_steps=total_steps)
        self._coefs = settings.teacher_coefs(total_steps)
        self._choice = build_head(spec.action, device)
        drawn = settings.batch_size * settings.grad_accumulation
        self._lesson = empty_lesson(self._choice, drawn, device)
        self._teaching = Teaching(
            teacher,
            self._choice,
            settings.teacher_shares(total_steps),
            num_envs=spec.num_envs,
            seed=seed,
            now=lambda: self._steps,
        )

    @property
    def teacher_coef(self) -> float:
        """What the teacher's loss counts for at this step."""
        return self._coefs.at(self._steps)

    @override
    def _numbers(self) -> tuple[float | Tensor, ...]:
        return self.teacher_coef, *super()._numbers()

    @override
    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        actor = super().actor(num_envs, explore=explore)
        if not explore or not self._settings.teacher_leads:
            return actor
        return Led(actor, self._teaching, self._choice)

    @override
    def collect(self, decision: Decision, run: RunRows | None, steps: int) -> Rows | None:
        if self._teaching.led.any() or self._teaching.share > 0:
            return None
        return super().collect(decision, run, steps)

    @override
    def _draw(self, beta: float) -> Any:
        batch = super()._draw(beta)
        if self.teacher_coef > 0:  # else what it says counts for nothing
            self._teaching.tell_(batch.obs, self._lesson)
        return TaughtReplayBatch(*batch, self._lesson)

    @override
    def scalars(self) -> dict[str, Any]:
        numbers = {"train/teacher_coef": self.teacher_coef}
        if self._settings.teacher_leads:
            numbers["train/teacher_share"] = self._teaching.share
        return super().scalars() | numbers

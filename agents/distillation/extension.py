"""A teacher as an extension of DQN: its targets beside each replay batch, its turns at acting."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.base import Actor
from steadyrl.agents.distillation.loss import (
    DistilledReplayBatch,
    add_teacher_loss,
    distilled_td_loss,
)
from steadyrl.agents.distillation.teacher import (
    Teacher,
    TeacherGuide,
    TeacherGuidedActor,
    allocate_teacher_target,
)
from steadyrl.agents.dqn.build import DQNParts
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.loss_spec import LossSpec
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.distributions import build_head
from steadyrl.envs.types import EnvSpec


class DQNTeacher(Extension):
    """Add a distillation term to DQN's loss, with teacher targets in a static buffer."""

    state_names = ("_teacher_guide",)

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
        self._settings = settings.teacher
        self._coefs = settings.teacher.coefs(total_steps)
        self._head = build_head(spec.action, device)
        self._targets = allocate_teacher_target(self._head, settings.batch_size, device)
        self._steps = lambda: 0  # so far, of the agent's clock
        self._teacher_guide = TeacherGuide(
            teacher,
            self._head,
            settings.teacher.acting(total_steps),
            num_envs=spec.num_envs,
            seed=seed,
            now=lambda: self._steps(),
            masks=Masks.of(spec, device),
        )

    @override
    def attach(self, parts: DQNParts) -> None:
        self._steps = lambda: parts.clock.steps

    @override
    def loss_spec(self, spec: LossSpec) -> LossSpec:
        assert isinstance(spec.loss, partial)
        shared = {name: spec.loss.keywords[name] for name in ("head", "masks")}
        temperature = self._settings.temperature
        return add_teacher_loss(
            spec, partial(distilled_td_loss, loss=spec.loss, temperature=temperature, **shared)
        )

    @property
    def teacher_coef(self) -> float:
        """Coefficient of the distillation loss at this step."""
        return self._coefs.at(self._steps())

    @override
    def loss_scalars(self) -> tuple[float | Tensor, ...]:
        return (self.teacher_coef,)

    @override
    def batch(self, batch: Any) -> Any:
        if self.teacher_coef > 0:  # else the targets have no effect
            self._teacher_guide.write_targets_(batch.obs, self._targets)
        return DistilledReplayBatch(*batch, self._targets)  # type: ignore[call-arg, unused-ignore]

    @override
    def actor(self, actor: Actor) -> Actor:
        if not self._settings.acts:
            return actor
        return TeacherGuidedActor(actor, self._teacher_guide, self._head)

    @override
    def allows_blocks(self) -> bool:
        return not (self._teacher_guide.teacher_acted.any() or self._teacher_guide.teacher_prob > 0)

    @override
    def scalars(self) -> dict[str, float]:
        numbers = {"train/teacher_coef": self.teacher_coef}
        if self._settings.acts:
            numbers["train/teacher_share"] = self._teacher_guide.teacher_prob
        return numbers

"""Teachers as extensions: their turns at acting, and their targets beside each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.base import Actor, Decision
from steadyrl.agents.distillation.loss import (
    add_teacher_loss,
    distilled_ppo_loss,
    distilled_td_loss,
    student_ppo_loss,
    with_student_samples,
)
from steadyrl.agents.distillation.teacher import (
    Teacher,
    TeacherGuide,
    TeacherGuidedActor,
    allocate_teacher_target,
    teacher_target_spec,
)
from steadyrl.agents.dqn.build import DQNParts
from steadyrl.agents.dqn.policy import build_q_head
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.loss_spec import LossSpec
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.distributions import Head, build_head
from steadyrl.agents.ppo.build import PPOParts
from steadyrl.agents.ppo.loss import evaluate_batch, evaluate_sequences
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.agents.settings import DistillationSettings
from steadyrl.buffers.rollout.buffer import SampleField
from steadyrl.envs.types import EnvSpec


class TeacherExtension(Extension):
    """What teachers of all algorithms have: turns at acting, the loss's coefficient."""

    state_names: ClassVar[tuple[str, ...]] = ("_teacher_guide",)

    def __init__(
        self,
        settings: DistillationSettings,
        spec: EnvSpec,
        head: Head,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
        teacher: Teacher,
    ) -> None:
        self._settings, self._head = settings.teacher, head
        self._coefs = settings.teacher.coefs(total_steps)
        self._steps: Callable[[], int] = lambda: 0  # so far, of the agent's clock
        self._teacher_guide = TeacherGuide(
            teacher,
            head,
            settings.teacher.acting(total_steps),
            num_envs=spec.num_envs,
            seed=seed,
            now=lambda: self._steps(),
            masks=Masks.of(spec, device),
        )

    @property
    def teacher_coef(self) -> float:
        """Coefficient of the distillation loss in the next update."""
        return self._coefs.at(self._steps())

    @override
    def loss_scalars(self) -> tuple[float | Tensor, ...]:
        return (self.teacher_coef,)

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


class DQNTeacher(TeacherExtension):
    """Add a distillation term to DQN's loss, with teacher targets in a static buffer."""

    def __init__(
        self, settings: DQNSettings, spec: EnvSpec, *, device: torch.device, **others: Any
    ) -> None:
        head = build_head(spec.action, device)
        super().__init__(settings, spec, head, device=device, **others)
        self._distillation: dict[str, Any] = {
            "temperature": settings.teacher.temperature,
            "head": build_q_head(settings, device),
            "masks": Masks.of(spec, device),
        }
        self._targets = allocate_teacher_target(head, settings.batch_size, device)

    @override
    def attach(self, parts: DQNParts) -> None:
        self._steps = lambda: parts.clock.steps

    @override
    def loss_spec(self, spec: LossSpec) -> LossSpec:
        loss = partial(distilled_td_loss, loss=spec.loss, **self._distillation)
        return add_teacher_loss(spec, loss)

    @override
    def replay_fields(self, batch: Any) -> Mapping[str, Tensor]:
        if self.teacher_coef > 0:  # else the targets have no effect
            self._teacher_guide.write_targets_(batch.obs, self._targets)
        return {"teacher_target": self._targets}  # [B, A] the teacher's action probabilities


class PPOTeacher(TeacherExtension):
    """Add a distillation term to PPO's loss, with teacher targets beside a rollout's samples.

    The teacher is queried for full rollouts, and in the first at each timestep: observations are
    stored normalised there, and teachers need raw ones.
    """

    _parts: PPOParts

    def __init__(
        self, settings: PPOSettings, spec: EnvSpec, *, device: torch.device, **others: Any
    ) -> None:
        head = build_head(spec.action, device, scaled=settings.scale_actions)
        super().__init__(settings, spec, head, device=device, **others)
        recurrent = settings.is_recurrent
        self._evaluate = evaluate_sequences if recurrent else evaluate_batch

    @override
    def rollout_fields(self) -> Mapping[str, SampleField]:
        target = SampleField(*teacher_target_spec(self._head))
        # `student_acted`: the action was the student's, not the teacher's.
        return {"teacher_target": target, "student_acted": SampleField((), torch.bool, fill=True)}

    @override
    def loss_spec(self, spec: LossSpec) -> LossSpec:
        if self._settings.acts:
            student = partial(
                student_ppo_loss, loss=spec.loss, evaluate=self._evaluate, metrics=spec.metrics
            )
            preprocess = partial(with_student_samples, preprocess=spec.preprocess_batch)
            spec = replace(spec, loss=student, preprocess_batch=preprocess)
        return add_teacher_loss(spec, partial(distilled_ppo_loss, loss=spec.loss, head=self._head))

    @override
    def attach(self, parts: PPOParts) -> None:
        self._parts, self._steps = parts, lambda: parts.clock.steps

    @property
    @override
    def teacher_coef(self) -> float:
        return self._parts.clock.at_rollout_start(self._coefs)

    @override
    def before_storing(self, decision: Decision) -> None:
        rollout, guide = self._parts.rollout, self._teacher_guide
        t, fields = rollout.position, rollout.fields
        fields["student_acted"][t] = rollout.to_device(~guide.teacher_acted)
        if self._parts.targets.observations.stores_normalised and self.teacher_coef > 0:
            guide.write_targets_(decision.obs, fields["teacher_target"][t])

    @override
    def after_targets(self, next_obs: Tensor) -> None:
        rollout, advantages = self._parts.rollout, self._parts.targets
        evaluator, fields = advantages.evaluator, rollout.fields
        if evaluator.actor_evaluates and not bool(fields["student_acted"].all()):
            # Stored log-probabilities are of the student's actions, not of the teacher's.
            with torch.inference_mode():
                evaluator.evaluate(rollout)
        if not advantages.observations.stores_normalised and self.teacher_coef > 0:
            obs, target = rollout.obs.flatten(0, 1), fields["teacher_target"].flatten(0, 1)
            self._teacher_guide.write_targets_chunked_(obs, target, evaluator.max_batch_size)

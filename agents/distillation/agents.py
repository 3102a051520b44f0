"""PPO with a teacher, queried for full rollouts."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from typing_extensions import override

from steadyrl.agents.base import Actor, Agent, Decision
from steadyrl.agents.distillation.loss import (
    add_teacher_loss,
    distilled_ppo_loss,
)
from steadyrl.agents.distillation.rollout import (
    DistilledBatch,
    DistilledRollout,
    DistilledSequenceRollout,
)
from steadyrl.agents.distillation.teacher import (
    Teacher,
    TeacherGuide,
    TeacherGuidedActor,
    teacher_target_spec,
)
from steadyrl.agents.learner.loss_spec import LossSpec
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import Head
from steadyrl.agents.ppo.agent import PPO
from steadyrl.agents.ppo.build import build_loss_spec, init_rollout
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.agents.settings import DistillationSettings
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.envs.types import BlockResult, EnvSpec, Step, StepMany


class Distilled(Agent):
    """What agents with a teacher share: the teacher's turns at acting, and its metrics."""

    _settings: DistillationSettings
    _teacher_guide: TeacherGuide
    _head: Head
    _steps: int

    @property
    @abstractmethod
    def teacher_coef(self) -> float:
        """Coefficient of the distillation loss in the next update."""

    def _init_teacher(
        self, teacher: Teacher, head: Head, spec: EnvSpec, seed: int, total_steps: int
    ) -> None:
        schedule, self._head = self._settings.teacher.acting(total_steps), head
        self._teacher_guide = TeacherGuide(
            teacher,
            head,
            schedule,
            num_envs=spec.num_envs,
            seed=seed,
            now=lambda: self._steps,
            masks=Masks.of(spec, self.device),
        )

    @override
    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        actor = super().actor(num_envs, explore=explore)  # type: ignore[safe-super]
        if not explore or not self._settings.teacher.acts:
            return actor
        return TeacherGuidedActor(actor, self._teacher_guide, self._head)

    @override
    def collect_block(
        self, decision: Decision, run: StepMany | None, steps: int
    ) -> BlockResult | None:
        if self._teacher_guide.teacher_acted.any() or self._teacher_guide.teacher_prob > 0:
            return None
        return super().collect_block(decision, run, steps)

    @override
    def scalars(self) -> dict[str, Any]:
        numbers = {"train/teacher_coef": self.teacher_coef}
        if self._settings.teacher.acts:
            numbers["train/teacher_share"] = self._teacher_guide.teacher_prob
        return super().scalars() | numbers


class DistilledPPO(Distilled, PPO):
    """PPO with teacher targets beside its samples."""

    state_names: ClassVar[tuple[str, ...]] = (*PPO.state_names, "_teacher_guide")
    _settings: PPOSettings

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
        self._init_teacher(teacher, self._head, spec, seed, total_steps)

    @override
    def _build_loss_spec(self, max_batch_size: int) -> LossSpec:
        switches: Any = {
            "loss": distilled_ppo_loss,
            "batch": DistilledBatch,
            "gathers_in_graph": self._gathers_in_graph,
        }
        base_spec = build_loss_spec(self._settings, self._head, max_batch_size, **switches)
        return add_teacher_loss(base_spec, base_spec.loss)

    @override
    def _init_rollout(
        self, spec: EnvSpec, network: ActorCritic, device: torch.device, copies: int
    ) -> RolloutBuffer:
        shape, dtype = teacher_target_spec(self._head)
        return init_rollout(
            self._settings,
            spec,
            self._head,
            network,
            device,
            copies=copies,
            kinds=(DistilledRollout, DistilledSequenceRollout),
            extra_sample_bytes=math.prod(shape) * dtype.itemsize + 1,
            teacher_target_shape=shape,
            teacher_target_dtype=dtype,
        )

    @property
    @override
    def teacher_coef(self) -> float:
        return self._anneal(self._settings.teacher.coefs)

    @property
    @override
    def _loss_scalars(self) -> tuple[float, ...]:
        return self.teacher_coef, *super()._loss_scalars

    @property
    def _distilled_rollout(self) -> DistilledRollout:
        assert isinstance(self._rollout, DistilledRollout)
        return self._rollout

    @property
    def _stores_normalised_obs(self) -> bool:
        """Whether observations are stored normalised (first rollout); teachers need raw ones."""
        return self._obs_normaliser is not None and self._steps_at_rollout_start == 0

    @override
    def observe(self, decision: Decision, step: Step) -> None:
        t, rollout = self._rollout.position, self._distilled_rollout
        rollout.student_acted[t] = torch.from_numpy(~self._teacher_guide.teacher_acted).to(
            self.device
        )
        if self._stores_normalised_obs:
            self._teacher_guide.write_targets_(decision.obs, rollout.teacher_target[t])
        super().observe(decision, step)

    @override
    def _compute_advantages(self) -> None:
        stores_normalised_obs = self._stores_normalised_obs
        super()._compute_advantages()
        rollout = self._distilled_rollout
        if self._actor.stores_log_prob and not bool(rollout.student_acted.all()):
            # Stored log-probabilities are of the student's actions, not of the teacher's.
            with torch.inference_mode():
                self._evaluator(rollout)
        if not stores_normalised_obs and self.teacher_coef > 0:
            obs, teacher_target = rollout.obs.flatten(0, 1), rollout.teacher_target.flatten(0, 1)
            self._teacher_guide.write_targets_chunked_(
                obs, teacher_target, self._evaluator.max_batch_size
            )

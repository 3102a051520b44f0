"""PPO and DQN with a teacher: what it says is asked of a full rollout, or of every batch drawn."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.base import Actor, Agent, Decision
from steadyrl.agents.distillation.loss import (
    TaughtReplayBatch,
    taught_ppo_loss,
    taught_td_loss,
    with_teacher,
)
from steadyrl.agents.distillation.rollout import TaughtBatch, TaughtRollout, TaughtSequenceRollout
from steadyrl.agents.distillation.teacher import Led, Teacher, Teaching, empty_lesson, lesson_of
from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.learner.loss_spec import Recipe
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import Head, build_head
from steadyrl.agents.ppo.agent import PPO
from steadyrl.agents.ppo.build import recipe_of, start_rollout
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.agents.settings import TaughtSettings
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.envs.types import BlockResult, EnvSpec, Step, StepMany


class Taught(Agent):
    """What agents with a teacher have alike: its turns at acting, and what is told of it."""

    _settings: TaughtSettings
    _teaching: Teaching
    _head: Head
    _steps: int

    @property
    @abstractmethod
    def teacher_coef(self) -> float:
        """What the teacher's loss counts for in the next update."""

    def _learn_from(
        self, teacher: Teacher, head: Head, spec: EnvSpec, seed: int, total_steps: int
    ) -> None:
        share, self._head = self._settings.teacher.acting(total_steps), head
        self._teaching = Teaching(
            teacher,
            head,
            share,
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
        return Led(actor, self._teaching, self._head)

    @override
    def collect_block(
        self, decision: Decision, run: StepMany | None, steps: int
    ) -> BlockResult | None:
        if self._teaching.led.any() or self._teaching.share > 0:
            return None
        return super().collect_block(decision, run, steps)

    @override
    def scalars(self) -> dict[str, Any]:
        numbers = {"train/teacher_coef": self.teacher_coef}
        if self._settings.teacher.acts:
            numbers["train/teacher_share"] = self._teaching.share
        return super().scalars() | numbers


class TaughtDQN(Taught, DQN):
    """DQN whose batches have lessons beside them, in memory that is always the same."""

    state_names: ClassVar[tuple[str, ...]] = (*DQN.state_names, "_teaching")
    _settings: DQNSettings

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
        self._coefs = settings.teacher.coefs(total_steps)
        self._learn_from(teacher, build_head(spec.action, device), spec, seed, total_steps)
        self._lesson = empty_lesson(self._head, settings.batch_size, device)

    @override
    def _recipe(self, device: torch.device, masks: Masks | None) -> Recipe:
        own, temperature = super()._recipe(device, masks), self._settings.teacher.temperature
        assert isinstance(own.loss, partial)
        return with_teacher(
            own, partial(taught_td_loss, temperature=temperature, **own.loss.keywords)
        )

    @property
    @override
    def teacher_coef(self) -> float:
        return self._coefs.at(self._steps)

    @override
    def _numbers(self) -> tuple[float | Tensor, ...]:
        return self.teacher_coef, *super()._numbers()

    @override
    def _draw(self, beta: float) -> Any:
        batch = super()._draw(beta)
        if self.teacher_coef > 0:  # else what it says counts for nothing
            self._teaching.tell_(batch.obs, self._lesson)
        return TaughtReplayBatch(*batch, self._lesson)


class TaughtPPO(Taught, PPO):
    """PPO whose rows have lessons beside them."""

    state_names: ClassVar[tuple[str, ...]] = (*PPO.state_names, "_teaching")
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
        self._learn_from(teacher, self._head, spec, seed, total_steps)

    @override
    def _recipe(self, rows: int) -> Recipe:
        switches: Any = {"loss": taught_ppo_loss, "batch": TaughtBatch, "picks": self._picks}
        own = recipe_of(self._settings, self._head, rows, **switches)
        return with_teacher(own, own.loss)

    @override
    def _start_rollout(
        self, spec: EnvSpec, network: ActorCritic, device: torch.device, copies: int
    ) -> RolloutBuffer:
        shape, dtype = lesson_of(self._head)
        return start_rollout(
            self._settings,
            spec,
            self._head,
            network,
            device,
            copies=copies,
            kinds=(TaughtRollout, TaughtSequenceRollout),
            row_extra=math.prod(shape) * dtype.itemsize + 1,
            lesson_shape=shape,
            lesson_dtype=dtype,
        )

    @property
    @override
    def teacher_coef(self) -> float:
        return self._now(self._settings.teacher.coefs)

    @property
    @override
    def _numbers(self) -> tuple[float, ...]:
        return self.teacher_coef, *super()._numbers

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
        rollout.own[t] = torch.from_numpy(~self._teaching.led).to(self.device)
        if self._first:
            self._teaching.tell_(decision.obs, rollout.lesson[t])
        super().observe(decision, step)

    @override
    def _finish_rollout(self) -> None:
        first = self._first
        super()._finish_rollout()
        rollout = self._rows
        if self._actor.complete and not bool(rollout.own.all()):
            # What was said of the student's own action is not about the teacher's.
            with torch.inference_mode():
                self._score(rollout)
        if not first and self.teacher_coef > 0:
            obs, lesson = rollout.obs.flatten(0, 1), rollout.lesson.flatten(0, 1)
            self._teaching.tell_all_(obs, lesson, self._score.rows)

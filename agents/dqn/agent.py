"""DQN (Mnih et al. 2015) with double, dueling, prioritised and n-step options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.base import Actor, Decision, LearningStart, PendingStep
from steadyrl.agents.dqn.build import build_parts
from steadyrl.agents.dqn.policy import build_policy, build_sampling_policy
from steadyrl.agents.dqn.sampler import sampler_of_ranks
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.extension import ExtensibleAgent, Extension, with_fields
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.interrupt import Interrupted
from steadyrl.agents.learner.loss_spec import LossScalars
from steadyrl.agents.learner.schedules import Due
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.buffers.replay.buffer import ReplayBatch, ReplayBuffer
from steadyrl.core.metrics import Metrics
from steadyrl.envs.types import BlockResult, EnvSpec, Step, StepMany


class DQN(ExtensibleAgent):
    """Act ε-greedily or with noisy weights, store every step, learn from replay samples."""

    # Updates read complete transitions only, never the timestep in progress.
    can_update_during_step = True
    state_names = ("_learner", "_target", "_replay", "_actor", "_started")

    def __init__(
        self,
        settings: DQNSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
        extensions: Sequence[Extension] = (),
    ) -> None:
        parts = build_parts(
            settings, spec, extensions, device=device, seed=seed, total_steps=total_steps
        )
        self._settings, self._actions, self._num_envs = settings, parts.actions, spec.num_envs
        self._clock, self._schedules = parts.clock, parts.schedules
        self._learner, self._target = parts.learner, parts.target
        self._replay, self._sampler = parts.replay, parts.sampler
        self._actor, self._greedy = parts.actor, parts.greedy
        self._fused_rollout = parts.fused_rollout
        self._count_valid: Callable[[NDArray[np.bool_]], int] = np.count_nonzero
        self._started = False  # whether the replay has first observations
        self._extend(parts, parts.extensions, parts.clock)

    @classmethod
    def policy(
        cls, settings: DQNSettings, spec: EnvSpec, device: torch.device
    ) -> tuple[QNetwork, Actor]:
        """Build the network of a trained policy, and its greedy actor."""
        return build_policy(settings, spec, device, engine_of("eager"))

    @override
    @classmethod
    def sampling_policy(
        cls, settings: DQNSettings, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
    ) -> tuple[QNetwork, Actor]:
        """Build the network with an actor that explores as at the end of training."""
        engine = engine_of("eager")
        return build_sampling_policy(settings, spec, device, engine, num_envs=num_envs, seed=seed)

    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        """Return the behaviour actor, or the greedy one; both take any number of environments."""
        return self._extended_actor(self._actor) if explore else self._greedy

    def observe(self, decision: Decision, step: Step) -> None:
        """Store the timestep in the replay and count its valid steps."""
        if not self._started:
            self._replay.start(decision.obs.numpy(force=True))
            self._started = True
        self._replay.add(
            decision.env_action.numpy(force=True),
            np.clip(step.reward, -1, 1) if self._settings.clip_reward else step.reward,
            step.terminated,
            step.truncated,
            step.valid,
            step.obs,
        )
        self._clock.steps += self._count_valid(step.valid)

    @override
    def collect_block(
        self, decision: Decision, run: StepMany | None, steps: int
    ) -> BlockResult | None:
        if run is None or self._fused_rollout is None:
            return None
        return self._fused_rollout(run, steps) if self._started and self._allows_blocks() else None

    def update(self) -> Metrics | None:
        """Do what is due at each step since the last call: train, update the target network."""
        clock, schedules = self._clock, self._schedules
        try:
            for due in clock.due(self._sampler.can_sample):
                if due is Due.GRADIENT_STEP:
                    self._train_step(*clock.rate_and_beta(schedules.rate, schedules.beta))
                else:
                    self._target.weights.lerp_(
                        self._learner.network.weights, self._settings.target_tau
                    )
        except Interrupted:  # what was due still is
            return None
        return self._learner.means()

    def _train_step(self, rate: float, beta: float) -> None:
        """Take a gradient step on a sample; its TD errors become the sample's priorities."""
        if self._learner.stop.confirmed:
            raise Interrupted
        scalars: LossScalars = ()
        for extension in self._extensions:
            scalars = (*extension.loss_scalars(), *scalars)
        if not self._learner.ready:
            with self._replay.preserve_rng():  # compiling may be interrupted
                self._learner.compile_for(self._sample(beta), rate, *scalars)
        batch = self._sample(beta)
        (td_error,) = self._learner.step(batch, rate, *scalars)
        self._sampler.update_priorities(batch.index, td_error)

    def _sample(self, beta: float) -> ReplayBatch:
        batch = self._sampler.sample(beta=beta)
        for extension in self._extensions:
            if fields := extension.replay_fields(batch):
                batch = with_fields(batch, fields)
        return batch

    def scalars(self) -> dict[str, float]:
        """Return the schedules' values and the fill of the replay."""
        fill = len(self._replay) / self._settings.replay.capacity
        logged = self._schedules.logged.items()
        now = {name: schedule.at(self._clock.steps) for name, schedule in logged}
        return {**now, "memory/replay_fill": fill, **super().scalars()}

    @property
    def target_updates(self) -> int:
        """Updates of the target network."""
        return self._clock.target_updates

    @property
    @override
    def learning_start(self) -> LearningStart:
        s, clock = self._settings, self._clock
        empty = (s.n_step - 1) * self._num_envs * self._comm.size
        step, reason = clock.first_update(), f"agent.learning_starts={s.learning_starts:,}"
        if s.train_every > 1:
            reason += f", train_every={s.train_every:,}"
        if step > s.learning_starts + s.train_every:
            reason = f"the replay starts empty: {reason}"
        if clock.first_update(empty) > step:
            step = clock.first_update(empty)
            reason = f"no transition is complete before: agent.n_step={s.n_step:,}"
        return LearningStart(step, "replay", reason)

    @property
    @override
    def has_pending_updates(self) -> bool:
        return self._clock.has_pending_updates

    @property
    @override
    def replay(self) -> ReplayBuffer:
        return self._replay

    @override
    def attach_comm(self, comm: Comm) -> None:
        super().attach_comm(comm)
        self._learner.sample_weight = 1 / sum(comm.all_gather(self._settings.batch_size))
        self._sampler = sampler_of_ranks(self._replay, self._settings, comm)
        self._fused_rollout, self._count_valid = None, comm.global_count

    @override
    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        self._replay.clear()
        self._started = False
        self._clock.replay_emptied()

    @override
    def drop_replay(self) -> None:
        self.reshard(())
        self._clock.restart_learning()

    @override
    def check_consistency(self, steps: int, pending: PendingStep | None, obs: NDArray[Any]) -> None:
        self._clock.check_consistency(steps, len(obs) * self._comm.size)
        if self._started:
            self._replay.check_current(self._actions, None if pending else obs)

    @override
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        super().load_weights(weights)
        self._target.weights.copy_(self._learner.network.weights)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the replay and of both networks."""
        networks = self._learner.nbytes + self._target.nbytes
        return {"replay": self._replay.nbytes, **super().nbytes(), "networks": networks}

    def release(self) -> None:
        """Free the replay and the networks."""
        self._replay.release()
        super().release()

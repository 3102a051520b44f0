"""The base of agents that learn from a replay: store every step, train, update the target network.

An algorithm adds its loss (`LossSpec`), whose output for each sample is the TD error: see DQN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.base import (
    Actor,
    DecidedStep,
    Decision,
    LatestLearningStart,
    LearningStart,
)
from steadyrl.agents.engine.engine import Engine
from steadyrl.agents.extension import ExtensibleAgent, Extension, with_fields
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.interrupt import Interrupted
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossScalars
from steadyrl.agents.learner.schedules import Due, Schedule, UpdateClock
from steadyrl.agents.replay_sampler import local_sampler, sampler_of_ranks
from steadyrl.agents.settings import ReplayAgentSettings
from steadyrl.buffers.replay.buffer import ReplayBatch, ReplayBuffer
from steadyrl.buffers.replay.build import build_replay
from steadyrl.core.metrics import Metrics
from steadyrl.envs.types import EnvSpec, Step


@dataclass(frozen=True, kw_only=True)
class ReplayParts:
    """What an agent with a replay is made of."""

    settings: ReplayAgentSettings
    actions: int  # number of actions
    clock: UpdateClock
    rate: Schedule  # learning rate
    beta: Schedule  # exponent of importance weights
    learner: Learner
    target: FlatNetwork  # of the learner's network, or of a part of it (`ReplayAgent.followed`)
    replay: ReplayBuffer
    actor: Actor  # behaviour
    build_greedy: Callable[[], Actor]


class ReplayAgent(ExtensibleAgent):
    """Store every step in a replay; learn from samples, towards a target network."""

    # Updates read complete transitions only, never the timestep in progress.
    can_update_during_step = True
    state_names: ClassVar[tuple[str, ...]] = (
        "_learner", "_target", "_replay", "_actor", "_started",
    )  # fmt: skip

    def __init__(self, parts: ReplayParts, extensions: Sequence[Extension] = ()) -> None:
        self._settings, self._actions = parts.settings, parts.actions
        self._clock, self._learner, self._target = parts.clock, parts.learner, parts.target
        self._replay, self._rate, self._beta = parts.replay, parts.rate, parts.beta
        s = parts.settings
        self._sampler = local_sampler(parts.replay, s.replay, s.batch_size)
        self._actor, self._build_greedy = parts.actor, parts.build_greedy
        self._count_valid: Callable[[NDArray[np.bool_]], int] = np.count_nonzero
        self._started = False  # whether the replay has first observations
        self._extend(parts, extensions, parts.clock)

    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        """Return the behaviour actor, or a greedy one."""
        return self._extended_actor(self._actor) if explore else self._build_greedy()

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

    def update(self) -> Metrics | None:
        """Do what is due at each step since the last call: train, update the target network."""
        clock = self._clock
        try:
            for due in clock.due(self._sampler.can_sample):
                if due is Due.GRADIENT_STEP:
                    self._train_step(clock.rate(self._rate), self._beta.at(clock.steps))
                else:
                    self._target.weights.lerp_(self.followed, self._settings.target_tau)
        except Interrupted:  # what was due still is
            return None
        return self._learner.means()

    def _train_step(self, rate: float, beta: float) -> None:
        """Take a gradient step on a sample; its TD errors become the sample's priorities."""
        if self._learner.stop.confirmed:
            raise Interrupted
        scalars: LossScalars = ()
        for extension in self._extensions:  # the last one's loss is the outermost
            scalars = (*extension.loss_scalars(), *scalars)
        if not self._learner.ready:
            with self._replay.preserve_rng():  # an interrupted compilation costs no draw
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

    @property
    def followed(self) -> Tensor:
        """The weights [P] that the target network follows: all, or those of a part."""
        return self._learner.network.weights

    def scalars(self) -> dict[str, float]:
        """Return learning rate and β, the fill of the replay and the numbers of extensions."""
        steps, replay = self._clock.steps, self._replay
        schedules = {"train/learning_rate": self._clock.rate(self._rate)}
        if self._settings.replay.prioritized:
            schedules["train/beta"] = self._beta.at(steps)
        fill = {"memory/replay_fill": len(replay) / replay.capacity}
        return {**schedules, **fill, **super().scalars()}

    @property
    def window(self) -> tuple[int, str]:
        """Timesteps that a sample reads from its start on, and the keys that set it."""
        n_step = self._settings.n_step
        return n_step, f"agent.n_step={n_step:,}"

    @property
    @override
    def learning_start(self) -> LearningStart:
        clock, (window, keys) = self._clock, self.window
        step = clock.first_update((window - 1) * self._replay.num_envs * self._comm.size)
        if step == clock.first_update():
            return LearningStart(step, "replay", clock.first_update_reason)
        reason = f"no sample is complete before, unless an episode ends: {keys}"
        return LatestLearningStart(step, "replay", reason)

    @property
    def target_updates(self) -> int:
        """Updates of the target network."""
        return self._clock.target_updates

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
        s = self._settings
        self._learner.sample_weight = 1 / sum(comm.all_gather(s.batch_size))
        self._count_valid = comm.global_count
        self._sampler = sampler_of_ranks(self._replay, s.replay, s.batch_size, comm)

    @override
    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        super().reshard(departed_states)
        self._replay.clear()
        self._started = False

    @override
    def drop_replay(self) -> None:
        self.reshard(())
        self._clock.restart_learning()

    @override
    def check_consistency(self, steps: int, pending: DecidedStep | None, obs: NDArray[Any]) -> None:
        self._clock.check_consistency(steps, len(obs) * self._comm.size)
        if self._started:
            self._replay.check_current(self._actions, None if pending else obs)

    @torch.no_grad()
    @override
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        super().load_weights(weights)
        self._target.weights.copy_(self.followed)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the replay and of both networks."""
        networks = self._learner.nbytes + self._target.nbytes
        return {"replay": self._replay.nbytes, **super().nbytes(), "networks": networks}

    def host_nbytes(self) -> dict[str, int]:
        """Return the bytes in host memory, where the replay may be without the networks."""
        return {**super().host_nbytes(), "replay": self._replay.host_nbytes}

    def release(self) -> None:
        """Free the replay and the networks."""
        self._replay.release()
        super().release()


def init_replay(
    settings: ReplayAgentSettings, spec: EnvSpec, device: torch.device, seed: int, engine: Engine
) -> ReplayBuffer:
    """Build the replay; for a CUDA graph, batches are written into static buffers."""
    return build_replay(
        settings.replay,
        frame_shape=spec.frame_shape,
        dtype=spec.dtype,
        frame_stack=spec.frame_stack,
        num_envs=spec.num_envs,
        n_step=settings.n_step,
        gamma=settings.gamma,
        device=device,
        seed=seed,
        cuda_graph=engine.captures,
    )

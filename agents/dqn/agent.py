"""DQN (Mnih et al. 2015) with double, dueling, prioritised and n-step options."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.base import Actor, Agent, Decision, PendingStep
from steadyrl.agents.dqn.build import (
    behaviour_actor,
    build_greedy_actor,
    build_loss_spec,
    build_network,
    build_online_greedy_actor,
    init_network,
    init_replay,
    update_mode,
)
from steadyrl.agents.dqn.fused import build_fused_rollout
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.interrupt import Interrupted
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.init import materialize
from steadyrl.agents.networks.noisy import UpdateNoise
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.buffers.replay.buffer import ReplayBatch, ReplayBuffer
from steadyrl.core.metrics import Metrics
from steadyrl.core.saved_state import COUNT, Limits
from steadyrl.envs.types import BlockResult, DiscreteActions, EnvSpec, Step, StepMany
from steadyrl.memory.cache_cleaner import reclaim

log = logging.getLogger("steadyrl")


class DQN(Agent):
    """Act ε-greedily or with noisy weights, store every step, learn from replay samples."""

    # Updates read complete transitions only, never the timestep in progress.
    can_update_during_step = True
    state_names: ClassVar[tuple[str, ...]] = (
        "_learner",
        "_target",
        "_replay",
        "_actor",
        "_started",
        "_steps",
        "_last_trained_step",
        "_updates_done",
        "_learning_start",
        "target_updates",
    )
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(
        ("_steps", "_last_trained_step", "_updates_done", "_learning_start", "target_updates"),
        COUNT,
    )

    def __init__(
        self,
        settings: DQNSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
    ) -> None:
        settings.validate_fit(spec, total_steps)
        seeds = np.random.SeedSequence(seed).generate_state(4).tolist()
        if total_steps <= settings.learning_starts:
            log.warning(
                f"nothing will be learned: the run has {total_steps:,} steps, and learning starts "
                f"after {settings.learning_starts:,}: lower agent.learning_starts"
            )
        assert isinstance(spec.action, DiscreteActions)
        self._settings, self._actions = settings, spec.action.n
        self._schedules = settings.schedules(total_steps)
        online, self._target = (init_network(settings, spec, device, seeds[1]) for _ in range(2))
        mode = update_mode(settings, spec, device, total_steps)
        self._replay = init_replay(settings, spec, device, seeds[2], mode)
        network = online.module
        assert isinstance(network, QNetwork)
        how = self._build_loss_spec(device, network.masks)
        self._learner = Learner(how, online, mode, frozen=(self._target,))
        size = network.noise_size
        self._noise = UpdateNoise(size, device, seeds[3]) if size else None
        self._greedy = build_online_greedy_actor(
            settings, online, spec, lambda: self._learner.updates, mode
        )
        self._actor = behaviour_actor(self._greedy, network, spec, lambda: self.epsilon, seeds[0])
        self._fused_rollout = build_fused_rollout(settings, self._actor, self._replay, total_steps)
        self._started = False
        self._steps = 0  # valid environment steps observed
        self._learning_start = settings.learning_starts
        self._last_trained_step = 0  # all updates due up to this step are done
        self._updates_done = 0  # updates done of those due at the next step
        self.target_updates = 0

    def _build_loss_spec(self, device: torch.device, masks: Masks | None) -> LossSpec:
        """Return the loss spec; subclasses that add to the loss override this."""
        return build_loss_spec(self._settings, device, masks)

    @property
    @override
    def has_pending_updates(self) -> bool:
        return self._last_trained_step < self._steps

    @property
    @override
    def replay(self) -> ReplayBuffer:
        return self._replay

    @override
    def attach_comm(self, comm: Comm) -> None:
        super().attach_comm(comm)
        self._learner.sample_weight = 1 / sum(comm.all_gather(self._settings.batch_size))
        if self._noise is not None:
            self._noise.attach_comm(comm)

    @override
    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        self._replay.clear()
        self._started = False
        self._updates_done = 0  # the replay is empty

    @override
    def check_consistency(self, steps: int, pending: PendingStep | None, obs: NDArray[Any]) -> None:
        s, learned = self._settings, self._last_trained_step
        starts = s.learning_starts
        if self._steps != steps:
            raise ValueError(f"agent.steps: is {self._steps}, the run's are {steps}")
        if not starts <= self._learning_start <= steps + starts:
            most = f"{starts} to {steps + starts}"
            raise ValueError(f"agent.learning_start: is {self._learning_start}, must be {most}")
        # Updates can be pending for the last timestep, or since the last multiple of train_every.
        left = steps - max(learned, min(steps, self._learning_start))
        if learned > steps or left > s.train_every + 2 * len(obs) * self._comm.size:
            raise ValueError(
                f"agent.last_trained_step: {learned} is impossible after {steps} steps"
            )
        due = learned < steps and (learned + 1) % s.train_every == 0
        if not 0 <= self._updates_done <= (s.updates_per_train if due else 0):
            raise ValueError(
                f"agent.updates_done: {self._updates_done} are not due at step {learned + 1}"
            )
        if self._started:
            self._replay.check_current(self._actions, None if pending else obs)

    @override
    def drop_replay(self) -> None:
        self.reshard(())
        self._learning_start = self._steps + self._settings.learning_starts

    @override
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load_weights(weights)
        self._target.weights.copy_(self._learner.network.weights)

    @property
    def epsilon(self) -> float:
        """Probability of a random action at this step."""
        return self._schedules.epsilon.at(self._steps)

    @property
    def beta(self) -> float:
        """Exponent of the importance weights at this step (Schaul et al. 2016, section 3.4)."""
        return self._schedules.beta.at(self._steps)

    @property
    def learning_rate(self) -> float:
        """Adam's learning rate at this step."""
        return self._schedules.rate.at(self._steps)

    def _rate(self) -> float:
        """Return the learning rate of an update, which never reaches 0.

        An update at the very last step uses the rate of the interval before it.
        """
        last = max(0, self._schedules.steps - self._settings.train_every)
        now = min(self._steps, last)
        return self._schedules.rate.at(now, ahead=self._steps - now)

    @classmethod
    def policy(
        cls, settings: DQNSettings, spec: EnvSpec, device: torch.device
    ) -> tuple[QNetwork, Actor]:
        """Build the network of a trained policy, and its greedy actor."""
        network = materialize(build_network(settings, spec, device), device)
        return network, build_greedy_actor(settings, network, device)

    @override
    @classmethod
    def sampling_policy(
        cls, settings: DQNSettings, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
    ) -> tuple[QNetwork, Actor]:
        """Build the network with an actor that explores as at the end of training."""
        network, best = cls.policy(settings, spec, device)
        assert isinstance(best, GreedyActor)
        return network, behaviour_actor(best, network, spec, lambda: settings.epsilon_end, seed)

    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        """Return the behaviour actor, or the greedy one; both take any number of environments."""
        return self._actor if explore else self._greedy

    def observe(self, decision: Decision, step: Step) -> None:
        """Store the timestep in the replay and count its valid steps."""
        if not self._started:
            self._replay.start(decision.obs.numpy(force=True))
            self._started = True
        clip = self._settings.clip_reward
        self._replay.add(
            decision.env_action.numpy(force=True),
            np.clip(step.reward, -1, 1) if clip else step.reward,
            step.terminated,
            step.truncated,
            step.valid,
            step.obs,
        )
        alone = self._comm.is_single
        self._steps += (
            int(np.count_nonzero(step.valid)) if alone else self._comm.global_count(step.valid)
        )

    @override
    def collect_block(
        self, decision: Decision, run: StepMany | None, steps: int
    ) -> BlockResult | None:
        able = self._started and self._comm.is_single
        if run is None or self._fused_rollout is None or not able:
            return None
        due = self._settings.train_every
        learns = max(self._steps, self._learning_start) // due * due + due
        # With nothing to sample, updates are skipped: that is decided at every timestep.
        filled = len(self._replay) and self._replay.never_empties
        until = min(steps, learns - self._steps) if filled else 1
        block = self._fused_rollout(run, self._steps, until)
        self._steps += block.steps
        return block

    def update(self) -> Metrics | None:
        """Do what is due at each step since the last call: train, update the target network."""
        try:
            for step in range(self._last_trained_step + 1, self._steps + 1):
                if step > self._learning_start and self._is_due(step) and self._can_sample():
                    self._train_at(step)
                self._last_trained_step = step
        except Interrupted:
            return None
        return self._learner.means()

    def _is_due(self, step: int) -> bool:
        return step % self._settings.train_every == 0 or step % self._settings.target_every == 0

    def _can_sample(self) -> bool:
        """Collective: return whether the replay of every rank has something to sample."""
        nothing = self._replay.timeline.count == 0
        if self._comm.is_single:
            return not nothing
        (some_have_nothing,) = self._comm.all_reduce_max(nothing)
        return not some_have_nothing

    def _train_at(self, step: int) -> None:
        s = self._settings
        if step % s.train_every == 0:
            beta, rate = self.beta if s.replay.prioritized else 1.0, self._rate()
            while self._updates_done < s.updates_per_train:
                if self._learner.stop.confirmed:
                    raise Interrupted
                self._train_step(rate, beta)
                self._updates_done += 1
            self._updates_done = 0
        if step % s.target_every == 0:
            self._target.weights.lerp_(self._learner.network.weights, s.target_tau)
            self.target_updates += 1

    def _train_step(self, rate: float, beta: float) -> None:
        scalars = self._loss_scalars()
        if not self._learner.ready:
            with self._replay.preserve_rng():  # compiling may be interrupted
                self._learner.compile_for(self._sample(beta), rate, *scalars)
        batch = self._sample(beta)
        global_weights = self._settings.replay.prioritized and not self._comm.is_single
        if global_weights:
            (most,) = self._comm.all_reduce_max(1 / self._replay.min_probability)
            batch.weight.mul_((self._replay.min_probability * most) ** -beta)
        (td_error,) = self._learner.step(batch, rate, *scalars)
        self._replay.update_priorities(batch.index, td_error)
        if global_weights:
            (self._replay.max_priority,) = self._comm.all_reduce_max(self._replay.max_priority)

    def _loss_scalars(self) -> tuple[float | Tensor, ...]:
        """Return what the loss takes besides the batch."""
        return () if self._noise is None else self._noise.of(self._learner.updates)

    def _sample(self, beta: float) -> ReplayBatch:
        return self._replay.sample(self._settings.batch_size, beta=beta)

    def scalars(self) -> dict[str, float]:
        """Return the schedules' values and the fill of the replay."""
        numbers = {
            "train/learning_rate": self.learning_rate,
            "memory/replay_fill": len(self._replay) / self._settings.replay.capacity,
        }
        if not self._settings.noisy.enabled:
            numbers["train/epsilon"] = self.epsilon
        if self._settings.replay.prioritized:
            numbers["train/beta"] = self.beta
        return numbers

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the replay and of both networks."""
        networks = self._learner.nbytes + self._target.nbytes
        return {"replay": self._replay.nbytes, "networks": networks}

    def release(self) -> None:
        """Free the replay and the networks."""
        device = self.device
        self._replay.release()
        del self._learner, self._target, self._greedy, self._actor, self._fused_rollout
        reclaim(device)  # the learner is part of a reference cycle

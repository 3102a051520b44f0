"""DQN (Mnih et al. 2015) with double, dueling, prioritised replay and n-step as switches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.actors.greedy import Greedy
from steadyrl.agents.base import Actor, Agent, Decision, Kept
from steadyrl.agents.dqn.build import (
    acting,
    build_network,
    exploring,
    greedy,
    mode_of,
    recipe,
    start_network,
    start_replay,
)
from steadyrl.agents.dqn.fused import explorer
from steadyrl.agents.dqn.settings import DQNSettings
from steadyrl.agents.learner.comm import World
from steadyrl.agents.learner.interrupt import CutShortError
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import Recipe
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.init import with_memory
from steadyrl.agents.networks.noisy import UpdateNoise
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.buffers.replay.buffer import ReplayBatch, ReplayBuffer
from steadyrl.core.metrics import Metrics
from steadyrl.core.saved import COUNT, Limits
from steadyrl.envs.types import BlockResult, DiscreteActions, EnvSpec, Step, StepMany
from steadyrl.memory.reclaim import reclaim

log = logging.getLogger("steadyrl")


class DQN(Agent):
    """Act ε-greedily or by noisy weights, keep all in the replay, learn from samples of it."""

    # An update reads only rows that are complete, never the one the environments work on.
    can_update_during_step = True
    state_names: ClassVar[tuple[str, ...]] = (
        "_learner",
        "_target",
        "_replay",
        "_actor",
        "_started",
        "_steps",
        "_learned",
        "_taken",
        "_learns_after",
        "target_updates",
    )
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(
        ("_steps", "_learned", "_taken", "_learns_after", "target_updates"), COUNT
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
        settings.refuse_unfit(spec, total_steps)
        seeds = np.random.SeedSequence(seed).generate_state(4).tolist()
        if total_steps <= settings.learning_starts:
            log.warning(
                f"nothing will be learned: the run has {total_steps:,} steps, learning starts "
                f"after {settings.learning_starts:,} (agent.learning_starts)"
            )
        assert isinstance(spec.action, DiscreteActions)
        self._settings, self._actions = settings, spec.action.n
        self._schedules = settings.schedules(total_steps)
        online, self._target = (start_network(settings, spec, device, seeds[1]) for _ in range(2))
        mode = mode_of(settings, spec, device, total_steps)
        self._replay = start_replay(settings, spec, device, seeds[2], mode)
        network = online.module
        assert isinstance(network, QNetwork)
        how = self._recipe(device, network.masks)
        self._learner = Learner(how, online, mode, frozen=(self._target,))
        size = network.noise_size
        self._noise = UpdateNoise(size, device, seeds[3]) if size else None
        self._greedy = acting(settings, online, spec, lambda: self._learner.updates, mode)
        self._actor = exploring(self._greedy, network, spec, lambda: self.epsilon, seeds[0])
        self._explore = explorer(settings, self._actor, self._replay, total_steps)
        self._started = False
        self._steps = 0  # valid environment steps observed
        self._learns_after = settings.learning_starts
        self._learned = 0  # steps whose due learning is done
        self._taken = 0  # gradient steps of those due at the step after these
        self.target_updates = 0

    def _recipe(self, device: torch.device, masks: Masks | None) -> Recipe:
        """Return how the learner takes a step; who adds to the loss overrides this."""
        return recipe(self._settings, device, masks)

    @property
    @override
    def has_pending_updates(self) -> bool:
        return self._learned < self._steps

    @property
    @override
    def replay(self) -> ReplayBuffer:
        return self._replay

    @override
    def join(self, world: World) -> None:
        super().join(world)
        self._learner.share = 1 / sum(world.gather(self._settings.batch_size))
        if self._noise is not None:
            self._noise.join(world)

    @override
    def regroup(self, lost: Sequence[Mapping[str, Any]]) -> None:
        self._replay.clear()
        self._started = False
        self._taken = 0  # there is nothing to take the others on

    @override
    def check_consistency(self, steps: int, kept: Kept | None, obs: NDArray[Any]) -> None:
        s, learned = self._settings, self._learned
        starts = s.learning_starts
        if self._steps != steps:
            raise ValueError(f"agent.steps: is {self._steps}, the run's are {steps}")
        if not starts <= self._learns_after <= steps + starts:
            most = f"{starts} to {steps + starts}"
            raise ValueError(f"agent.learns_after: is {self._learns_after}, it can be {most}")
        # What is left to learn is of the last row, or of the rows since learning was due.
        left = steps - max(learned, min(steps, self._learns_after))
        if learned > steps or left > s.train_every + 2 * len(obs) * self._world.size:
            raise ValueError(f"agent.learned: is {learned}, after {steps} steps it cannot be")
        due = learned < steps and (learned + 1) % s.train_every == 0
        if not 0 <= self._taken <= (s.updates_per_train if due else 0):
            raise ValueError(f"agent.taken: is {self._taken}, which is not due at {learned + 1}")
        if self._started:
            self._replay.check_current(self._actions, None if kept else obs)

    @override
    def lose_replay(self) -> None:
        self.regroup(())
        self._learns_after = self._steps + self._settings.learning_starts

    @override
    def start_from(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().start_from(weights)
        self._target.weights.copy_(self._learner.network.weights)

    @property
    def epsilon(self) -> float:
        """Probability of a random action at this step."""
        return self._schedules.epsilon.at(self._steps)

    @property
    def beta(self) -> float:
        """Exponent of the importance weights at this step (Schaul et al. 2016, 3.4)."""
        return self._schedules.beta.at(self._steps)

    @property
    def learning_rate(self) -> float:
        """Step size of Adam at this step."""
        return self._schedules.rate.at(self._steps)

    def _rate(self) -> float:
        """Return the step size of an update: at the end, what its own steps began with.

        Learning that is due at the very last step would be for nothing at a rate of zero.
        """
        last = max(0, self._schedules.steps - self._settings.train_every)
        now = min(self._steps, last)
        return self._schedules.rate.at(now, ahead=self._steps - now)

    @classmethod
    def policy(
        cls, settings: DQNSettings, spec: EnvSpec, device: torch.device
    ) -> tuple[QNetwork, Actor]:
        """Build the network of a finished policy, and who takes its best actions."""
        network = with_memory(build_network(settings, spec, device), device)
        return network, greedy(settings, network, device)

    @override
    @classmethod
    def sampling_policy(
        cls, settings: DQNSettings, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
    ) -> tuple[QNetwork, Actor]:
        """Build the network, and who explores as training does at its end."""
        network, best = cls.policy(settings, spec, device)
        assert isinstance(best, Greedy)
        return network, exploring(best, network, spec, lambda: settings.epsilon_end, seed)

    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        """Return the actor that explores, for any number of environments, or a greedy one."""
        return self._actor if explore else self._greedy

    def observe(self, decision: Decision, step: Step) -> None:
        """Add the row to the replay and count its valid steps."""
        if not self._started:
            self._replay.start(decision.obs.numpy(force=True))
            self._started = True
        clip = self._settings.clip_reward
        self._replay.add(
            decision.action.numpy(force=True),
            np.clip(step.reward, -1, 1) if clip else step.reward,
            step.terminated,
            step.truncated,
            step.valid,
            step.obs,
        )
        alone = self._world.alone
        self._steps += (
            int(np.count_nonzero(step.valid)) if alone else self._world.counted(step.valid)
        )

    @override
    def collect_block(
        self, decision: Decision, run: StepMany | None, steps: int
    ) -> BlockResult | None:
        able = self._started and self._world.alone
        if run is None or self._explore is None or not able:
            return None
        due = self._settings.train_every
        learns = max(self._steps, self._learns_after) // due * due + due
        # Without anything to draw nothing is learned, which has to be seen row by row.
        filled = len(self._replay) and self._replay.never_empties
        until = min(steps, learns - self._steps) if filled else 1
        rows = self._explore(run, self._steps, until)
        self._steps += rows.steps
        return rows

    def update(self) -> Metrics | None:
        """Go through the steps since the last call: learn and renew the target where due."""
        try:
            for step in range(self._learned + 1, self._steps + 1):
                if step > self._learns_after and self._is_due(step) and self._can_draw():
                    self._learn_at(step)
                self._learned = step
        except CutShortError:
            return None
        return self._learner.means()

    def _is_due(self, step: int) -> bool:
        return step % self._settings.train_every == 0 or step % self._settings.target_every == 0

    def _can_draw(self) -> bool:
        """Together: return whether every rank has something to draw, which it may have no more."""
        nothing = self._replay.timeline.count == 0
        if self._world.alone:
            return not nothing
        (some_have_nothing,) = self._world.largest(nothing)
        return not some_have_nothing

    def _learn_at(self, step: int) -> None:
        s = self._settings
        if step % s.train_every == 0:
            beta, rate = self.beta if s.replay.prioritized else 1.0, self._rate()
            while self._taken < s.updates_per_train:
                if self._learner.stop.requested:
                    raise CutShortError
                self._learn(rate, beta)
                self._taken += 1
            self._taken = 0
        if step % s.target_every == 0:
            self._target.weights.lerp_(self._learner.network.weights, s.target_tau)
            self.target_updates += 1

    def _learn(self, rate: float, beta: float) -> None:
        numbers = self._numbers()
        if not self._learner.ready:
            with self._replay.preserve_rng():  # compilation may be cut short
                self._learner.prepare(self._draw(beta), rate, *numbers)
        batch = self._draw(beta)
        weighs_together = self._settings.replay.prioritized and not self._world.alone
        if weighs_together:
            (most,) = self._world.largest(1 / self._replay.min_probability)
            batch.weight.mul_((self._replay.min_probability * most) ** -beta)
        (td_error,) = self._learner.step(batch, rate, *numbers)
        self._replay.update_priorities(batch.index, td_error)
        if weighs_together:
            (self._replay.max_priority,) = self._world.largest(self._replay.max_priority)

    def _numbers(self) -> tuple[float | Tensor, ...]:
        """Return what the loss is given besides the batch."""
        return () if self._noise is None else self._noise.of(self._learner.updates)

    def _draw(self, beta: float) -> ReplayBatch:
        return self._replay.sample(self._settings.batch_size, beta=beta)

    def scalars(self) -> dict[str, float]:
        """Return the schedules' values and the fill of the replay."""
        numbers = {
            "train/learning_rate": self.learning_rate,
            "buffer/fill": len(self._replay) / self._settings.replay.capacity,
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
        del self._learner, self._target, self._greedy, self._actor, self._explore
        reclaim(device)  # a learner refers to itself, by its methods

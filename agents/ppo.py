"""PPO (Schulman et al. 2017): collect a rollout, learn from it for some epochs, forget it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from agents.actor_critic import ActorCritic
from agents.actors import on_device
from agents.base import Actor, Agent, Decision
from agents.heads import build_head
from agents.learner import Learner
from agents.networks import FlatNetwork, with_memory
from agents.normaliser import CLIP, RewardNormaliser
from agents.ppo_building import (
    build_network,
    drawing,
    finished,
    likeliest,
    mode_of,
    reading,
    recipe_of,
    sampling,
    start_rollout,
)
from agents.ppo_ranks import explained_variance, minibatches, move_on
from agents.ppo_rows import last_valid, score, store
from agents.ppo_settings import PPOSettings
from agents.ppo_stretch import collector
from agents.schedules import Schedule
from agents.stopping import CutShortError
from agents.value_norm import finish
from agents.world import World
from envs.types import EnvSpec, Rows, RunRows, Step
from memory.cache import reclaim
from memory.metrics import Metrics

# As many rows the ranks go on without each other; only a whole rollout they need together.
SETTLED_ROWS = 16


class PPO(Agent):
    """Collect T rows from N environments on the training device, then learn from all of them."""

    state_names: ClassVar[tuple[str, ...]] = (
        "_learner",
        "_actor",
        "_rollout",
        "_rewards",
        "_next_obs",
        "_shuffling",
        "_steps",
        "_begun",
    )

    of_one_rank = ("actor", "shuffling", "rollout", "rewards", "next_obs")

    def __init__(
        self,
        settings: PPOSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
    ) -> None:
        settings.refuse_unfit(spec, total_steps)
        seeds = np.random.SeedSequence(seed).generate_state(3).tolist()
        self._settings = settings
        self._device = device
        rows = settings.rollout_steps * spec.num_envs
        self._parts = settings.minibatches_of(rows)
        self._total_steps = total_steps
        self._piece = settings.largest_minibatch(rows)
        self._head = build_head(spec.action, device, scaled=settings.scale_actions)
        mode = mode_of(settings, spec, device, total_steps)
        module = build_network(settings, spec, self._head, device)
        # Before the rest, because it asks for the memory of the rest too.
        copied = 1 if mode == "eager" else 2  # a graph has its own copy of a minibatch
        self._rollout = start_rollout(
            settings, spec, self._head, module, device, copies=copied * self._piece
        )
        with_memory(module, torch.device("cpu"))
        module.start_(torch.Generator().manual_seed(seeds[0]), settings.network.init)
        network = FlatNetwork(module, device)
        self._observations = module.normaliser
        self._value_head, self._units = module.value, module.units
        self._learner = Learner(recipe_of(settings, self._head, self._piece), network, mode)
        self._mirror = reading(settings, network, spec, lambda: self._learner.updates)
        size = settings.rollout_steps, spec.num_envs
        self._actor = sampling(module, self._head, device, *size, seeds[1], self._mirror)
        self._actor.fresh = lambda: self._begun == 0
        self._shuffling = torch.Generator().manual_seed(seeds[2])
        self._rewards = RewardNormaliser(spec.num_envs, settings.gamma)
        seen = (spec.num_envs, *spec.observation_shape)
        self._next_obs: NDArray[Any] = np.zeros(seen, spec.dtype)
        self._fill = collector(settings, self._actor, self._rollout, self._rewards, self._next_obs)
        self._steps = 0  # valid environment steps observed
        self._begun = 0  # those before the rollout under way

    @override
    def join(self, world: World) -> None:
        super().join(world)
        self._rewards.world = world
        if self._observations is not None:
            self._observations.world = world

    @override
    def regroup(self, lost: Sequence[Mapping[str, Any]]) -> None:
        for state in lost:
            self._rewards.take_over(state["rewards"])
        self._rollout.clear()
        if self._observations is not None:
            self._observations.settle_()
        self._begun = self._steps

    @property
    @override
    def settles(self) -> bool:
        rows = self._rollout.position + 1
        return rows % SETTLED_ROWS == 0 or rows == self._settings.rollout_steps

    @property
    def learning_rate(self) -> float:
        """Step size of Adam in the update at the end of the rollout under way."""
        return self._now(self._settings.learning_rates)

    @property
    def clip(self) -> float:
        """How far the ratio may move from 1 in the update at the end of the rollout under way."""
        return self._now(self._settings.clips)

    @property
    def entropy_coef(self) -> float:
        """What the entropy counts for in the update at the end of the rollout under way."""
        return self._now(self._settings.entropy_coefs)

    @property
    def _numbers(self) -> tuple[float, ...]:
        """What the loss is given besides the batch."""
        varies = self._settings.entropy_coef_varies
        return (self.clip, self.entropy_coef) if varies else (self.clip,)

    def _now(self, schedule: Callable[[int], Schedule]) -> float:
        """Anneal from rollout to rollout: by the steps of those before it, never by its own.

        So the first update has the full rate and the last one its share: after k of K whole
        rollouts it is 1 − k/K (Huang et al. 2022, detail 4). A warm-up counts its own as well.
        """
        rollout = self._settings.rollout_steps * len(self._next_obs) * self._world.size
        return schedule(self._total_steps).at(self._begun, ahead=rollout)

    @classmethod
    def policy(
        cls, settings: PPOSettings, spec: EnvSpec, device: torch.device
    ) -> tuple[ActorCritic, Actor]:
        """Build the network of a finished policy, and who takes its most likely actions."""
        network, head = finished(settings, spec, device)
        return network, likeliest(network, head, device)

    @override
    @classmethod
    def sampling_policy(
        cls, settings: PPOSettings, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
    ) -> tuple[ActorCritic, Actor]:
        """Build the network, and who draws actions from its distribution."""
        return drawing(settings, spec, device, num_envs=num_envs, seed=seed)

    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        """Return the sampling actor, or one that takes the most likely actions."""
        if not explore:
            network = self._learner.network.module
            assert isinstance(network, ActorCritic)
            return likeliest(network, self._head, self._device, self._mirror)
        if num_envs != len(self._next_obs):
            raise ValueError(f"rollouts are of {len(self._next_obs)} environments, not {num_envs}")
        return self._actor

    def observe(self, decision: Decision, step: Step) -> None:
        """Store the row and count its valid steps."""
        reward = np.clip(step.reward, -1, 1) if self._settings.clip_reward else step.reward
        obs = decision.obs
        if self._observations is not None and self._begun == 0:
            seen = obs.to(self._device)
            obs = self._observations(seen)
            valid = on_device(np.flatnonzero(step.valid), self._device)
            self._observations.update(seen.index_select(0, valid))
        store(self._rollout, obs, decision, reward, step)
        if self._settings.normalize_reward:
            self._rewards.add(step.reward, step.valid)
        self._steps += self._world.counted(step.valid)
        np.copyto(self._next_obs, step.obs)

    @override
    def collect(self, decision: Decision, run: RunRows | None, steps: int) -> Rows | None:
        looking = self._observations is not None and self._begun == 0  # from row to row
        if run is None or self._fill is None or looking or not self._world.alone:
            return None
        rows = self._fill(decision, run, steps)
        self._steps += rows.steps
        return rows

    def update(self) -> Metrics | None:
        """Once the rollout is full: finish it, learn from it for some epochs, forget it.

        All of it or nothing: what is cut short has not happened, and is done again one day.
        """
        if not self._rollout.full or self._learner.stop.requested:
            return None
        try:
            metrics = self._all_or_nothing()
        except CutShortError:
            return None
        if self._observations is not None:
            rows = self._rollout if self._begun else None  # those of the first have been counted
            move_on(self._observations, rows, self._piece)
        self._rollout.clear()
        self._begun = self._steps
        return metrics

    def _all_or_nothing(self) -> Metrics | None:
        changed = (self._rollout.reward, self._rollout.value)
        before, shuffling = [part.clone() for part in changed], self._shuffling.get_state()
        try:
            with self._learner.all_or_nothing():
                self._finish_rollout()
                rows = self._world.gather(len(self._rollout.valid))
                return self._learn() if sum(rows) else None
        except CutShortError:
            for part, value in zip(changed, before, strict=True):
                part.copy_(value)
            self._shuffling.set_state(shuffling)
            raise

    def _finish_rollout(self) -> None:
        """Turn rewards and values into advantages; V(obs[T]) is one more forward pass."""
        rollout, s = self._rollout, self._settings
        if s.normalize_reward:
            rollout.reward.mul_(self._rewards.scale).clamp_(-CLIP, CLIP)
        with torch.inference_mode():
            obs = on_device(self._next_obs, self._device)
            if self._observations is not None and self._begun == 0:
                obs = self._observations(obs)
                self._observations.rest_()
            if not self._actor.complete:
                score(rollout, self._learner.network.module, self._head, self._piece)
            last_value = self._actor.values(obs, last_valid(rollout))
        finish(
            rollout,
            last_value,
            *(self._value_head, self._units),
            self._world,
            gamma=s.gamma,
            gae_lambda=s.gae_lambda,
        )

    def _learn(self) -> Metrics | None:
        """Take the epochs over the rollout."""
        rollout, rate, numbers = self._rollout, self.learning_rate, self._numbers
        for batch, share in chain.from_iterable(
            minibatches(rollout, self._parts, self._shuffling, self._world)
            for _ in range(self._settings.epochs)
        ):
            if self._learner.stop.requested:
                raise CutShortError
            self._learner.share = share
            self._learner.step(batch, rate, *numbers)
            if self._learner.exceeded:
                break
        stored = (rollout.value[:-1], rollout.return_)
        value, return_ = (part.flatten().index_select(0, rollout.valid) for part in stored)
        variance = explained_variance(value, return_, self._world)
        return self._learner.means({"train/explained_variance": variance})

    def scalars(self) -> dict[str, float]:
        """Return the schedules' values."""
        numbers = {"train/learning_rate": self.learning_rate, "train/clip": self.clip}
        return numbers | {"train/entropy_coef": self.entropy_coef}

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the rollout with its noise, and of the network's."""
        return {"rollout": self._rollout.nbytes + self._actor.nbytes, **super().nbytes()}

    def release(self) -> None:
        """Free the rollout and the network."""
        self._rollout.release()
        del self._learner, self._actor, self._next_obs, self._fill
        reclaim(self._device)  # a learner refers to itself, by its methods

"""PPO (Schulman et al. 2017): collect a rollout, learn from it for some epochs, forget it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.agents.actors.recurrent import RecurrentSampling
from steadyrl.agents.base import Actor, Agent, Decision, Kept
from steadyrl.agents.learner.comm import World
from steadyrl.agents.learner.interrupt import CutShortError
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import Recipe
from steadyrl.agents.learner.minibatch import places
from steadyrl.agents.learner.schedules import Schedule
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import action_limits, build_head
from steadyrl.agents.networks.normalizers import CLIP, RewardNormaliser
from steadyrl.agents.ppo.build import (
    build_network,
    drawing,
    finished,
    likeliest,
    mode_of,
    picks_rows,
    reading,
    recipe_of,
    sampling,
    start_network,
    start_rollout,
)
from steadyrl.agents.ppo.evaluate import Scoring
from steadyrl.agents.ppo.fused import collector
from steadyrl.agents.ppo.loss import explained_variance
from steadyrl.agents.ppo.minibatches import SETTLED_ROWS, minibatches
from steadyrl.agents.ppo.popart import finish
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.buffers.rollout.sequences import SequenceRollout
from steadyrl.core.metrics import Metrics
from steadyrl.core.saved import COUNT, Limits, check_limits, tensor
from steadyrl.envs.types import BlockResult, EnvSpec, Step, StepMany
from steadyrl.memory.reclaim import reclaim


class PPO(Agent):
    """Collect T rows from N environments on the training device, then learn from all of them."""

    state_names: ClassVar[tuple[str, ...]] = (
        "_learner", "_actor", "_rollout", "_rewards", "_next_obs", "_shuffling", "_steps", "_begun",
    )  # fmt: skip
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(("_steps", "_begun"), COUNT)
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
        rows = settings.rollout_steps * spec.num_envs
        self._total_steps = total_steps
        self._parts, piece = settings.minibatches_of(rows), settings.largest_minibatch(rows)
        self._head = build_head(spec.action, device, scaled=settings.scale_actions)
        mode = mode_of(settings, spec, device, total_steps)
        module = build_network(settings, spec, self._head, device)
        # Before the rest, because it asks for the memory of the rest too.
        copies = piece if mode == "eager" else 2 * piece  # a graph has its own of a minibatch
        self._rollout = self._start_rollout(spec, module, device, copies)
        network = start_network(module, settings, device, seeds[0])
        self._network, self._observations = module, module.normaliser
        self._picks = picks_rows(settings, mode, device)
        self._learner = Learner(self._recipe(piece), network, mode)
        self._score = Scoring(self._learner, self._head, piece, mode)
        self._mirror = reading(settings, network, spec, lambda: self._learner.updates)
        size = settings.rollout_steps, spec.num_envs
        self._actor = sampling(module, self._head, device, *size, seeds[1], self._mirror, mode)
        self._actor.fresh = lambda: self._begun == 0
        self._shuffling = torch.Generator().manual_seed(seeds[2])
        self._rewards = RewardNormaliser(spec.num_envs, settings.gamma)
        self._scales_rewards = settings.normalizes_reward
        self._next_obs = np.zeros((spec.num_envs, *spec.observation_shape), spec.dtype)
        self._fill = collector(settings, self._actor, self._rollout, self._rewards, self._next_obs)
        self._steps = self._begun = 0  # valid steps observed; those before the rollout under way
        self._settled: tuple[int, tuple[float, ...]] | None = None  # see `_goes_by`

    def _recipe(self, rows: int) -> Recipe:
        """Return how the learner takes a step on so many rows; a longer loss overrides it."""
        return recipe_of(self._settings, self._head, rows, picks=self._picks)

    def _start_rollout(
        self, spec: EnvSpec, network: ActorCritic, device: torch.device, copies: int
    ) -> RolloutBuffer:
        """Build the rollout; who keeps more of each row overrides it."""
        return start_rollout(self._settings, spec, self._head, network, device, copies=copies)

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

    @override
    def check_consistency(self, steps: int, kept: Kept | None, obs: NDArray[Any]) -> None:
        if self._steps != steps:
            raise ValueError(f"agent.steps: is {self._steps}, the run's are {steps}")
        rollout, alone = self._rollout, self._world.alone
        own = int(rollout.flags[2, : rollout.position].sum())
        theirs = steps - self._begun
        if not own <= theirs <= (own if alone else steps) or (theirs and not rollout.position):
            raise ValueError(
                f"agent.begun: is {self._begun}, {own} of {steps} steps are since then"
            )
        limits = action_limits(self._head)
        check_limits(rollout.action[: rollout.position], limits)
        if self._observations is not None:
            self._observations.check_current(steps, settled=kept is None)
        if kept is None:
            if steps and not np.array_equal(self._next_obs, obs):
                raise ValueError("agent.next_obs: is not what the environments show")
            return
        decision, rows = kept[0], len(self._next_obs)
        action = rollout.action
        tensor(decision.chosen, (rows, *action.shape[2:]), action.dtype, limits)
        for numbers in (decision.log_prob, decision.value):
            if numbers is not None or self._actor.complete:
                tensor(numbers, (rows,), torch.float32)
        if isinstance(self._actor, RecurrentSampling):
            tensor(decision.carry, tuple(self._actor.carry.shape), torch.float32)

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

    def _goes_by(self) -> tuple[float, ...]:
        """Return step size and numbers of the update to come, settled as its rollout begins."""
        if self._settled is None or self._settled[0] != self._begun:
            self._settled = self._begun, (self.learning_rate, *self._numbers)
        return self._settled[1]

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
        return finished(settings, spec, device)

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
            return likeliest(self._network, self._head, self.device, self._mirror)
        if num_envs != len(self._next_obs):
            raise ValueError(f"rollouts are of {len(self._next_obs)} environments, not {num_envs}")
        return self._actor

    def observe(self, decision: Decision, step: Step) -> None:
        """Store the row and count its valid steps."""
        rollout = self._rollout
        if rollout.position == 0:
            self._goes_by()
        reward = np.clip(step.reward, -1, 1) if self._settings.clip_reward else step.reward
        obs = decision.obs
        if self._observations is not None and self._begun == 0:
            seen = obs.to(self.device)
            obs = self._observations(seen)
            valid = rollout.to_device(np.flatnonzero(step.valid))
            self._observations.update(seen.index_select(0, valid))
        assert decision.chosen is not None
        if isinstance(rollout, SequenceRollout):
            assert decision.carry is not None
            rollout.store_hidden_state(decision.carry)
        told = reward, step.terminated, step.truncated, step.valid
        rollout.add(obs, decision.chosen, decision.log_prob, decision.value, *told)
        if self._scales_rewards:
            self._rewards.add(step.reward, step.valid)
        self._steps += self._world.counted(step.valid)
        np.copyto(self._next_obs, step.obs)

    @override
    def collect_block(
        self, decision: Decision, run: StepMany | None, steps: int
    ) -> BlockResult | None:
        looking = self._observations is not None and self._begun == 0  # from row to row
        if run is None or self._fill is None or looking or not self._world.alone:
            return None
        self._goes_by()
        rows = self._fill(decision, run, steps)
        self._steps += rows.steps
        return rows

    def update(self) -> Metrics | None:
        """Once the rollout is full: finish it, learn from it for some epochs, forget it.

        All of it or nothing: what is cut short has not happened, and is done again one day.
        """
        rows, stop = self._settings.rollout_steps, self._learner.stop
        if self._rollout.position < rows or stop.requested:
            return None
        shuffling = self._shuffling.get_state()
        try:
            metrics = self._all_or_nothing()
        except CutShortError:
            self._shuffling.set_state(shuffling)
            return None
        if self._observations is not None:
            valid = (
                self._rollout.valid_indices if self._begun else None
            )  # those of the first are counted
            self._observations.take_in(self._rollout.obs.flatten(0, 1), valid, self._score.rows)
        self._rollout.clear()
        self._begun = self._steps
        return metrics

    def _all_or_nothing(self) -> Metrics | None:
        with self._learner.all_or_nothing(self._rollout.reward, self._rollout.value):
            self._finish_rollout()
            rows = len(self._rollout.valid_indices)
            some = rows if self._world.alone else sum(self._world.gather(rows))
            return self._learn() if some else None

    def _finish_rollout(self) -> None:
        """Turn rewards and values into advantages; V(obs[T]) is one more forward pass."""
        rollout, s = self._rollout, self._settings
        rounds = self._learner.rounds
        if self._scales_rewards:
            rollout.reward.mul_(self._rewards.scale).clamp_(-CLIP, CLIP)
        with torch.inference_mode():
            obs = rollout.to_device(self._next_obs)
            if self._observations is not None and self._begun == 0:
                obs = self._observations(obs)
                self._observations.rest_()
            if rounds or not self._actor.complete:
                self._score(rollout)
            if isinstance(self._actor, RecurrentSampling):  # of episodes that go on
                valid = rollout.flags[-1, -1].numpy()
                last_value = self._actor.values(obs, valid, self._learner.forward)
            else:
                on_host = None if rounds else self._score.value
                last_value = self._learner.forward(obs)[1] if on_host is None else on_host(obs)
        how = {"gamma": s.gamma, "gae_lambda": s.gae_lambda}
        if (units := self._network.units) is None:
            rollout.compute_advantages(last_value, **how)
        else:
            finish(rollout, last_value, self._network.value, units, self._world, **how)

    def _batches(self, epochs: int) -> Iterator[tuple[Any, Any]]:
        """Return each epoch's minibatches of all valid rows, and what a row of each counts for."""
        if not (self._picks and self._world.alone):
            return chain.from_iterable(self._epoch() for _ in range(epochs))
        orders = (self._rollout.shuffled(self._shuffling) for _ in range(epochs))
        return places(self._rollout.flat(), orders, self._parts, self._score.rows)

    def _epoch(self) -> Iterator[tuple[Any, Any]]:
        rollout, parts, order = self._rollout, self._parts, self._shuffling
        if not self._world.alone or isinstance(rollout, SequenceRollout):
            return minibatches(rollout, parts, order, self._world)
        room = None if self._learner.padding is None else self._learner.padding.room
        return zip(rollout.minibatches(parts, order, room), repeat(None))  # its share of these

    def _learn(self) -> Metrics | None:
        """Take the epochs over the rollout."""
        rate, *numbers = self._goes_by()
        for batch, share in self._batches(self._settings.epochs):
            if self._learner.stop.requested:
                raise CutShortError
            self._learner.share = share
            self._learner.step(batch, rate, *numbers)
            if self._learner.exceeded:
                break
        variance = explained_variance(*self._rollout.values_and_returns(), self._world)
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
        device = self.device
        self._rollout.release()
        del self._learner, self._network, self._actor, self._mirror, self._score, self._fill
        reclaim(device)  # a learner refers to itself, by its methods

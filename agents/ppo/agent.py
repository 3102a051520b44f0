"""PPO (Schulman et al. 2017): collect a rollout, learn from it for some epochs, discard it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from steadyrl.agents.actors.recurrent import RecurrentSamplingActor
from steadyrl.agents.base import Actor, Agent, Decision, PendingStep
from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.learner.interrupt import Interrupted
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec
from steadyrl.agents.learner.minibatch import index_batches
from steadyrl.agents.learner.schedules import Schedule
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import action_limits, build_head
from steadyrl.agents.networks.normalizers import CLIP, RewardNormaliser
from steadyrl.agents.ppo.build import (
    build_greedy_actor,
    build_host_copy,
    build_loss_spec,
    build_network,
    build_policy,
    build_sampling_actor,
    build_sampling_policy,
    gathers_in_graph,
    init_network,
    init_rollout,
    update_mode,
)
from steadyrl.agents.ppo.evaluate import RolloutEvaluator
from steadyrl.agents.ppo.fused import build_fused_rollout
from steadyrl.agents.ppo.kl_learning_rate import build_learning_rate
from steadyrl.agents.ppo.loss import explained_variance
from steadyrl.agents.ppo.minibatches import SYNC_EVERY, minibatches
from steadyrl.agents.ppo.popart import compute_advantages_popart
from steadyrl.agents.ppo.settings import PPOSettings
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.buffers.rollout.sequences import SequenceRollout
from steadyrl.core.metrics import Metrics
from steadyrl.core.saved_state import COUNT, Limits, check_limits, tensor
from steadyrl.envs.types import BlockResult, EnvSpec, Step, StepMany
from steadyrl.memory.cache_cleaner import reclaim


class PPO(Agent):
    """Collect T timesteps of N environments on the training device, then learn from all of them."""

    state_names: ClassVar[tuple[str, ...]] = (
        "_learner", "_actor", "_rollout", "_rewards", "_next_obs", "_shuffling", "_steps",
        "_steps_at_rollout_start", "_rate",
    )  # fmt: skip
    state_limits: ClassVar[Mapping[str, Limits]] = dict.fromkeys(
        ("_steps", "_steps_at_rollout_start"), COUNT
    )
    per_rank_state: tuple[str, ...] = ("actor", "shuffling", "rollout", "rewards", "next_obs")

    def __init__(
        self,
        settings: PPOSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
    ) -> None:
        settings.validate_fit(spec, total_steps)
        seeds = np.random.SeedSequence(seed).generate_state(3).tolist()
        self._settings = settings
        samples = settings.rollout_steps * spec.num_envs
        self._total_steps = total_steps
        self._parts, largest_minibatch_size = (
            settings.minibatches_of(samples),
            settings.largest_minibatch(samples),
        )
        self._head = build_head(spec.action, device, scaled=settings.scale_actions)
        mode = update_mode(settings, spec, device, total_steps)
        module = build_network(settings, spec, self._head, device)
        # First, because it checks that the memory for all parts is available.
        copies = (
            largest_minibatch_size if mode == "eager" else 2 * largest_minibatch_size
        )  # a graph has a static copy of a minibatch
        self._rollout = self._init_rollout(spec, module, device, copies)
        network = init_network(module, settings, device, seeds[0])
        self._network, self._obs_normaliser = module, module.normaliser
        self._gathers_in_graph = gathers_in_graph(settings, mode, device)
        self._learner = Learner(self._build_loss_spec(largest_minibatch_size), network, mode)
        self._evaluator = RolloutEvaluator(self._learner, self._head, largest_minibatch_size, mode)
        self._host_copy = build_host_copy(settings, network, spec, lambda: self._learner.updates)
        size = settings.rollout_steps, spec.num_envs
        self._actor = build_sampling_actor(
            module, self._head, device, *size, seeds[1], self._host_copy, mode
        )
        self._actor.in_first_rollout = lambda: self._steps_at_rollout_start == 0
        self._shuffling = torch.Generator().manual_seed(seeds[2])
        self._rewards = RewardNormaliser(spec.num_envs, settings.gamma)
        self._rate = build_learning_rate(settings, lambda: self._anneal(settings.learning_rates))
        self._scales_rewards = settings.normalizes_reward
        self._next_obs = np.zeros((spec.num_envs, *spec.observation_shape), spec.dtype)
        self._fused_rollout = build_fused_rollout(
            settings, self._actor, self._rollout, self._rewards, self._next_obs
        )
        self._steps = self._steps_at_rollout_start = (
            0  # valid steps observed, now and at the rollout's start
        )
        self._frozen_hparams: tuple[int, tuple[float, ...]] | None = None  # see `_freeze_hparams`

    def _build_loss_spec(self, max_batch_size: int) -> LossSpec:
        """Return the loss spec; subclasses extend its loss."""
        return build_loss_spec(
            self._settings, self._head, max_batch_size, gathers_in_graph=self._gathers_in_graph
        )

    def _init_rollout(
        self, spec: EnvSpec, network: ActorCritic, device: torch.device, copies: int
    ) -> RolloutBuffer:
        """Build the rollout buffer; subclasses that store more per sample override this."""
        return init_rollout(self._settings, spec, self._head, network, device, copies=copies)

    @override
    def attach_comm(self, comm: Comm) -> None:
        super().attach_comm(comm)
        self._rewards.comm = comm
        if self._obs_normaliser is not None:
            self._obs_normaliser.comm = comm

    @override
    def reshard(self, departed_states: Sequence[Mapping[str, Any]]) -> None:
        for state in departed_states:
            self._rewards.merge_state(state["rewards"])
        self._rollout.clear()
        if self._obs_normaliser is not None:
            self._obs_normaliser.freeze_()
        self._steps_at_rollout_start = self._steps

    @override
    def check_consistency(self, steps: int, pending: PendingStep | None, obs: NDArray[Any]) -> None:
        if self._steps != steps:
            raise ValueError(f"agent.steps: is {self._steps}, the run's are {steps}")
        rollout, alone = self._rollout, self._comm.is_single
        own = int(rollout.flags[2, : rollout.position].sum())
        theirs = steps - self._steps_at_rollout_start
        if not own <= theirs <= (own if alone else steps) or (theirs and not rollout.position):
            raise ValueError(
                f"agent.steps_at_rollout_start: is {self._steps_at_rollout_start} at step "
                f"{steps}, but the rollout holds {own} valid steps"
            )
        limits = action_limits(self._head)
        check_limits(rollout.action[: rollout.position], limits)
        if self._obs_normaliser is not None:
            self._obs_normaliser.check_current(steps, frozen=pending is None)
        if pending is None:
            if steps and not np.array_equal(self._next_obs, obs):
                raise ValueError("agent.next_obs: differs from the environments' observations")
            return
        decision, num_envs = pending[0], len(self._next_obs)
        action = rollout.action
        tensor(decision.raw_action, (num_envs, *action.shape[2:]), action.dtype, limits)
        for numbers in (decision.log_prob, decision.value):
            if numbers is not None or self._actor.stores_log_prob:
                tensor(numbers, (num_envs,), torch.float32)
        if isinstance(self._actor, RecurrentSamplingActor):
            tensor(decision.hidden_state, tuple(self._actor.hidden_state.shape), torch.float32)

    @property
    @override
    def syncs_this_step(self) -> bool:
        timesteps = self._rollout.position + 1
        return timesteps % SYNC_EVERY == 0 or timesteps == self._settings.rollout_steps

    @property
    def learning_rate(self) -> float:
        """Learning rate in the update that ends the current rollout."""
        return self._rate.current()

    @property
    def clip(self) -> float:
        """Clip range of the probability ratio in the update that ends the current rollout."""
        return self._anneal(self._settings.clips)

    @property
    def entropy_coef(self) -> float:
        """Entropy coefficient in the update that ends the current rollout."""
        return self._anneal(self._settings.entropy_coefs)

    @property
    def _loss_scalars(self) -> tuple[float, ...]:
        """What the loss takes besides the batch."""
        varies = self._settings.entropy_coef_varies
        return (self.clip, self.entropy_coef) if varies else (self.clip,)

    def _freeze_hparams(self) -> tuple[float, ...]:
        """Return learning rate and loss scalars of the next update, fixed as its rollout begins."""
        if self._frozen_hparams is None or self._frozen_hparams[0] != self._steps_at_rollout_start:
            self._frozen_hparams = (
                self._steps_at_rollout_start,
                (self.learning_rate, *self._loss_scalars),
            )
        return self._frozen_hparams[1]

    def _anneal(self, schedule: Callable[[int], Schedule]) -> float:
        """Return a schedule's value for this rollout, from the steps at its start.

        So the first update uses the initial value and, after k of K rollouts, linear annealing
        gives 1 − k/K (Huang et al. 2022, detail 4). A warm-up also counts the rollout's own steps.
        """
        rollout = self._settings.rollout_steps * len(self._next_obs) * self._comm.size
        return schedule(self._total_steps).at(self._steps_at_rollout_start, ahead=rollout)

    @classmethod
    def policy(
        cls, settings: PPOSettings, spec: EnvSpec, device: torch.device
    ) -> tuple[ActorCritic, Actor]:
        """Build the network of a trained policy, and the actor that takes its mode."""
        return build_policy(settings, spec, device)

    @override
    @classmethod
    def sampling_policy(
        cls, settings: PPOSettings, spec: EnvSpec, device: torch.device, *, num_envs: int, seed: int
    ) -> tuple[ActorCritic, Actor]:
        """Build the network with an actor that samples from its distribution."""
        return build_sampling_policy(settings, spec, device, num_envs=num_envs, seed=seed)

    def actor(self, num_envs: int, *, explore: bool) -> Actor:
        """Return the sampling actor, or one that takes the mode."""
        if not explore:
            return build_greedy_actor(self._network, self._head, self.device, self._host_copy)
        if num_envs != len(self._next_obs):
            raise ValueError(f"rollouts have {len(self._next_obs)} environments, not {num_envs}")
        return self._actor

    def observe(self, decision: Decision, step: Step) -> None:
        """Store the timestep and count its valid steps."""
        rollout = self._rollout
        if rollout.position == 0:
            self._freeze_hparams()
        reward = np.clip(step.reward, -1, 1) if self._settings.clip_reward else step.reward
        obs = decision.obs
        if self._obs_normaliser is not None and self._steps_at_rollout_start == 0:
            seen = obs.to(self.device)
            obs = self._obs_normaliser(seen)
            valid = rollout.to_device(np.flatnonzero(step.valid))
            self._obs_normaliser.update(seen.index_select(0, valid))
        assert decision.raw_action is not None
        if isinstance(rollout, SequenceRollout):
            assert decision.hidden_state is not None
            rollout.store_hidden_state(decision.hidden_state)
        transition = reward, step.terminated, step.truncated, step.valid
        rollout.add(obs, decision.raw_action, decision.log_prob, decision.value, *transition)
        if self._scales_rewards:
            self._rewards.add(step.reward, step.valid)
        self._steps += self._comm.global_count(step.valid)
        np.copyto(self._next_obs, step.obs)

    @override
    def collect_block(
        self, decision: Decision, run: StepMany | None, steps: int
    ) -> BlockResult | None:
        updates_statistics = (
            self._obs_normaliser is not None and self._steps_at_rollout_start == 0
        )  # they change at every timestep
        if (
            run is None
            or self._fused_rollout is None
            or updates_statistics
            or not self._comm.is_single
        ):
            return None
        self._freeze_hparams()
        block = self._fused_rollout(decision, run, steps)
        self._steps += block.steps
        return block

    def update(self) -> Metrics | None:
        """Update once the rollout is full: compute advantages, learn for some epochs, clear it.

        It is a transaction: if a stop request interrupts it, everything is restored, and the whole
        update is due again after resuming.
        """
        timesteps, stop = self._settings.rollout_steps, self._learner.stop
        if self._rollout.position < timesteps or stop.confirmed:
            return None
        shuffling = self._shuffling.get_state()
        try:
            metrics = self._update_in_transaction()
        except Interrupted:
            self._shuffling.set_state(shuffling)
            return None
        if self._obs_normaliser is not None:
            valid = (
                self._rollout.valid_indices if self._steps_at_rollout_start else None
            )  # the first rollout's are counted already
            self._obs_normaliser.update_from(
                self._rollout.obs.flatten(0, 1), valid, self._evaluator.max_batch_size
            )
        self._rollout.clear()
        self._steps_at_rollout_start = self._steps
        return metrics

    def _update_in_transaction(self) -> Metrics | None:
        others = self._rollout.reward, self._rollout.value, *self._rate.tensors
        with self._learner.transaction(*others):
            self._compute_advantages()
            samples = len(self._rollout.valid_indices)
            some = samples if self._comm.is_single else sum(self._comm.all_gather(samples))
            return self._learn() if some else None

    def _compute_advantages(self) -> None:
        """Compute advantages from rewards and values; V(obs[T]) takes one more forward pass."""
        rollout, s = self._rollout, self._settings
        uses_autocast = self._learner.uses_autocast
        if self._scales_rewards:
            rollout.reward.mul_(self._rewards.scale).clamp_(-CLIP, CLIP)
        with torch.inference_mode():
            obs = rollout.to_device(self._next_obs)
            if self._obs_normaliser is not None and self._steps_at_rollout_start == 0:
                obs = self._obs_normaliser(obs)
                self._obs_normaliser.set_identity_()
            if uses_autocast or not self._actor.stores_log_prob:
                self._evaluator(rollout)
            if isinstance(self._actor, RecurrentSamplingActor):  # from its hidden state
                valid = rollout.flags[-1, -1].numpy()
                last_value = self._actor.values(obs, valid, self._learner.forward)
            else:
                on_host = None if uses_autocast else self._evaluator.value
                last_value = self._learner.forward(obs)[1] if on_host is None else on_host(obs)
        how = {"gamma": s.gamma, "gae_lambda": s.gae_lambda}
        if (popart := self._network.popart) is None:
            rollout.compute_advantages(last_value, **how)
        else:
            compute_advantages_popart(
                rollout, last_value, self._network.value, popart, self._comm, **how
            )

    def _batches(self, epochs: int) -> Iterator[tuple[Any, Any]]:
        """Return the minibatches of all epochs over valid samples, with their sample weights."""
        if not (self._gathers_in_graph and self._comm.is_single):
            return chain.from_iterable(self._epoch() for _ in range(epochs))
        orders = (self._rollout.shuffled(self._shuffling) for _ in range(epochs))
        return index_batches(
            self._rollout.flat(), orders, self._parts, self._evaluator.max_batch_size
        )

    def _epoch(self) -> Iterator[tuple[Any, Any]]:
        rollout, parts, order = self._rollout, self._parts, self._shuffling
        if not self._comm.is_single or isinstance(rollout, SequenceRollout):
            return minibatches(rollout, parts, order, self._comm)
        scratch = None if self._learner.padding is None else self._learner.padding.scratch
        return zip(rollout.minibatches(parts, order, scratch), repeat(None))  # uniform weights

    def _learn(self) -> Metrics | None:
        """Run all epochs over the rollout."""
        rate, *numbers = self._freeze_hparams()
        adapts = False  # by the second minibatch: the first one sees the policy that acted
        for batch, sample_weight in self._batches(self._settings.epochs):
            if self._learner.stop.confirmed:
                raise Interrupted
            self._learner.sample_weight = sample_weight
            self._learner.step(batch, rate, *numbers)
            if self._learner.kl_exceeded:
                break
            if adapts:
                rate = self._rate.after_step(rate, self._learner.watched)
            adapts = True
        variance = explained_variance(*self._rollout.values_and_returns(), self._comm)
        return self._learner.means({"train/explained_variance": variance})

    def scalars(self) -> dict[str, float]:
        """Return the schedules' values."""
        numbers = {"train/learning_rate": self.learning_rate, "train/clip": self.clip}
        return numbers | {"train/entropy_coef": self.entropy_coef}

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the rollout with its noise, and of the network."""
        return {"rollout": self._rollout.nbytes + self._actor.nbytes, **super().nbytes()}

    def release(self) -> None:
        """Free the rollout and the network."""
        device = self.device
        self._rollout.release()
        del (
            self._learner,
            self._network,
            self._actor,
            self._host_copy,
            self._evaluator,
            self._fused_rollout,
        )
        reclaim(device)  # the learner is part of a reference cycle

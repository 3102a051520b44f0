"""PPO (Schulman et al. 2017): collect a rollout, learn from it for some epochs, forget it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.actor_critic import ActorCritic
from agents.base import Agent, Decision
from agents.compiling import compile_mode
from agents.flat import FlatNetwork
from agents.heads import build_head
from agents.networks import is_large_image
from agents.normaliser import CLIP, RewardNormaliser
from agents.ppo_acting import Noise, build_acting
from agents.ppo_loss import explained_variance
from agents.ppo_settings import PPOSettings
from agents.ppo_update import METRICS, PPOUpdate
from agents.schedules import linear
from buffers.batch import RolloutBatch
from buffers.rollout import RolloutBuffer
from envs.types import EnvSpec, Step
from memory.errors import NonFiniteError
from memory.metrics import Metrics
from memory.reclaim import reclaim


class PPO(Agent):
    """Collect T rows from N environments on the training device, then learn from all of them."""

    def __init__(
        self,
        settings: PPOSettings,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        total_steps: int,
    ) -> None:
        settings.refuse_unfit(spec)
        seeds = np.random.SeedSequence(seed).generate_state(3).tolist()
        self._settings = settings
        self._device = device
        self._rows = settings.rollout_steps * spec.num_envs
        self._parts = settings.minibatches_of(self._rows)
        self._total_steps = total_steps
        self._head = build_head(spec.action, device)
        module = self._build_module(spec, seeds[0])
        self._network = FlatNetwork(module, device)
        self._observations = module.normaliser
        self._acting = build_acting(module, self._head, device)
        self._noise = Noise(
            self._head,
            rows=settings.rollout_steps,
            num_envs=spec.num_envs,
            device=device,
            seed=seeds[1],
        )
        self._shuffling = torch.Generator(device).manual_seed(seeds[2])
        self._rewards = RewardNormaliser(spec.num_envs, settings.gamma)
        self._rollout = RolloutBuffer(
            steps=settings.rollout_steps,
            num_envs=spec.num_envs,
            observation_shape=spec.observation_shape,
            observation_dtype=getattr(torch, spec.dtype),
            action_shape=self._head.action_shape,
            action_dtype=self._head.action_dtype,
            device=device,
        )
        expected = total_steps // self._rows * settings.epochs * self._parts
        mode = compile_mode(
            settings.compile,
            device,
            expected,
            large_images=is_large_image(spec.observation_shape),
        )
        self._piece = -(-self._rows // self._parts)  # rows of the largest minibatch
        self._update = PPOUpdate(settings, self._network, self._head, mode, self._piece)
        self._next_obs: NDArray[Any] = np.zeros(
            (spec.num_envs, *spec.observation_shape), dtype=spec.dtype
        )
        self._steps = 0  # valid environment steps observed
        self.updates = 0

    def _build_module(self, spec: EnvSpec, seed: int) -> ActorCritic:
        s = self._settings
        with torch.device("meta"):
            module = ActorCritic(
                spec.observation_shape,
                spec.dtype,
                self._head,
                hidden=s.hidden,
                activation=s.activation,
                shared=s.shared_trunk,
                normalise=s.normalize_obs,
                log_std=s.log_std_init,
            )
        module.to_empty(device="cpu")
        module.start_(torch.Generator().manual_seed(seed))
        return module

    @property
    def learning_rate(self) -> float:
        """Step size of Adam at this step."""
        s = self._settings
        return self._annealed(s.learning_rate, s.anneal_learning_rate)

    @property
    def clip(self) -> float:
        """How far the ratio may move from 1 at this step."""
        return self._annealed(self._settings.clip, self._settings.anneal_clip)

    def _annealed(self, start: float, anneal: bool) -> float:
        # When less than a rollout is left, the update at hand is the last one: exactly zero.
        horizon = self._total_steps - self._rows + 1
        return linear(start, 0.0 if anneal else start, horizon, self._steps)

    def act(self, obs: NDArray[Any], *, explore: bool = True) -> Decision:
        """Sample actions; if not explore, take the most likely ones."""
        return self._acting.sample(obs, self._noise) if explore else self._acting.greedy(obs)

    def observe(self, decision: Decision, step: Step) -> None:
        """Store the row and count its valid steps."""
        reward = np.clip(step.reward, -1, 1) if self._settings.clip_reward else step.reward
        self._rollout.add(
            decision.obs,
            decision.action,
            decision.log_prob,
            decision.value,
            reward,
            step.terminated,
            step.truncated,
            step.valid,
        )
        if self._settings.normalize_reward:
            self._rewards.add(step.reward, step.valid)
        self._steps += int(np.count_nonzero(step.valid))
        self._next_obs = step.obs

    def update(self) -> Metrics | None:
        """Once the rollout is full: finish it, learn from it for some epochs, forget it."""
        if not self._rollout.full:
            return None
        self._finish_rollout()
        rows = next(self._rollout.minibatches(1, self._shuffling), None)
        metrics = None if rows is None else self._learn(rows)
        self._rollout.clear()
        return metrics

    def _finish_rollout(self) -> None:
        """Turn rewards and values into advantages; V(obs[T]) is one more forward pass."""
        rollout, s = self._rollout, self._settings
        if s.normalize_reward:
            rollout.reward.mul_(self._rewards.scale).clamp_(-CLIP, CLIP)
        self._acting.score(rollout, self._piece)
        with torch.inference_mode():
            obs = torch.from_numpy(self._next_obs).to(self._device, non_blocking=True)
            _, last_value = self._network.module(obs)
        rollout.finish(last_value, gamma=s.gamma, gae_lambda=s.gae_lambda)

    def _learn(self, rows: RolloutBatch) -> Metrics:
        """Take the epochs over the rollout; let the normaliser move on with all its rows."""
        sums = torch.zeros(len(METRICS), device=self._device)
        before = self.updates
        self._update.set_rates(self.learning_rate, self.clip)
        for batch in self._minibatches():
            metrics = self._update(batch)
            sums += metrics
            self.updates += 1
            if self._update.exceeded(metrics):
                break
        # On the host a look at the loss is free; on a device it would stall the queue, and
        # the metrics' next flush finds it.
        if sums.device.type == "cpu" and not math.isfinite(sums[0].item()):
            raise NonFiniteError(f"train/loss is not finite at update {self.updates}")
        if self._observations is not None:
            self._observations.update(rows.obs)
        explained = explained_variance(rows.value, rows.return_)
        values = torch.cat((sums / (self.updates - before), explained.unsqueeze(0)))
        return Metrics((*METRICS, "train/explained_variance"), values)

    def _minibatches(self) -> Iterator[RolloutBatch]:
        for _ in range(self._settings.epochs):
            yield from self._rollout.minibatches(self._parts, self._shuffling)

    def scalars(self) -> dict[str, float]:
        """Return the learning rate of this moment."""
        return {"train/learning_rate": self.learning_rate}

    def weights(self) -> dict[str, Tensor]:
        """Return the network by layer, and what it normalises observations with."""
        module = self._network.module
        return self._network.views(self._network.weights) | dict(module.named_buffers())

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the rollout and of weights, gradient and optimiser."""
        return {"rollout": self._rollout.nbytes, "networks": 4 * self._network.weights.nbytes}

    def state_dict(self) -> dict[str, Any]:
        """Return weights, normalisers, optimiser, rollout, generators and counters."""
        buffers = self._network.module.named_buffers()
        return {
            "weights": self._network.weights.clone(),
            "observations": {name: tensor.clone() for name, tensor in buffers},
            "rewards": self._rewards.state_dict(),
            "optimizer": self._update.state_dict(),
            "rollout": self._rollout.state_dict(),
            "next_obs": torch.from_numpy(self._next_obs.copy()),
            "noise": self._noise.state_dict(),
            "shuffling": self._shuffling.get_state(),
            "steps": self._steps,
            "updates": self.updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._network.load(state["weights"])
        for name, tensor in self._network.module.named_buffers():
            tensor.copy_(state["observations"][name])
        self._rewards.load_state_dict(state["rewards"])
        self._update.load_state_dict(state["optimizer"])
        self._rollout.load_state_dict(state["rollout"])
        self._next_obs = state["next_obs"].numpy().copy()
        self._noise.load_state_dict(state["noise"])
        self._shuffling.set_state(state["shuffling"])
        self._steps = state["steps"]
        self.updates = state["updates"]

    def release(self) -> None:
        """Free the rollout and the network."""
        self._rollout.release()
        del self._network, self._update, self._acting, self._noise, self._next_obs
        reclaim(self._device)  # an update refers to itself, by its methods

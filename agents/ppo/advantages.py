"""What PPO learns towards: advantages and returns of a rollout.

`build.py` chooses transforms of rewards and observations, which leave them as they are (here) or
clip, scale and normalise them (`transforms.py`), and plain values (here) or PopArt's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.engine.cpu.policy import value_on_host
from steadyrl.agents.engine.engine import Engine
from steadyrl.agents.learner.comm import SINGLE_PROCESS, Comm
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.reward_normaliser import RewardNormaliser
from steadyrl.agents.learner.statistics import count_sum_sumsq
from steadyrl.agents.networks.actor_critic import ActorCritic
from steadyrl.agents.networks.distributions import Head
from steadyrl.agents.networks.normalizers import ObservationNormaliser
from steadyrl.agents.rollout_agent import Targets
from steadyrl.buffers.rollout.buffer import RolloutBuffer

LogProbsAndValues = tuple[Tensor, Tensor]  # log-probabilities and values [B]

ROUNDING = 1e-6**2  # squared rounding error of float32 sums: a smaller relative variance is 0

# (rollout, V(obs[T]) [N], comm): compute advantages and returns in place. Collective.
ComputeAdvantages = Callable[[RolloutBuffer, Tensor, Comm], None]


class Advantages(Targets):
    """Compute log-probabilities and values where the actor did not, then advantages."""

    def __init__(
        self,
        rewards: RewardTransform,
        observations: ObservationTransform,
        evaluator: RolloutEvaluator,
        compute: ComputeAdvantages,
    ) -> None:
        self.rewards, self.observations, self.evaluator = rewards, observations, evaluator
        self._compute, self._comm = compute, SINGLE_PROCESS

    @override
    @torch.no_grad()
    def begin_update(self, next_obs: Tensor) -> Tensor:
        return self.observations.begin_update(next_obs)

    @override
    def __call__(self, rollout: RolloutBuffer, next_obs: Tensor) -> None:
        """Compute advantages from rewards and values; V(obs[T]) takes one more forward pass.

        They are 0 until a reward is not: the errors of an untrained value function, normalised to
        the size of any others, would change the policy at random.
        """
        rewarded = self.rewards.any_reward_so_far(rollout.reward)
        self.rewards.scale_(rollout.reward)
        with torch.inference_mode():
            self.evaluator.evaluate_missing(rollout)
            last_value = self.evaluator.last_value(rollout, next_obs)
        self._compute(rollout, last_value, self._comm)
        if not rewarded:
            rollout.advantage.zero_()

    @override
    def metrics(self, value: Tensor, return_: Tensor) -> dict[str, Tensor]:
        return {"train/explained_variance": explained_variance(value, return_, self._comm)}

    @override
    def after_update(self, rollout: RolloutBuffer) -> None:
        self.observations.after_update(rollout)

    @override
    def attach_comm(self, comm: Comm) -> None:
        self._comm = self.rewards.comm = comm
        self.observations.attach_comm(comm)


def compute_advantages(
    rollout: RolloutBuffer, last_value: Tensor, comm: Comm, *, gamma: float, gae_lambda: float
) -> None:
    """Compute advantages and returns from values as the network outputs them."""
    del comm
    rollout.compute_advantages(last_value, gamma=gamma, gae_lambda=gae_lambda)


class RolloutEvaluator:
    """Compute log-probabilities and values of rollouts, `max_batch_size` samples at a time.

    If the learner is compiled, so is this. `actor_evaluates`: the actor stored both already, which
    counts unless updates have another precision.
    """

    def __init__(
        self,
        learner: Learner,
        head: Head,
        max_batch_size: int,
        engine: Engine,
        *,
        actor_evaluates: bool = False,
    ) -> None:
        self.max_batch_size, self.actor_evaluates = max_batch_size, actor_evaluates
        self._learner, self._head = learner, head
        self._graph = engine.evaluator(
            self._evaluate_functional, learner.network, lambda: learner.stop
        )
        # V(obs[T]) on the host: N observations are too few for a graph of a fixed size. None for
        # subclasses of ActorCritic, which may compute values differently.
        module = learner.network.module if self._graph is not None else None
        self.value = value_on_host(module) if type(module) is ActorCritic else None

    def evaluate_missing(self, rollout: RolloutBuffer) -> None:
        """Fill in what the actor did not store in the precision of updates.

        A run that resumed with another engine may have stored it for some timesteps only.
        """
        if self._learner.uses_autocast or not (self.actor_evaluates and rollout.evaluated):
            self.evaluate(rollout)

    def evaluate(self, rollout: RolloutBuffer) -> None:
        """Fill in the rollout's log-probabilities and values.

        They come from the network that updates use, so that the first ratio is exactly 1 although
        the host's sums may differ in the last digit.
        """
        stored = (rollout.obs, rollout.action, rollout.log_prob, rollout.value[:-1])
        chunks = (tensor.flatten(0, 1).split(self.max_batch_size) for tensor in stored)
        for obs, action, *outputs in zip(*chunks, strict=True):
            for output, scores in zip(outputs, self._evaluate(obs, action), strict=True):
                output.copy_(scores)

    def last_value(self, rollout: RolloutBuffer, obs: Tensor) -> Tensor:
        """Return V(obs[T]) [N]."""
        del rollout
        if self.value is None or self._learner.uses_autocast:
            value: Tensor = self._learner.forward(obs)[1]
            return value
        return self.value(obs)

    def _evaluate(self, obs: Tensor, action: Tensor) -> LogProbsAndValues:
        """Return log-probabilities and values [B]."""
        learner = self._learner
        if self._graph is None or learner.uses_autocast or len(obs) != self.max_batch_size:
            return self._evaluate_eager(obs, action)
        log_prob, value = self._graph(learner.network.weights, obs, action)
        return log_prob, value

    def _evaluate_eager(self, obs: Tensor, action: Tensor) -> LogProbsAndValues:
        parameters, value = self._learner.forward(obs)
        return self._head.log_prob(parameters, action), value

    def _evaluate_functional(
        self, weights: Tensor, obs: Tensor, action: Tensor
    ) -> LogProbsAndValues:
        parameters, value = self._learner.network.function(weights)(obs)
        return self._head.log_prob(parameters, action), value


class RewardTransform(RewardNormaliser):
    """Rewards as they are.

    Derives from RewardNormaliser only so that every checkpoint of PPO has the same fields.
    """

    state_names = (*RewardNormaliser.state_names, "any_so_far")

    any_so_far = False  # whether any reward was not 0

    def any_reward_so_far(self, reward: Tensor) -> bool:
        """Collective: return whether any reward so far was not 0, these [T, N] included."""
        self.any_so_far = self.any_so_far or bool(reward.any())
        if not self.comm.is_single:
            self.any_so_far = any(self.comm.all_gather(self.any_so_far))
        return self.any_so_far

    @override
    def merge_state(self, state: Mapping[str, Any]) -> None:
        super().merge_state(state)
        self.any_so_far |= state["any_so_far"]

    def to_store(self, reward: NDArray[np.float32], valid: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the rewards [N] that the rollout stores."""
        return reward

    def scale_(self, reward: Tensor) -> None:
        """Scale a full rollout's rewards [T, N]."""


class ObservationTransform:
    """Observations as they are."""

    stores_normalised = False  # whether the rollout holds normalised observations
    normaliser: ObservationNormaliser | None = None

    def to_store(self, obs: Tensor, valid: NDArray[np.bool_]) -> Tensor:
        """Return the observations [N, …] that the rollout stores."""
        return obs

    def begin_update(self, next_obs: Tensor) -> Tensor:
        """Return the observation [N, …] at t = T as the rollout would store it."""
        return next_obs

    def after_update(self, rollout: RolloutBuffer) -> None:
        """Count the rollout's observations, for the next rollout."""

    def freeze(self) -> None:
        """Normalise by the statistics so far."""

    def attach_comm(self, comm: Comm) -> None:
        """Collective: compute statistics over all ranks."""

    def check_consistency(self, *, frozen: bool) -> None:
        """Raise ValueError if the statistics are impossible."""


def explained_variance(value: Tensor, return_: Tensor, comm: Comm = SINGLE_PROCESS) -> Tensor:
    """Collective: return 1 − Var(R − V) / Var(R) [] over all ranks' samples; 0 for equal returns.

    Returns are sums of advantages and values; differences within their rounding error are 0.
    """
    parts = torch.stack((return_, return_ - value))
    if comm.is_single:
        squares = parts.square().mean(1)
        variance, unexplained = parts.var(1, correction=0)
    else:
        sums = comm.all_reduce_(torch.stack([*map(count_sum_sumsq, parts)]))
        total, first, second = sums.unbind(1)
        squares = second / total
        variance, unexplained = squares - (first / total).square()
    varies = variance > ROUNDING * squares.sum()
    return torch.where(varies, 1 - unexplained / variance, 0.0).float()

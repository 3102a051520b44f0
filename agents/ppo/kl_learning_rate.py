"""PPO's learning rate as large as the KL divergence of its steps allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.extension import Extension
from steadyrl.agents.learner.interrupt import Interrupted
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec
from steadyrl.agents.ppo.advantages import RewardTransform
from steadyrl.agents.ppo.build import PPOParts
from steadyrl.agents.ppo.settings import HIGHEST_RATE, LOWEST_RATE, PPOSettings
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.core.saved_state import Limits

FACTOR = 1.5  # of one change
TOLERANCE = 2.0  # the KL divergence may be so many times as large, or as small


class KLLearningRate(Extension):
    """A rate that follows the KL divergence from the policy of the rollout (Rudin et al. 2022).

    After a minibatch whose KL divergence was above twice the target, the next step's rate is 1.5
    times smaller; below half the target, 1.5 times larger. It carries over to the next rollout.
    A rollout's first minibatch does not change it, as it evaluates the policy that acted. Nor does
    any before the first reward, unless RND has given advantages: they are 0 until then.
    """

    state_names: ClassVar[tuple[str, ...]] = ("kl_rate",)
    state_limits: ClassVar[Mapping[str, Limits]] = {"kl_rate": Limits(LOWEST_RATE, HIGHEST_RATE)}

    _learner: Learner
    _rewards: RewardTransform
    _rollout: RolloutBuffer

    def __init__(self, settings: PPOSettings, *_: object, **__: object) -> None:
        """Start at `learning_rate`; the other arguments of extensions are not used."""
        assert settings.target_kl is not None
        self._target, self._steps_in_rollout = settings.target_kl, 0
        self._adapts = True
        self.kl_rate = torch.tensor(settings.learning_rate, dtype=torch.float64)  # []

    @override
    def loss_spec(self, spec: LossSpec) -> LossSpec:
        return replace(spec, watched="train/approx_kl")

    @override
    def attach(self, parts: PPOParts) -> None:
        self._learner, self._rewards = parts.learner, parts.targets.rewards
        self._rollout = parts.rollout

    @override
    def learning_rate(self, rate: float) -> float:
        return self.kl_rate.item()

    @override
    def after_targets(self, next_obs: Tensor) -> None:
        self._steps_in_rollout = 0
        self._adapts = self._rewards.any_so_far or self._any_advantage()

    def _any_advantage(self) -> bool:
        """Collective: return whether any advantage is not 0."""
        return any(self._rewards.comm.all_gather(bool(self._rollout.advantage.any())))

    @override
    def after_step(self, rate: float) -> float:
        self._steps_in_rollout += 1
        adapts = self._adapts and self._steps_in_rollout > 1
        kl = self._learner.watched if adapts else self._target
        if kl > TOLERANCE * self._target:
            self.kl_rate.div_(FACTOR).clamp_(min=LOWEST_RATE)
        elif 0 < kl < self._target / TOLERANCE:
            self.kl_rate.mul_(FACTOR).clamp_(max=HIGHEST_RATE)
        return self.kl_rate.item()

    @override
    @contextmanager
    def transaction(self) -> Iterator[None]:
        before = self.kl_rate.clone()
        try:
            yield
        except Interrupted:
            self.kl_rate.copy_(before)
            raise

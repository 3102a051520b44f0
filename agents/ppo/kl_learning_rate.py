"""PPO's learning rate: of a schedule, or as large as the KL divergence of its steps allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from steadyrl.agents.ppo.settings import HIGHEST_RATE, LOWEST_RATE, PPOSettings
from steadyrl.core.saved_state import Limits
from steadyrl.core.state import Stateful

FACTOR = 1.5  # of one change
TOLERANCE = 2.0  # the KL divergence may be so many times as large, or as small


class LearningRate(Stateful):
    """A rate that is fixed from the start of a rollout on, by a schedule."""

    tensors: tuple[Tensor, ...] = ()  # its state, for a transaction

    def __init__(self, scheduled: Callable[[], float]) -> None:
        self._scheduled = scheduled

    def current(self) -> float:
        """Return the rate at the current rollout's start."""
        return self._scheduled()

    def after_step(self, rate: float, kl: float) -> float:
        """Return the rate of the next step; `kl`: KL divergence before the step just taken."""
        return rate


class KLLearningRate(LearningRate):
    """A rate that follows the KL divergence from the policy of the rollout (Rudin et al. 2022).

    After a minibatch whose KL divergence was above twice the target, the next step's rate is 1.5
    times smaller; below half the target, as much larger. The rate goes on from rollout to rollout.
    """

    state_names = ("rate",)
    state_limits: ClassVar[Mapping[str, Limits]] = {"rate": Limits(LOWEST_RATE, HIGHEST_RATE)}

    def __init__(self, start: float, target: float) -> None:
        self.rate = torch.tensor(start, dtype=torch.float64)  # []
        self.tensors = (self.rate,)
        self._target = target

    def current(self) -> float:
        """Return the rate of the next step."""
        return self.rate.item()

    def after_step(self, rate: float, kl: float) -> float:
        """Adapt the rate to the KL divergence of a minibatch."""
        del rate
        if kl > TOLERANCE * self._target:
            self.rate.div_(FACTOR).clamp_(min=LOWEST_RATE)
        elif 0 < kl < self._target / TOLERANCE:
            self.rate.mul_(FACTOR).clamp_(max=HIGHEST_RATE)
        return self.current()


def build_learning_rate(settings: PPOSettings, scheduled: Callable[[], float]) -> LearningRate:
    """Return the learning rate; `scheduled` returns that of the schedule for a rollout."""
    if settings.adapt_learning_rate == "none":
        return LearningRate(scheduled)
    assert settings.target_kl is not None
    return KLLearningRate(settings.learning_rate, settings.target_kl)

"""Values that are learned in units of their own: PopArt (van Hasselt et al. 2016) for PPO.

The value head says V̂, and V = μ + σ V̂ is what the rollout's advantages are computed of. μ and σ are
running statistics of the returns, which move once a rollout; the head moves with them, so that V
stays what it was.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from agents.statistics import Statistics
from agents.world import World
from buffers.rollout import RolloutBuffer

DECAY = 0.9  # of what a rollout counts for, with every later one
SMALLEST = 1e-4  # a standard deviation: what never varies must not be blown up


class ValueUnits(Statistics):
    """Running mean and standard deviation of the returns, without the bias of an empty start."""

    moments: Tensor

    def __init__(self) -> None:
        super().__init__()
        # What all rollouts count for together, and the sums of their mean R and mean R².
        self.register_buffer("moments", torch.empty(3, dtype=torch.float64))

    @override
    def check_ranges(self) -> None:
        share, _, second = self.moments.tolist()
        if not (0 <= share <= 1 and second >= 0):
            raise ValueError(f"units.moments: are {self.moments.tolist()}, which no returns have")

    def start_(self) -> None:
        """Forget all returns."""
        self.moments.zero_()

    @property
    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        """What V̂ = 0 stands for and how much V̂ = 1 is more []; 0 and 1 before any return."""
        share, first, second = self.moments.unbind()
        known = share > 0
        share = torch.where(known, share, 1.0)
        mean = first / share
        std = (second / share - mean.square()).clamp(min=SMALLEST**2).sqrt()
        return mean, torch.where(known, std, 1.0)

    def take_in(self, returns: Tensor, world: World) -> None:
        """Together: count the returns [M] of a rollout, as much as those of all before decay."""
        x = returns.double()
        sums = torch.stack((x.new_tensor(len(x)), x.sum(), x.square().sum()))
        count, first, second = world.sum_(sums).unbind()
        if count > 0:
            new = torch.stack((torch.ones_like(first), first / count, second / count))
            self.moments.lerp_(new, 1 - DECAY)


@torch.no_grad()
def finish(
    rollout: RolloutBuffer,
    last_value: Tensor,
    head: nn.Linear,
    units: ValueUnits | None,
    world: World,
    *,
    gamma: float,
    gae_lambda: float,
) -> None:
    """Turn rewards and values into advantages, and into returns in the units of the value head.

    Together, where there are such units: they move on to this rollout's returns, and the head, and
    the values that the rollout holds, with them.
    """
    if units is None:
        rollout.finish(last_value, gamma=gamma, gae_lambda=gae_lambda)
        return
    mean, std = units.mean_and_std
    rollout.value[:-1].mul_(std).add_(mean)
    rollout.finish((last_value * std + mean).float(), gamma=gamma, gae_lambda=gae_lambda)
    units.take_in(rollout.return_.flatten().index_select(0, rollout.valid), world)
    new_mean, new_std = units.mean_and_std
    head.weight.mul_(std / new_std)
    head.bias.mul_(std / new_std).add_((mean - new_mean) / new_std)
    for part in (rollout.value, rollout.return_):
        part.sub_(new_mean).div_(new_std)

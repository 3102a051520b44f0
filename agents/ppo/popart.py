"""PopArt (van Hasselt et al. 2016) for PPO: the value head predicts normalised returns.

The head outputs V̂, and advantages are computed from V = μ + σ V̂. μ and σ are running statistics
of the returns, updated once per rollout. The head is rescaled with them, so that V is preserved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.networks.normalizers import PopArt
from steadyrl.buffers.rollout.buffer import RolloutBuffer


@torch.no_grad()
def compute_advantages_popart(
    rollout: RolloutBuffer,
    last_value: Tensor,
    comm: Comm,
    *,
    head: nn.Linear,
    popart: PopArt,
    gamma: float,
    gae_lambda: float,
) -> None:
    """Compute advantages, and returns in the normalised units of the value head.

    Collective: updates the statistics with this rollout's returns, and rescales the head and
    the stored values accordingly.
    """
    mean, std = popart.mean_and_std
    rollout.value[:-1].mul_(std).add_(mean)
    rollout.compute_advantages(
        (last_value * std + mean).float(), gamma=gamma, gae_lambda=gae_lambda
    )
    popart.update(rollout.return_.flatten().index_select(0, rollout.valid_indices), comm)
    new_mean, new_std = popart.mean_and_std
    head.weight.mul_(std / new_std)
    head.bias.mul_(std / new_std).add_((mean - new_mean) / new_std)
    for part in (rollout.value, rollout.return_):
        part.sub_(new_mean).div_(new_std)

"""The mathematics of PPO (Schulman et al. 2017) as free functions of tensors.

Every mean is a dot product with `weight` [B], which is 1/M for each of a minibatch's M rows and 0
for padding. So the loss of a minibatch is the sum of the losses of its pieces, whatever their size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor


class PPOLoss(NamedTuple):
    """The loss and its parts, all [] and summed over rows with their weights."""

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def normalised(advantage: Tensor, weight: Tensor) -> Tensor:
    """Return (A − mean) / (std + 1e-8) [B]; zeros for a minibatch of one."""
    centred = advantage - torch.dot(advantage, weight)
    return centred / (torch.dot(centred.square(), weight).sqrt() + 1e-8)


def policy_loss(ratio: Tensor, advantage: Tensor, clip: float | Tensor) -> Tensor:
    """Return −min(ρA, clip(ρ, 1−ε, 1+ε)A) [B] (equation 7).

    Written as −min(ρA, A + ε|A|), which is the same and has one branch to differentiate.
    """
    return -(ratio * advantage).clamp(max=advantage + clip * advantage.abs())


def value_loss(value: Tensor, return_: Tensor) -> Tensor:
    """Return (V − R)² [B]."""
    return F.mse_loss(value, return_, reduction="none")


def clipped_value_loss(value: Tensor, old: Tensor, return_: Tensor, clip: float | Tensor) -> Tensor:
    """Return max((V − R)², (V_old + clip(V − V_old, −ε, ε) − R)²) [B]."""
    clipped = old + (value - old).clamp(-clip, clip)  # type: ignore[arg-type]
    return torch.maximum(value_loss(value, return_), value_loss(clipped, return_))


def approximate_kl(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """Return ρ − 1 − log ρ [B]: unbiased for KL(old, new) and never negative (Schulman 2020)."""
    return ratio - 1 - log_ratio


def explained_variance(value: Tensor, return_: Tensor) -> Tensor:
    """Return 1 − Var(R − V) / Var(R) []; 0 when the returns are all equal."""
    spread = return_.var(correction=0)
    unexplained = (return_ - value).var(correction=0)
    return torch.where(spread > 0, 1 - unexplained / spread, torch.zeros_like(spread))

"""Heads that say how likely each return is: on fixed atoms, or by its quantiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor
from typing_extensions import override

from agents.dqn_loss import QHead


class CategoricalHead(QHead):
    """C51 (Bellemare et al. 2017): the probabilities of K returns, evenly spread from low to high.

    `outputs` are their logits.
    """

    def __init__(self, atoms: int, low: float, high: float, device: torch.device) -> None:
        self.shape = (atoms,)
        self._atoms = torch.linspace(low, high, atoms, device=device)
        self._low, self._high = low, high

    @override
    def returns(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        likely = outputs.softmax(-1)
        return self._atoms.expand_as(likely), likely

    @override
    def loss(self, chosen: Tensor, goals: Tensor, likely: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return Σ m (ln m − ln p), m being the goals projected on the atoms; twice."""
        assert likely is not None
        projected = project(goals, likely, self._low, self._high, self.shape[0])
        entropy = torch.xlogy(projected, projected).sum(1)
        loss = entropy - (projected * F.log_softmax(chosen, 1)).sum(1)
        return loss, loss.detach()


class QuantileHead(QHead):
    """QR-DQN (Dabney et al. 2018): the returns at the middles of N equally likely parts."""

    def __init__(self, quantiles: int, device: torch.device) -> None:
        self.shape = (quantiles,)
        self._middles = (torch.arange(quantiles, device=device) + 0.5) / quantiles

    @override
    def returns(self, outputs: Tensor) -> tuple[Tensor, None]:
        return outputs, None

    @override
    def loss(self, chosen: Tensor, goals: Tensor, likely: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return Σ_i E_j |τ_i − 1{δ_ij < 0}| ℓ(δ_ij), ℓ Huber and δ_ij = goal_j − θ_i; twice."""
        apart = goals.unsqueeze(1) - chosen.unsqueeze(2)  # [B, N, M]
        huber = F.smooth_l1_loss(apart, torch.zeros_like(apart), reduction="none")
        below = (apart.detach() < 0).to(apart.dtype)
        rho = (self._middles.unsqueeze(1) - below).abs() * huber
        each = rho.mean(2) if likely is None else (rho * likely.unsqueeze(1)).sum(2)
        loss = each.sum(1)
        return loss, loss.detach()


def project(goals: Tensor, likely: Tensor, low: float, high: float, atoms: int) -> Tensor:
    """Give the probability [B, M] of every goal [B, M] to the two atoms next to it: [B, K].

    Each gets the more the nearer it is. Without a scatter, whose sums a GPU takes in any order.
    """
    places = (goals.clamp(low, high) - low) * ((atoms - 1) / (high - low))
    numbers = torch.arange(atoms, device=goals.device, dtype=goals.dtype)
    shares = 1 - (places.unsqueeze(2) - numbers).abs()  # [B, M, K]
    return (likely.unsqueeze(2) * shares.clamp_(min=0)).sum(1)

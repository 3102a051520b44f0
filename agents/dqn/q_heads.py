"""Q-heads: scalar, categorical (C51) and quantile outputs, their targets and losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from typing_extensions import override

from steadyrl.agents.networks.q_network import QNetwork

Q = Callable[..., Tensor]  # (observations, noise of noisy layers) → outputs


class QHead(ABC):
    """A network's output per action [*shape]: a value, or a distribution of returns."""

    shape: tuple[int, ...]
    network: type[QNetwork] = QNetwork  # a head with layers of its own has a subclass

    @abstractmethod
    def atoms_and_probs(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return atom values and their probabilities [..., M] (None: uniform)."""

    def values(self, outputs: Tensor) -> Tensor:
        """Return the expected returns […] of outputs […, *shape]."""
        atoms, probs = self.atoms_and_probs(outputs)
        return atoms.mean(-1) if probs is None else (atoms * probs).sum(-1)

    @abstractmethod
    def loss(
        self, prediction: Tensor, targets: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return loss and detached TD error [B] per sample.

        `prediction` [B, *shape]: output for the action taken; `targets` and `probs` [B, M]: target
        distribution.
        """


class ScalarHead(QHead):
    """One output per action: its expected return."""

    shape = ()

    def __init__(self, *, huber: bool) -> None:
        self._distance = F.smooth_l1_loss if huber else F.mse_loss

    @override
    def atoms_and_probs(self, outputs: Tensor) -> tuple[Tensor, None]:
        return outputs.unsqueeze(-1), None

    @override
    def values(self, outputs: Tensor) -> Tensor:
        return outputs

    @override
    def loss(
        self, prediction: Tensor, targets: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return ℓ(Q(s, a) − y), y the expected target, ℓ Huber (δ = 1) or squared."""
        target = targets.squeeze(1) if probs is None else (targets * probs).sum(1)
        return self._distance(prediction, target, reduction="none"), prediction.detach() - target


class CategoricalHead(QHead):
    """C51 (Bellemare et al. 2017): logits of K atoms, evenly spaced from `low` to `high`."""

    def __init__(self, atoms: int, low: float, high: float, device: torch.device) -> None:
        self.shape = (atoms,)
        self._atoms = torch.linspace(low, high, atoms, device=device)
        self._low, self._high = low, high

    @override
    def atoms_and_probs(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        probs = outputs.softmax(-1)
        return self._atoms.expand_as(probs), probs

    @override
    def loss(
        self, prediction: Tensor, targets: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return KL(m ‖ p) as loss and as TD error, m being the targets projected on the atoms."""
        assert probs is not None
        projected = project(targets, probs, self._low, self._high, self.shape[0])
        entropy = torch.xlogy(projected, projected).sum(1)
        loss = entropy - (projected * F.log_softmax(prediction, 1)).sum(1)
        return loss, loss.detach()


class QuantileHead(QHead):
    """QR-DQN (Dabney et al. 2018): the returns at the midpoints of N equal quantile fractions."""

    def __init__(self, quantiles: int, device: torch.device) -> None:
        self.shape = (quantiles,)
        self._fractions = (torch.arange(quantiles, device=device) + 0.5) / quantiles

    @override
    def atoms_and_probs(self, outputs: Tensor) -> tuple[Tensor, None]:
        return outputs, None

    @override
    def loss(
        self, prediction: Tensor, targets: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return Σ_i E_j |τ_i − 1{δ_ij < 0}| ℓ(δ_ij), δ_ij = target_j − θ_i, ℓ Huber.

        It is the loss and the TD error.
        """
        td_errors = targets.unsqueeze(1) - prediction.unsqueeze(2)  # [B, N, M]
        huber = F.smooth_l1_loss(td_errors, torch.zeros_like(td_errors), reduction="none")
        below = (td_errors.detach() < 0).to(td_errors.dtype)
        quantile_huber = (self._fractions.unsqueeze(1) - below).abs() * huber
        each = (
            quantile_huber.mean(2)
            if probs is None
            else (quantile_huber * probs.unsqueeze(1)).sum(2)
        )
        loss = each.sum(1)
        return loss, loss.detach()


def project(targets: Tensor, probs: Tensor, low: float, high: float, atoms: int) -> Tensor:
    """Project a distribution of targets [B, M] on the atoms of the support: probabilities [B, K].

    Each target splits its probability between its two neighbours by linear interpolation. The
    dense form avoids scatter-add, whose order of summation is undefined on a GPU.
    """
    bin_positions = (targets.clamp(low, high) - low) * ((atoms - 1) / (high - low))
    numbers = torch.arange(atoms, device=targets.device, dtype=targets.dtype)
    interpolation = 1 - (bin_positions.unsqueeze(2) - numbers).abs()  # [B, M, K]
    return (probs.unsqueeze(2) * interpolation.clamp_(min=0)).sum(1)


def gather_actions(outputs: Tensor, action: Tensor) -> Tensor:
    """Return the outputs of actions [B] from outputs [B, A, *shape]."""
    index = action.unsqueeze(1)
    if outputs.dim() > 2:
        shape = outputs.shape[2:]
        index = index.view(-1, 1, *(1 for _ in shape)).expand(-1, 1, *shape)
    return outputs.gather(1, index).squeeze(1)

"""Q-value heads: scalar, categorical (C51) and quantile outputs, their targets and losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from typing_extensions import override

Q = Callable[..., Tensor]  # of observations, and of noise where layers are noisy


class QHead(ABC):
    """What a network says of each action [*shape]: a number, or a distribution over returns."""

    shape: tuple[int, ...]

    @abstractmethod
    def atoms_and_probs(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the M returns […, M] that outputs […, *shape] tell of, and how likely each is.

        None says that all are equally likely.
        """

    def values(self, outputs: Tensor) -> Tensor:
        """Return the expected returns […] that outputs […, *shape] stand for."""
        atoms, probs = self.atoms_and_probs(outputs)
        return atoms.mean(-1) if probs is None else (atoms * probs).sum(-1)

    def best_atoms_and_probs(
        self, outputs: Tensor, values: Tensor, *, from_outputs: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the returns [B, M], and how likely each is, of the best actions by values [B, A].

        `from_outputs` values are those that outputs [B, A, *shape] stand for.
        """
        del from_outputs
        return self.atoms_and_probs(gather_actions(outputs, values.argmax(1)))

    @abstractmethod
    def loss(
        self, prediction: Tensor, targets: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return each row's loss [B], and its TD error [B], detached.

        `prediction` [B, *shape] is said of the action taken; `targets` [B, M], so likely [B, M], are
        what its return should be.
        """


class ScalarHead(QHead):
    """One number: the expected return itself."""

    shape = ()

    def __init__(self, *, huber: bool) -> None:
        operators = torch.ops.aten  # their functions in Python ask for shapes first
        self._distance = (operators.smooth_l1_loss if huber else operators.mse_loss).default

    @override
    def atoms_and_probs(self, outputs: Tensor) -> tuple[Tensor, None]:
        return outputs.unsqueeze(-1), None

    @override
    def values(self, outputs: Tensor) -> Tensor:
        return outputs

    @override
    def best_atoms_and_probs(
        self, outputs: Tensor, values: Tensor, *, from_outputs: bool
    ) -> tuple[Tensor, Tensor | None]:
        if from_outputs:  # the largest
            return values.amax(1, keepdim=True), None
        return super().best_atoms_and_probs(outputs, values, from_outputs=False)

    @override
    def loss(
        self, prediction: Tensor, targets: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return ℓ(Q(s, a) − y), ℓ Huber with δ = 1 or the square, y the expected goal."""
        target = targets.squeeze(1) if probs is None else (targets * probs).sum(1)
        return self._distance(prediction, target, 0), prediction.detach() - target


class CategoricalHead(QHead):
    """C51 (Bellemare et al. 2017): the probabilities of K returns, evenly spread from low to high.

    `outputs` are their logits.
    """

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
        """Return Σ m (ln m − ln p), m being the goals projected on the atoms; twice."""
        assert probs is not None
        projected = project(targets, probs, self._low, self._high, self.shape[0])
        entropy = torch.xlogy(projected, projected).sum(1)
        loss = entropy - (projected * F.log_softmax(prediction, 1)).sum(1)
        return loss, loss.detach()


class QuantileHead(QHead):
    """QR-DQN (Dabney et al. 2018): the returns at the middles of N equally likely parts."""

    def __init__(self, quantiles: int, device: torch.device) -> None:
        self.shape = (quantiles,)
        self._middles = (torch.arange(quantiles, device=device) + 0.5) / quantiles

    @override
    def atoms_and_probs(self, outputs: Tensor) -> tuple[Tensor, None]:
        return outputs, None

    @override
    def loss(
        self, prediction: Tensor, targets: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return Σ_i E_j |τ_i − 1{δ_ij < 0}| ℓ(δ_ij), ℓ Huber and δ_ij = goal_j − θ_i; twice."""
        td_errors = targets.unsqueeze(1) - prediction.unsqueeze(2)  # [B, N, M]
        huber = F.smooth_l1_loss(td_errors, torch.zeros_like(td_errors), reduction="none")
        below = (td_errors.detach() < 0).to(td_errors.dtype)
        quantile_huber = (self._middles.unsqueeze(1) - below).abs() * huber
        each = (
            quantile_huber.mean(2)
            if probs is None
            else (quantile_huber * probs.unsqueeze(1)).sum(2)
        )
        loss = each.sum(1)
        return loss, loss.detach()


def project(targets: Tensor, probs: Tensor, low: float, high: float, atoms: int) -> Tensor:
    """Give the probability [B, M] of every goal [B, M] to the two atoms next to it: [B, K].

    Each gets the more the nearer it is. Without a scatter, whose sums a GPU takes in any order.
    """
    bin_positions = (targets.clamp(low, high) - low) * ((atoms - 1) / (high - low))
    numbers = torch.arange(atoms, device=targets.device, dtype=targets.dtype)
    shares = 1 - (bin_positions.unsqueeze(2) - numbers).abs()  # [B, M, K]
    return (probs.unsqueeze(2) * shares.clamp_(min=0)).sum(1)


def gather_actions(outputs: Tensor, action: Tensor) -> Tensor:
    """Return what outputs [B, A, *shape] say of actions [B]."""
    index = action.unsqueeze(1)
    if outputs.dim() > 2:
        shape = outputs.shape[2:]
        index = index.view(-1, 1, *(1 for _ in shape)).expand(-1, 1, *shape)
    return outputs.gather(1, index).squeeze(1)

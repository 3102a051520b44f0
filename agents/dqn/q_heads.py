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
    def returns(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the M returns […, M] that outputs […, *shape] tell of, and how likely each is.

        None says that all are equally likely.
        """

    def values(self, outputs: Tensor) -> Tensor:
        """Return the expected returns […] that outputs […, *shape] stand for."""
        returns, likely = self.returns(outputs)
        return returns.mean(-1) if likely is None else (returns * likely).sum(-1)

    def best(self, outputs: Tensor, values: Tensor, *, own: bool) -> tuple[Tensor, Tensor | None]:
        """Return the returns [B, M], and how likely each is, of the best actions by values [B, A].

        `own` values are those that outputs [B, A, *shape] stand for.
        """
        del own
        return self.returns(said_of(outputs, values.argmax(1)))

    @abstractmethod
    def loss(self, chosen: Tensor, goals: Tensor, likely: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return each row's loss [B], and its TD error [B], detached.

        `chosen` [B, *shape] is said of the action taken; `goals` [B, M], so likely [B, M], are
        what its return should be.
        """


class ScalarHead(QHead):
    """One number: the expected return itself."""

    shape = ()

    def __init__(self, *, huber: bool) -> None:
        operators = torch.ops.aten  # their functions in Python ask for shapes first
        self._distance = (operators.smooth_l1_loss if huber else operators.mse_loss).default

    @override
    def returns(self, outputs: Tensor) -> tuple[Tensor, None]:
        return outputs.unsqueeze(-1), None

    @override
    def values(self, outputs: Tensor) -> Tensor:
        return outputs

    @override
    def best(self, outputs: Tensor, values: Tensor, *, own: bool) -> tuple[Tensor, Tensor | None]:
        if own:  # the largest
            return values.amax(1, keepdim=True), None
        return super().best(outputs, values, own=False)

    @override
    def loss(self, chosen: Tensor, goals: Tensor, likely: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ℓ(Q(s, a) − y), ℓ Huber with δ = 1 or the square, y the expected goal."""
        goal = goals.squeeze(1) if likely is None else (goals * likely).sum(1)
        return self._distance(chosen, goal, 0), chosen.detach() - goal


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


def said_of(outputs: Tensor, action: Tensor) -> Tensor:
    """Return what outputs [B, A, *shape] say of actions [B]."""
    index = action.unsqueeze(1)
    if outputs.dim() > 2:
        shape = outputs.shape[2:]
        index = index.view(-1, 1, *(1 for _ in shape)).expand(-1, 1, *shape)
    return outputs.gather(1, index).squeeze(1)

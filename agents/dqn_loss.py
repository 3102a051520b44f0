"""The mathematics of DQN as free functions of tensors, and what a network says of an action."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from agents.learner import RowLoss
from buffers.replay import ReplayBatch

Q = Callable[[Tensor], Tensor]
METRICS = ("train/td_error", "train/q_mean")


class QHead(ABC):
    """What a network says of each action [*shape]: a number, or a distribution over returns."""

    shape: tuple[int, ...]

    @abstractmethod
    def values(self, outputs: Tensor) -> Tensor:
        """Return the expected returns […] that outputs […, *shape] stand for."""

    @abstractmethod
    def loss(self, chosen: Tensor, successor: Tensor, batch: ReplayBatch) -> tuple[Tensor, Tensor]:
        """Return each row's loss [B], and its TD error [B], detached.

        `chosen` [B, *shape] is said of the action taken, `successor` [B, *shape], without a
        gradient, of the best action in the state it led to.
        """


class ScalarHead(QHead):
    """One number: the expected return itself."""

    shape = ()

    def __init__(self, *, huber: bool) -> None:
        self._distance = F.smooth_l1_loss if huber else F.mse_loss

    def values(self, outputs: Tensor) -> Tensor:
        """Return them as they are."""
        return outputs

    def loss(self, chosen: Tensor, successor: Tensor, batch: ReplayBatch) -> tuple[Tensor, Tensor]:
        """Return ℓ(Q(s, a) − y), ℓ Huber with δ = 1 or the square, y = R + discount · Q⁻(s', a*).

        `discount` is γ^m, or 0 after a termination.
        """
        goal = batch.reward + batch.discount * successor
        return self._distance(chosen, goal, reduction="none"), chosen.detach() - goal


def said_of(outputs: Tensor, action: Tensor) -> Tensor:
    """Return what outputs [B, A, *shape] say of actions [B]."""
    index = action.unsqueeze(1)
    if outputs.dim() > 2:
        shape = outputs.shape[2:]
        index = index.view(-1, 1, *(1 for _ in shape)).expand(-1, 1, *shape)
    return outputs.gather(1, index).squeeze(1)


def td_loss(online: Q, target: Q, batch: ReplayBatch, *, head: QHead, double: bool) -> RowLoss:
    """Return w · ℓ of every row, its TD errors as reports.

    a* is the best action by the online network (van Hasselt et al. 2016), or by the target
    network when not double.
    """
    outputs = online(batch.obs)
    with torch.no_grad():
        after = target(batch.next_obs)
        judge = online(batch.next_obs) if double else after
        successor = said_of(after, head.values(judge).argmax(1))
    chosen = said_of(outputs, batch.action)
    each, td_error = head.loss(chosen, successor, batch)
    metrics = (td_error.abs(), head.values(chosen.detach()))
    return RowLoss(batch.weight * each, metrics, (td_error,))

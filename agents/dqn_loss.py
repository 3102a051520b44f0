"""The mathematics of DQN as free functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from buffers.batch import ReplayBatch

Q = Callable[[Tensor], Tensor]


class TDLoss(NamedTuple):
    """The weighted loss, and what is reported of it."""

    loss: Tensor  # []
    td_error: Tensor  # [B], detached
    q_mean: Tensor  # [], detached


def td_target(online: Q, target: Q, batch: ReplayBatch, *, double: bool) -> Tensor:
    """Return R + discount · Q⁻(s', a*) [B].

    a* is the best action by the online network (van Hasselt et al. 2016), or by the target
    network when not double. `discount` is γ^m, or 0 after a termination.
    """
    with torch.no_grad():
        next_q = target(batch.next_obs)  # [B, A]
        if double:
            best = online(batch.next_obs).argmax(1, keepdim=True)
            value = next_q.gather(1, best).squeeze(1)
        else:
            value = next_q.amax(1)
        return batch.reward + batch.discount * value


def td_loss(online: Q, target: Q, batch: ReplayBatch, *, double: bool, huber: bool) -> TDLoss:
    """Return mean(w · ℓ(Q(s, a) − y)), ℓ Huber with δ = 1 or the square."""
    goal = td_target(online, target, batch, double=double)
    q = online(batch.obs).gather(1, batch.action.unsqueeze(1)).squeeze(1)  # [B]
    each = (F.smooth_l1_loss if huber else F.mse_loss)(q, goal, reduction="none")
    detached = q.detach()
    return TDLoss((batch.weight * each).mean(), detached - goal, detached.mean())

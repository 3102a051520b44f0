"""Adam on one flat tensor: a single fused kernel per step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam


class AdamState(NamedTuple):
    """First and second moments [P] and the number of steps taken (a tensor on the device)."""

    mean: Tensor
    square: Tensor
    step: Tensor


def adam_state(weights: Tensor) -> AdamState:
    """Return the state before the first step."""
    return AdamState(
        torch.zeros_like(weights),
        torch.zeros_like(weights),
        torch.zeros((), dtype=torch.float32, device=weights.device),
    )


@torch.no_grad()
def adam_(
    weights: Tensor, gradient: Tensor, state: AdamState, learning_rate: Tensor, *, epsilon: float
) -> None:
    """Take one step in place (Kingma & Ba 2015, algorithm 1; β .9 and .999)."""
    adam(
        [weights],
        [gradient],
        [state.mean],
        [state.square],
        [],
        [state.step],
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=0.9,
        beta2=0.999,
        lr=learning_rate,
        weight_decay=0.0,
        eps=epsilon,
    )


@torch.no_grad()
def clip_(gradient: Tensor, max_norm: float) -> Tensor:
    """Scale `gradient` to a norm of at most `max_norm` (0: leave it); return the norm before."""
    norm = torch.linalg.vector_norm(gradient)
    if max_norm > 0:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm

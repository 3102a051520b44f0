"""Adam on one flat tensor: a single fused kernel per step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def once(number: Tensor) -> Tensor:
    """Return a number [] that a graph computes once, not again for all whom it is multiplied with.

    A compiler writes arithmetic into every loop that needs it, but keeps what a reduction gave.
    """
    return number.expand(16).amax()


class AdamState(NamedTuple):
    """First and second moments [P] and the number of steps taken (a tensor on the device)."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


def adam_state(weights: Tensor) -> AdamState:
    """Return the state before the first step."""
    return AdamState(
        torch.zeros_like(weights),
        torch.zeros_like(weights),
        torch.zeros((), dtype=torch.float32, device=weights.device),
    )


BETA1, BETA2 = 0.9, 0.999

MOST_COUNTED = 2**24  # steps: float32 counts no further


def adam_(
    weights: Tensor, gradient: Tensor, state: AdamState, learning_rate: Tensor, *, epsilon: float
) -> None:
    """Take one step in place (Kingma & Ba 2015, algorithm 1)."""
    # The operator that torch.optim.Adam(fused=True) ends in, without the way there: grouping
    # tensors by device and type costs more than the step itself.
    state.step.add_(1)
    torch._fused_adam_(
        [weights],
        [gradient],
        [state.exp_avg],
        [state.exp_avg_sq],
        [],
        [state.step],
        lr=learning_rate,
        beta1=BETA1,
        beta2=BETA2,
        weight_decay=0.0,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
    )


def adam_traceable_(
    weights: Tensor, gradient: Tensor, state: AdamState, learning_rate: Tensor, *, epsilon: float
) -> None:
    """Compute the same in plain operations, which a compiler fuses; it cannot see into `adam`."""
    state.step.add_(1)
    state.exp_avg.lerp_(gradient, 1 - BETA1)
    state.exp_avg_sq.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    size = once(learning_rate / (1 - BETA1**state.step))
    scale = once((1 - BETA2**state.step).rsqrt())
    weights.sub_(size * state.exp_avg / (state.exp_avg_sq.sqrt() * scale + epsilon))


def clip_grad_norm_(gradient: Tensor, max_norm: float, *, looking: bool = True) -> Tensor:
    """Scale `gradient` to a norm of at most `max_norm` (0: leave it); return the norm before.

    `looking` at it is free on the host, and nothing for a graph.
    """
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if max_norm <= 0:
        return norm
    if looking:  # most gradients need no scaling
        size = norm.item()
        if not size <= max_norm:
            gradient.mul_(max_norm / (size + 1e-6))
    else:
        gradient.mul_(once(torch.clamp(max_norm / (norm + 1e-6), max=1.0)))
    return norm

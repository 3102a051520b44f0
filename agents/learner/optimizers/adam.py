"""Adam and AdamW on one flat tensor: a single fused kernel per step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

BETA1, BETA2 = 0.9, 0.999
LARGEST_SQUARE, SMALLEST_SQUARE = 1e30, 1e-30  # of gradients; smaller ones vanish in float32
MOST_COUNTED = 2**24  # largest step that float32 can count


def once(number: Tensor) -> Tensor:
    """Return a number [] that a compiled graph computes once instead of in every loop that uses it.

    Inductor inlines pointwise arithmetic into each consumer, but materialises a reduction.
    """
    return number.expand(16).amax()


class AdamState(NamedTuple):
    """First and second moments [P] and the number of steps, a tensor on the device."""

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


def check_adam_state(state: AdamState, updates: int, *, skips: bool) -> None:
    """Raise ValueError if the state is impossible after `updates` updates.

    `skips`: some steps may not have counted.
    """
    steps, most = state.step.item(), min(updates, MOST_COUNTED)
    if not (0 <= steps <= most and steps % 1 == 0 and (skips or steps == most)):
        raise ValueError(f"optimizer_state.step: is {steps:g} after {updates} updates")
    if (state.exp_avg_sq < 0).any() or (state.exp_avg_sq > LARGEST_SQUARE).any():
        raise ValueError(
            f"optimizer_state.exp_avg_sq: holds a number outside 0 to {LARGEST_SQUARE:g}"
        )
    # For any gradients, by Cauchy–Schwarz: exp_avg² ≤ 52.9 · exp_avg_sq. The rest is for rounding.
    if (state.exp_avg.square() > 60 * state.exp_avg_sq + SMALLEST_SQUARE).any():
        raise ValueError(
            "optimizer_state.exp_avg: is larger than optimizer_state.exp_avg_sq allows"
        )


def adam_(
    weights: Tensor,
    gradient: Tensor,
    state: AdamState,
    learning_rate: Tensor,
    *,
    epsilon: float,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> None:
    """Take one step in place (Kingma & Ba 2015, algorithm 1).

    Weight decay is added to the gradient; `decoupled`: to the step (Loshchilov & Hutter 2019).
    """
    step = adamw if decoupled else adam
    step(
        [weights],
        [gradient],
        [state.exp_avg],
        [state.exp_avg_sq],
        [],
        [state.step],
        fused=True,
        lr=learning_rate,  # type: ignore[arg-type]
        beta1=BETA1,
        beta2=BETA2,
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
    )


def adam_traceable_(
    weights: Tensor,
    gradient: Tensor,
    state: AdamState,
    learning_rate: Tensor,
    *,
    epsilon: float,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> None:
    """Compute the same step in plain operations, which Inductor fuses; the fused one is opaque."""
    gradient = decay(weights, gradient, learning_rate, weight_decay, decoupled=decoupled)
    update_moments_(state, gradient)
    size = once(learning_rate / (1 - BETA1**state.step))
    scale = once((1 - BETA2**state.step).rsqrt())
    weights.sub_(size * state.exp_avg / (state.exp_avg_sq.sqrt() * scale + epsilon))


def update_moments_(state: AdamState, gradient: Tensor) -> None:
    """Count a step and average its gradient, in place (Kingma & Ba 2015, algorithm 1)."""
    state.step.add_(1)
    state.exp_avg.lerp_(gradient, 1 - BETA1)
    state.exp_avg_sq.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)


def decay(
    weights: Tensor,
    gradient: Tensor,
    learning_rate: Tensor,
    weight_decay: float,
    *,
    decoupled: bool,
) -> Tensor:
    """Return the gradient with weight decay, or decay the weights in place if `decoupled`."""
    if not weight_decay:
        return gradient
    if not decoupled:
        return gradient.add(weights, alpha=weight_decay)
    weights.mul_(once(1 - learning_rate * weight_decay))
    return gradient


def clip_grad_norm_(gradient: Tensor, max_norm: float, *, read_on_host: bool = True) -> Tensor:
    """Scale `gradient` to a norm of at most `max_norm` (0: no clipping); return the norm before.

    `read_on_host`: read the norm and skip the multiplication when it is small enough. That is
    free on the host, synchronises on a device and cannot be traced.
    """
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if max_norm <= 0:
        return norm
    if read_on_host:  # most gradients need no clipping
        size = norm.item()
        if not size <= max_norm:
            gradient.mul_(max_norm / (size + 1e-6))
    else:
        gradient.mul_(once(torch.clamp(max_norm / (norm + 1e-6), max=1.0)))
    return norm

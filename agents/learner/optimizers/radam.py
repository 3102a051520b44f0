"""RAdam on one flat tensor, in plain operations."""

from __future__ import annotations

from torch import Tensor

from steadyrl.agents.learner.optimizers.adam import (
    BETA1,
    BETA2,
    AdamState,
    decay,
    once,
    update_moments_,
)

RHO = 2 / (1 - BETA2) - 1  # ρ∞, the longest simple moving average that the second moment is like


def radam_(
    weights: Tensor,
    gradient: Tensor,
    state: AdamState,
    learning_rate: Tensor,
    *,
    epsilon: float,
    weight_decay: float,
) -> None:
    """Take one step in place (Liu et al. 2020, algorithm 2).

    As long as the second moment has too few gradients (ρ ≤ 5), the step is the first moment alone.
    """
    gradient = decay(weights, gradient, learning_rate, weight_decay, decoupled=False)
    update_moments_(state, gradient)
    t = state.step.double()  # ρ is a small difference of large numbers
    correction = 1 - BETA2**t
    rho = RHO - 2 * t * BETA2**t / correction
    rectification = (rho - 4) * (rho - 2) * RHO / ((RHO - 4) * (RHO - 2) * rho)
    size = once((learning_rate / (1 - BETA1**t)).float())
    scale = once((rectification.clamp(min=0) * correction).sqrt().float())
    rectified = once((rho > 5).float())
    adaptive = scale / (state.exp_avg_sq.sqrt() + epsilon)
    weights.sub_(size * state.exp_avg * (rectified * adaptive + (1 - rectified)))

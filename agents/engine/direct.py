"""Operators of an eager step without the checks around them, or torch's public ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from steadyrl.agents.learner.adam import BETA1, BETA2, AdamState, adam_
from steadyrl.core.gates.torch_private import fused_adam, run_backward


def direct_backward() -> Callable[[Tensor, Tensor], Any]:
    """Return a function that accumulates the gradient of weight · loss, for both [B]."""
    return run_backward() or (lambda loss, weight: loss.backward(weight))


def direct_adam() -> Callable[..., None]:
    """Return `adam_` as one call of the operator behind it."""
    operator = fused_adam()
    if operator is None:
        return adam_

    def step_(
        weights: Tensor,
        gradient: Tensor,
        state: AdamState,
        learning_rate: Tensor,
        *,
        epsilon: float,
    ) -> None:
        state.step.add_(1)
        operator(
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

    return step_

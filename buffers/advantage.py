"""Generalised advantage estimation (Schulman et al. 2016) on rows [T, N] of the timeline.

δ_t = r_t + γ (1 − terminated_t) V_{t+1} − V_t and A_t = δ_t + γ λ (1 − ended_t) A_{t+1}.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffers.kernel import kernel


def factors(
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
    valid: NDArray[np.bool_],
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap: NDArray[np.float64],
    carry: NDArray[np.float64],
) -> None:
    """Write γ (1 − terminated) and γ λ (1 − ended), all [T, N].

    An episode ends at t also when row t + 1 is invalid: a cut is a truncation of row t.
    """
    np.multiply(~terminated, gamma, out=bootstrap)
    ended = terminated | truncated
    ended[:-1] |= ~valid[1:]
    np.multiply(~ended, gamma * gae_lambda, out=carry)


@kernel
def gae_host(reward, value, bootstrap, carry, advantage):  # type: ignore[no-untyped-def]
    """Write advantages [T, N] from rewards [T, N], values [T + 1, N] and the factors."""
    steps, envs = reward.shape
    following = np.zeros(envs)
    for t in range(steps - 1, -1, -1):
        for env in range(envs):
            delta = reward[t, env] + bootstrap[t, env] * value[t + 1, env] - value[t, env]
            following[env] = delta + carry[t, env] * following[env]
            advantage[t, env] = following[env]


def gae_torch(
    reward: Tensor, value: Tensor, bootstrap: Tensor, carry: Tensor, advantage: Tensor
) -> None:
    """Write the same with torch operations: one launch per row once the δ are known."""
    known = value.double()
    delta = torch.addcmul(reward - known[:-1], bootstrap, known[1:])
    for t in range(len(delta) - 2, -1, -1):
        delta[t].addcmul_(carry[t], delta[t + 1])
    advantage.copy_(delta)

"""Generalised advantage estimation (Schulman et al. 2016), for the host and for a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from steadyrl.core.jit import compiled


@compiled
def gae_host(reward, value, flags, gamma, gae_lambda, advantage):  # type: ignore[no-untyped-def]
    """Write advantages [T, N] from rewards [T, N], values [T + 1, N] and flags [3, T, N].

    An episode ends at t also when row t + 1 is invalid: a cut is a truncation of row t.
    """
    terminated, truncated, valid = flags
    steps, envs = reward.shape
    following = np.zeros(envs)
    for t in range(steps - 1, -1, -1):
        for env in range(envs):
            cut = t + 1 < steps and not valid[t + 1, env]
            ended = terminated[t, env] or truncated[t, env] or cut
            bootstrap = 0.0 if terminated[t, env] else gamma
            delta = reward[t, env] + bootstrap * value[t + 1, env] - value[t, env]
            following[env] = delta + (0.0 if ended else gamma * gae_lambda) * following[env]
            advantage[t, env] = following[env]


def gae_torch(
    reward: Tensor,
    value: Tensor,
    flags: Tensor,
    gamma: float,
    gae_lambda: float,
    advantage: Tensor,
) -> None:
    """Write the same with torch operations, in a number of launches that grows with log T.

    A_t = δ_t + c_t A_{t+1} has after k doublings all terms of 2^k rows (Hillis & Steele 1986).
    """
    terminated, truncated, valid = flags
    ended = terminated | truncated
    ended[:-1] |= ~valid[1:]
    carry = (~ended).double() * (gamma * gae_lambda)
    known = value.double()
    delta = torch.addcmul(reward - known[:-1], (~terminated).double() * gamma, known[1:])
    ahead = 1
    while ahead < len(delta):
        delta[:-ahead] += carry[:-ahead] * delta[ahead:]
        carry[:-ahead] *= carry[ahead:].clone()  # which it lies in
        ahead *= 2
    advantage.copy_(delta)

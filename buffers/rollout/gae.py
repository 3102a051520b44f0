"""Generalised advantage estimation (Schulman et al. 2016), with Numba and with torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from steadyrl.core.jit import jit


@jit
def gae_host(reward, value, flags, gamma, gae_lambda, advantage):  # type: ignore[no-untyped-def]
    """Write advantages [T, N] from rewards [T, N], values [T + 1, N] and flags [3, T, N].

    An episode also ends at t if timestep t + 1 is invalid: a forced reset truncates it.
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
    """Write the same advantages as `gae_host` with O(log T) torch operations.

    Parallel scan of A_t = δ_t + c_t A_{t+1}: after k doublings, A_t has the terms of the next 2^k
    timesteps (Hillis & Steele 1986).
    """
    terminated, truncated, valid = flags
    ended = terminated | truncated
    ended[:-1] |= ~valid[1:]
    decay = (~ended).double() * (gamma * gae_lambda)
    value64 = value.double()
    delta = torch.addcmul(reward - value64[:-1], (~terminated).double() * gamma, value64[1:])
    offset = 1
    while offset < len(delta):
        delta[:-offset] += decay[:-offset] * delta[offset:]
        decay[:-offset] *= decay[offset:].clone()  # source and destination overlap
        offset *= 2
    advantage.copy_(delta)

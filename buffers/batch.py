"""Typed batches: what the buffers hand to the learners."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ReplayBatch(NamedTuple):
    """B transitions; its tensors are reused by the next sample."""

    obs: Tensor  # [B, *observation_shape]
    action: Tensor  # [B] int64
    reward: Tensor  # [B] n-step return
    discount: Tensor  # [B] γ^m, 0 where the window ends in a termination
    next_obs: Tensor  # [B, *observation_shape]
    weight: Tensor  # [B] importance weights; ones when uniform
    index: Tensor  # type: ignore[assignment]  # [B] int64 transition ids, row * N + env


class RolloutBatch(NamedTuple):
    """M valid rows of a rollout, on the training device."""

    obs: Tensor  # [M, *observation_shape]
    action: Tensor  # [M, *action_shape]
    log_prob: Tensor  # [M]
    value: Tensor  # [M]
    advantage: Tensor  # [M]
    return_: Tensor  # [M]

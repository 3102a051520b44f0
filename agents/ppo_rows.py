"""What PPO writes into its rollout: rows as they come, and what the network says of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agents.base import Decision
from agents.heads import Head
from agents.precision import Forward
from buffers.rollout import RolloutBuffer
from buffers.sequences import SequenceRollout
from envs.types import Step


def store(
    rollout: RolloutBuffer, obs: Tensor, decision: Decision, reward: NDArray[Any], step: Step
) -> None:
    """Add a row, observed and rewarded as it is to be learned from."""
    assert decision.chosen is not None
    if isinstance(rollout, SequenceRollout):
        assert decision.carry is not None
        rollout.remember(decision.carry)
    rollout.add(
        obs,
        decision.chosen,
        decision.log_prob,
        decision.value,
        reward,
        step.terminated,
        step.truncated,
        step.valid,
    )


def score(rollout: RolloutBuffer, network: Forward, head: Head, piece: int) -> None:
    """Complete the rollout's log-probabilities and values, so many rows at a time.

    They come from the network that the update uses, so that its first ratio is 1 although
    NumPy's sums may differ from torch's in the last digit.
    """
    stored = (rollout.obs, rollout.action, rollout.log_prob, rollout.value[:-1])
    pieces = (tensor.flatten(0, 1).split(piece) for tensor in stored)
    for obs, action, log_prob, value in zip(*pieces, strict=True):
        parameters, values = network(obs)
        log_prob.copy_(head.log_prob(parameters, action))
        value.copy_(values)


def last_valid(rollout: RolloutBuffer) -> NDArray[np.bool_]:
    """Return whose last row [N] is valid: the episodes of the others begin after it."""
    valid: NDArray[np.bool_] = rollout.flags[-1, -1].numpy()
    return valid

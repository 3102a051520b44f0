"""PPO's minibatches where rows alone are not enough: whole sequences, or those of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from steadyrl.agents.learner.comm import World
from steadyrl.agents.ppo.loss import moments_of
from steadyrl.buffers.rollout.buffer import RolloutBatch, RolloutBuffer, gather_minibatch
from steadyrl.buffers.rollout.sequences import SequenceBatch, SequenceRollout

# As many rows the ranks go on without each other; only a whole rollout they need together.
SETTLED_ROWS = 16


class Part(NamedTuple):
    """This rank's part of a minibatch, and what one of its rows counts for in the whole."""

    batch: RolloutBatch | SequenceBatch
    share: float | Tensor


def minibatches(
    rollout: RolloutBuffer, count: int, generator: torch.Generator, world: World
) -> Iterator[Part]:
    """Together: yield one epoch, with advantages that are normal over all ranks' rows.

    All ranks go through as many parts, though their valid rows differ; one that has none in a part
    adds a row that counts for nothing.
    """
    if isinstance(rollout, SequenceRollout):
        yield from (Part(*part) for part in sequence_minibatches(rollout, count, generator, world))
        return
    order, flat = rollout.shuffled(generator).tensor_split(count), rollout.flat()
    moments = torch.stack([moments_of(flat.advantage.index_select(0, rows)) for rows in order])
    for rows, (total, first, second) in zip(order, world.sum_(moments).tolist(), strict=True):
        if not total:
            continue
        mean = first / total
        std = max(0.0, second / total - mean**2) ** 0.5
        batch = gather_minibatch(flat, rows if len(rows) else rows.new_zeros(1))
        normal = (batch.advantage - mean) / (std + 1e-8)
        yield Part(batch._replace(advantage=normal), 1 / total if len(rows) else 0.0)


def sequence_minibatches(
    rollout: SequenceRollout, count: int, generator: torch.Generator, world: World
) -> Iterator[tuple[SequenceBatch, Tensor]]:
    """Together: yield one epoch with the rows' shares, advantages normal over all ranks' rows."""
    parts, advantage = list(rollout.shuffled_sequences(count, generator)), rollout.flat().advantage
    sums = [_masked_moments(advantage[index.timesteps], index.loss_mask) for index in parts]
    moments = world.sum_(torch.stack(sums)).tolist()
    for index, (total, first, second) in zip(parts, moments, strict=True):
        if not total:
            continue
        mean = first / total
        std = max(0.0, second / total - mean**2) ** 0.5
        batch, loss_mask = rollout.batch(index), index.loss_mask.float()
        normal = (batch.advantage - mean) / (std + 1e-8) * loss_mask
        yield batch._replace(advantage=normal), loss_mask / total


def _masked_moments(x: Tensor, loss_mask: Tensor) -> Tensor:
    """Return how many numbers count, Σx and Σx² [3] in float64."""
    x = x.double() * loss_mask
    return torch.stack((loss_mask.sum().double(), x.sum(), x.square().sum()))

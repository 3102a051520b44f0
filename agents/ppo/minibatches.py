"""Minibatches of sequences, and minibatches of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from steadyrl.agents.learner.comm import Comm
from steadyrl.agents.ppo.loss import count_sum_sumsq
from steadyrl.buffers.rollout.buffer import RolloutBatch, RolloutBuffer, gather_minibatch
from steadyrl.buffers.rollout.sequences import SequenceBatch, SequenceRollout

# Ranks all-reduce their step counts every so many timesteps; updates need whole rollouts only.
SYNC_EVERY = 16


class Minibatch(NamedTuple):
    """This rank's part of a minibatch, and the weight of a sample in the mean over all ranks."""

    batch: RolloutBatch | SequenceBatch
    sample_weight: float | Tensor


def minibatches(
    rollout: RolloutBuffer, count: int, generator: torch.Generator, comm: Comm
) -> Iterator[Minibatch]:
    """Collective: yield one epoch, with advantages normalised over the samples of all ranks.

    Every rank yields the same number of minibatches. A rank without samples in one contributes
    a sample with weight 0.
    """
    if isinstance(rollout, SequenceRollout):
        yield from (
            Minibatch(*part) for part in sequence_minibatches(rollout, count, generator, comm)
        )
        return
    order, flat = rollout.shuffled(generator).tensor_split(count), rollout.flat()
    moments = torch.stack([count_sum_sumsq(flat.advantage.index_select(0, part)) for part in order])
    for indices, (total, first, second) in zip(
        order, comm.all_reduce_(moments).tolist(), strict=True
    ):
        if not total:
            continue
        mean = first / total
        std = max(0.0, second / total - mean**2) ** 0.5
        batch = gather_minibatch(flat, indices if len(indices) else indices.new_zeros(1))
        normal = (batch.advantage - mean) / (std + 1e-8)
        yield Minibatch(batch._replace(advantage=normal), 1 / total if len(indices) else 0.0)


def sequence_minibatches(
    rollout: SequenceRollout, count: int, generator: torch.Generator, comm: Comm
) -> Iterator[tuple[SequenceBatch, Tensor]]:
    """Collective: yield one epoch of sequences with sample weights, advantages normalised."""
    parts, advantage = list(rollout.shuffled_sequences(count, generator)), rollout.flat().advantage
    sums = [_masked_count_sum_sumsq(advantage[index.timesteps], index.loss_mask) for index in parts]
    moments = comm.all_reduce_(torch.stack(sums)).tolist()
    for index, (total, first, second) in zip(parts, moments, strict=True):
        if not total:
            continue
        mean = first / total
        std = max(0.0, second / total - mean**2) ** 0.5
        batch, loss_mask = rollout.batch(index), index.loss_mask.float()
        normal = (batch.advantage - mean) / (std + 1e-8) * loss_mask
        yield batch._replace(advantage=normal), loss_mask / total


def _masked_count_sum_sumsq(x: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the count of masked-in numbers, Σx and Σx² [3] in float64."""
    x = x.double() * loss_mask
    return torch.stack((loss_mask.sum().double(), x.sum(), x.square().sum()))
